"""Halves of characters: a string may hold one of a surrogate pair, which JSON can spell and which is no text.

In: any string. Out: whether it is text, or the same as text.
"""

from __future__ import annotations

import re

_HALVES = re.compile("[\ud800-\udfff]")


def is_text(string: str) -> bool:
    return _HALVES.search(string) is None


def whole(string: str) -> str:
    """What stands for a character that is not known, in place of each half."""
    return _HALVES.sub("\ufffd", string)
