"""The formats that a reply can be constrained to: JSON schema, regular expression, list of choices, grammar.

They are plain data, which `grammar.py` compiles. `param` is the caller's name of the setting, which errors report. Recorded
requests hold a format by its field names, so these stay.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onedraw.errors import BadParameter

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# Between two JSON tokens: a line break, then some indentation. Without a limit a model could repeat white space until max_tokens.
JSON_WHITESPACE = r"(\r?\n)?[ \t]{0,24}"


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """A value that matches a JSON schema. The schema is kept as text, so that equal texts are compiled once."""

    schema: str
    param: str

    @classmethod
    def of(cls, schema: Any, param: str) -> JsonFormat:
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise BadParameter(param, f"is not valid JSON: {error}") from None
            except RecursionError:
                raise BadParameter(param, "is nested too deeply") from None
        if not isinstance(schema, dict | bool):
            raise BadParameter(param, "a JSON schema is an object")
        return cls(json.dumps(schema), param)


@dataclass(frozen=True, slots=True)
class RegexFormat:
    """A text that a regular expression matches from its first to its last character."""

    pattern: str
    param: str


@dataclass(frozen=True, slots=True)
class ChoiceFormat:
    """One of these texts."""

    texts: tuple[str, ...]
    param: str

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise BadParameter(self.param, "needs at least one text, and none may be empty")


@dataclass(frozen=True, slots=True)
class LarkFormat:
    """A Lark grammar in llguidance's dialect, whose first rule is `start`."""

    lark: str
    param: str
    numbers: bool = False  # limit runs of digits, as in JSON


@dataclass(frozen=True, slots=True)
class GbnfFormat:
    """A grammar in llama.cpp's notation, whose first rule is `root`."""

    gbnf: str
    param: str


ReplyFormat = JsonFormat | RegexFormat | ChoiceFormat | LarkFormat | GbnfFormat


def grammar_format(source: str, param: str) -> LarkFormat | GbnfFormat:
    """A grammar in either notation; only GBNF writes rules with `::=`."""
    return GbnfFormat(source, param) if "::=" in source else LarkFormat(source, param)
