"""The formats that a reply can be constrained to: JSON schema, regular expression, list of choices, grammar.

They are plain data, which `grammar.py` compiles. `param` is the name under which the caller gave the format, for errors. Recorded
requests store a format by its field names, so these must not be renamed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onedraw.errors import BadParameter
from onedraw.text.constraints.format_limits import check_characters, check_choices, schema_text

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # the schema of `json_object`, which asks for any JSON object
# The white space allowed between two JSON tokens: a line break, then some indentation. Without a limit a model could repeat white
# space until max_tokens.
JSON_WHITESPACE = r"(\r?\n)?[ \t]{0,24}"


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """The reply is a value that matches a JSON schema. The schema is stored as text, so that it can be a key of the cache of
    compiled formats."""

    schema: str
    param: str

    @classmethod
    def of(cls, schema: Any, param: str) -> JsonFormat:
        if isinstance(schema, str):
            check_characters(schema, param)
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise BadParameter(param, f"is not valid JSON: {error}") from None
            except RecursionError:
                raise BadParameter(param, "is nested too deeply to be read; use fewer levels") from None
        if not isinstance(schema, dict | bool):
            raise BadParameter(param, "must be a JSON schema: an object, true or false")
        return cls(schema_text(schema, param), param)


@dataclass(frozen=True, slots=True)
class RegexFormat:
    """The reply is a text that a regular expression matches from its first to its last character."""

    pattern: str
    param: str


@dataclass(frozen=True, slots=True)
class ChoiceFormat:
    """The reply is one of these texts."""

    texts: tuple[str, ...]
    param: str

    def __post_init__(self) -> None:
        if not self.texts or not all(self.texts):
            raise BadParameter(self.param, "needs at least one text, and none may be empty")
        check_choices(self.texts, self.param)


@dataclass(frozen=True, slots=True)
class LarkFormat:
    """The reply follows a Lark grammar in llguidance's dialect, whose first rule is `start`."""

    lark: str
    param: str
    numbers: bool = False  # whether to limit runs of digits: set for grammars of tool calls, which contain JSON numbers


@dataclass(frozen=True, slots=True)
class GbnfFormat:
    """The reply follows a grammar in llama.cpp's notation, whose first rule is `root`."""

    gbnf: str
    param: str


ReplyFormat = JsonFormat | RegexFormat | ChoiceFormat | LarkFormat | GbnfFormat


def grammar_format(source: str, param: str) -> LarkFormat | GbnfFormat:
    """Build the format of a grammar in either notation. GBNF is recognized by `::=`, which Lark does not have."""
    return GbnfFormat(source, param) if "::=" in source else LarkFormat(source, param)
