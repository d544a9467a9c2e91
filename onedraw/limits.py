"""The limits on what one request may cost, each a number that the error names and docs/api.md lists.

A limit is checked before the work that it bounds, and its request fails alone. Sizes that a user chooses are settings instead:
`--max-body`, `--max-context`, `--queue-limit`.
"""

from __future__ import annotations

# The body of a request, counted in its bytes before it is read as JSON. Commas and brackets inside texts do not count.
MAX_BODY_VALUES = 1 << 20  # commas: values of lists and fields of objects; the ids of a long prompt are one each
MAX_BODY_PARTS = 1 << 18  # lists, objects and fields of objects, which cost far more than plain values
MAX_BODY_DEPTH = 256  # lists and objects inside each other

# Texts.
MAX_CHARACTERS = 1 << 16  # of all stop strings together, of all bad_words, of all dry_sequence_breakers
MAX_CHARACTERS_COUNTED = 1 << 18  # of a text that is tokenized even if it cannot fit, so that the error or the count is exact
MAX_ERROR_CHARACTERS = 1 << 12  # of an error's message, which may repeat what was sent; the rest is cut off

# Work.
MAX_LONG_WORK = 2  # long requests that are read, checked and tokenized at once; the others wait
MAX_PROMPT_TOKENS = 1 << 22  # of all prompts of one request

# Response formats: JSON schemas (also those of tools), grammars, regular expressions, choices.
MAX_FORMAT_CHARACTERS = 1 << 18  # of a schema as JSON, a grammar, a regular expression, all texts of a choice
MAX_FORMAT_NESTING = 100  # JSON values inside each other
MAX_FORMAT_DEPTH = 500  # values, groups and rules that a compiler is inside of at once, with references followed
MAX_FORMAT_VALUES = 20_000  # JSON values of a schema; symbols of a grammar
MAX_FORMAT_REFERENCES = 2_000  # `$ref`s of a schema
MAX_FORMAT_MEMBERS = 10_000  # of one list in a schema (`enum`, `anyOf`, …); texts of a choice
MAX_FORMAT_RULES = 5_000  # of a grammar
MAX_TOOL_CHARACTERS = 1 << 20  # of the grammar that is written for the calls of a request's tools
MAX_TOOL_WORK = 1 << 22  # characters that are written and checked for it; each check counts as at least TOOL_CHECK_WORK
TOOL_CHECK_WORK = 1_000
MAX_LITERAL_DEPTH = 100  # values inside each other, references followed, in a call syntax that is not JSON

# The helper process that compiles a response format before the server does.
COMPILE_SECONDS = 3.0  # of its processor time
COMPILE_WALL_SECONDS = 30.0  # until it is killed, on a machine that is busy or a process that hangs
COMPILE_MEMORY = 256 << 20  # bytes
COMPILE_STACK = 16 << 20  # bytes; the server compiles with twice as much
COMPILE_WAIT_SECONDS = 5.0  # for the formats of other requests
