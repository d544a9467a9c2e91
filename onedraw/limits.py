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
MAX_FORMAT_CHARACTERS = 1 << 25  # of a response format: any that fits into a body
MAX_CHARACTERS_COUNTED = 1 << 18  # of a text that is tokenized even if it cannot fit, so that the error or the count is exact
MAX_ERROR_CHARACTERS = 1 << 12  # of an error's message, which may repeat what was sent; the rest is cut off

# Work.
MAX_LONG_WORK = 2  # long requests that are read, checked and tokenized at once; the others wait
MAX_PROMPT_TOKENS = 1 << 22  # of all prompts of one request
