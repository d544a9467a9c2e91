"""The limits on what one request may cost, each a number that the error names and docs/api.md lists.

A limit is checked before the work that it bounds, and its request fails alone. Sizes that a user chooses are settings instead:
`--max-body`, `--max-context`, `--queue-limit`.
"""

from __future__ import annotations

# The head of a request, which is its URL and headers.
MAX_HEAD = 1 << 17  # bytes; also of the trailers behind a body

# The body of a request. Commas, colons and brackets are counted before it is parsed as JSON; those inside strings do not count.
MAX_BODY_VALUES = 1 << 20  # commas, which separate values; a prompt given as token ids has one for each token
MAX_BODY_PARTS = 1 << 18  # lists, objects and fields of objects, which cost far more memory than plain values
MAX_BODY_DEPTH = 256  # lists and objects inside each other

# Texts.
MAX_CHARACTERS = 1 << 16  # characters of all stop strings together; also of all bad_words, and of all dry_sequence_breakers
MAX_CHARACTERS_COUNTED = 1 << 18  # a text up to this length is tokenized even if it cannot fit, so the error has its token count
MAX_ERROR_CHARACTERS = 1 << 12  # characters of an error's message, which may repeat what the client sent; the rest is cut off

# Work.
MAX_SHORT_WORK = 6  # short requests that are checked and tokenized at the same time; further ones wait, and callers take turns
MAX_LONG_WORK = 2  # long requests that are checked and tokenized at the same time
MAX_FORMAT_WORK = 3  # requests whose response format is compiled at the same time, each in a process of its own
MAX_CALLER_FORMAT_WORK = 2  # the same of one caller, so that costly formats leave room for those of other callers
MAX_PROMPT_TOKENS = 1 << 22  # tokens of all prompts of one request together
MAX_METADATA = 16  # entries of the metadata of a response or batch; a key may have 64 characters, a value 512
MAX_REFERENCED_CHARACTERS = 1 << 25  # characters of all stored items that the input of /v1/responses refers to
MAX_PROMPT_LOGPROBS = 1 << 20  # of `prompt_logprobs`, or `echo` with `logprobs`: tokens of all prompts × (1 + alternatives) × n
MAX_REPLY_LOGPROBS = 1 << 23  # logprobs of the replies of a request: replies × max_tokens × (1 + alternatives + given ids)

MAX_UNREAD = 1 << 29  # bytes of replies that wait until their clients read them; beyond that connections are closed

# Batches: uploaded files, and batches of requests.
MAX_BATCH_FILE = 200 << 20  # bytes of one uploaded file
MAX_UPLOADS = 4  # files that are uploaded at the same time, each into a temporary file first; further ones get a 429
MAX_CALLER_UPLOADS = 2  # uploads of one caller at the same time, so that slow ones leave room for other callers
MAX_BATCH_LINES = 50_000  # lines of one file; as many empty lines are allowed besides
MAX_BATCH_FILES = 1_000  # files that one caller may have stored
MAX_BATCHES = 1_000  # batches that one caller may have stored; the oldest that ended is dropped for a new one
MAX_BATCH_FAULTS = 100  # lines that are reported as wrong; the rest of the file is not checked then
MAX_CUSTOM_ID = 512  # characters of `custom_id`, the client's name for a line
BATCH_KEEP_SECONDS = 30 * 24 * 3600  # how long batches that have ended, and their files, are kept

# Response formats: JSON schemas (also those of tools), grammars, regular expressions, choices.
MAX_FORMAT_CHARACTERS = 1 << 18  # characters of a schema as JSON, of a grammar, of a regular expression, or of all choices
MAX_FORMAT_NESTING = 100  # JSON values inside each other in a schema, before references are followed
MAX_FORMAT_DEPTH = 500  # how deep a recursive compiler may get in values, groups and rules, with references followed
MAX_FORMAT_VALUES = 20_000  # JSON values of a schema, or symbols of a grammar
MAX_FORMAT_REFERENCES = 2_000  # `$ref`s of a schema
MAX_FORMAT_MEMBERS = 10_000  # members of one list in a schema (`enum`, `anyOf`, …), or choices
MAX_FORMAT_RULES = 5_000  # rules of a grammar
MAX_TOOL_CHARACTERS = 1 << 20  # characters of the grammar that the server writes for the calls of a request's tools
MAX_TOOL_WORK = 1 << 22  # characters written and checked in total until the grammar of tool calls is complete
TOOL_CHECK_WORK = 1_000  # checking a part of that grammar counts as this many characters, besides those of the part
TOOL_SECONDS = 6.0  # processor time for checking the schemas of all tools of a request, in the process described below
MAX_LITERAL_DEPTH = 100  # values inside each other, with references followed, in a tool's schema if calls are not JSON

# The helper process that compiles a response format before the server does.
COMPILE_SECONDS = 3.0  # processor time for one format
COMPILE_WALL_SECONDS = 30.0  # elapsed time after which the process is killed, in case the machine is busy or the process hangs
COMPILE_MEMORY = 256 << 20  # bytes of address space for one format
COMPILE_STACK = 16 << 20  # bytes of stack; the server compiles with twice as much, so it can compile what this process did
COMPILE_WAIT_SECONDS = 5.0  # how long a request waits while the formats of others are compiled
