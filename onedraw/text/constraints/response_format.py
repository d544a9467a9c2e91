"""What a reply may be held to: a JSON schema, a regular expression, a choice, a grammar. As data, with its own names.

In: what a caller wrote. Out: guides, which `grammar.py` compiles. `param` is the caller's name for it: what a refusal names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onedraw.errors import BadParameter

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
# Between two parts of JSON: a line break, then some indentation. Unbounded, a model could go on with it for ever.
WHITESPACE = r"(\r?\n)?[ \t]{0,24}"


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """A value that a JSON schema describes. The schema is kept as text: equal texts compile once."""

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
    """A Lark grammar, in llguidance's dialect; its first rule is `start`. `numbers`: runs of digits are bounded."""

    lark: str
    param: str
    numbers: bool = False


@dataclass(frozen=True, slots=True)
class GbnfFormat:
    """A grammar as llama.cpp writes them; its first rule is `root`."""

    gbnf: str
    param: str


ReplyFormat = JsonFormat | RegexFormat | ChoiceFormat | LarkFormat | GbnfFormat


def grammar_format(source: str, param: str) -> LarkFormat | GbnfFormat:
    """A grammar in either notation, told apart by how rules are written."""
    return GbnfFormat(source, param) if "::=" in source else LarkFormat(source, param)
