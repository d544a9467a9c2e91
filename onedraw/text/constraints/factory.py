"""Build the constraints of a request from plain data, for one tokenizer.

A request carries a ReplyConstraint, which is plain data. The engine's service calls the factory, which it was constructed with,
to build the object that computes token masks.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from onedraw.text.constraints.base import combine
from onedraw.text.constraints.grammar import GrammarCompiler
from onedraw.text.constraints.response_format import ReplyFormat
from onedraw.text.constraints.thinking_budget import ThinkingBudget
from onedraw.text.reply_parser import ReplySyntax
from onedraw.text.tokenizer import Tokenizer
from onedraw.types import Constraint, ConstraintSpec


@dataclass(frozen=True, slots=True)
class ReplyConstraint(ConstraintSpec):
    """What constrains a reply: a limit on the tokens of its reasoning, the format of its content, or both."""

    syntax: ReplySyntax
    thinking_budget: int | None = None
    response_format: ReplyFormat | None = None


def reply_constraint(
    syntax: ReplySyntax, *, thinking_budget: int | None, response_format: ReplyFormat | None
) -> ReplyConstraint | None:
    """Return the constraint of a reply, or None if there is none. A thinking budget needs a model that reasons."""
    budget = None if syntax.reasoning is None else thinking_budget
    return None if budget is None and response_format is None else ReplyConstraint(syntax, budget, response_format)


class ConstraintFactory:
    """Builds a new constraint for each request, since constraints have state. Any thread may use the factory. Its owner, the
    `LLM` object (llm/llm.py), closes it."""

    def __init__(self, tokenizer: Tokenizer, eos_ids: Sequence[int], *, isolated: bool = True) -> None:
        """`isolated`: a response format is compiled in a helper process before it is compiled in this one, so that a format that
        crashes the compiler cannot end this process. False if another process has compiled all formats that way before."""
        self._tokenizer = tokenizer
        self._eos_ids = tuple(eos_ids)
        self._isolated = isolated
        self._grammars: GrammarCompiler | None = None
        self._lock = threading.Lock()

    @property
    def grammars(self) -> GrammarCompiler:
        """The compiler of response formats. It is created when first needed, since it reads the whole vocabulary and needs the
        package llguidance."""
        with self._lock:
            if self._grammars is None:
                self._grammars = GrammarCompiler(self._tokenizer, self._eos_ids, isolated=self._isolated)
            return self._grammars

    def close(self) -> None:
        with self._lock:
            if self._grammars is not None:
                self._grammars.close()

    def build(self, spec: ConstraintSpec) -> Constraint | None:
        assert isinstance(spec, ReplyConstraint)
        syntax, budget, grammar = spec.syntax, None, None
        if spec.thinking_budget is not None and syntax.reasoning is not None:
            budget = ThinkingBudget(
                syntax.reasoning,
                limit=spec.thinking_budget,
                closing=self._tokenizer.encode(syntax.reasoning.closing, add_special=False),
                token_bytes=self._tokenizer.token_bytes,
                thinking=syntax.thinking,
            )
        if spec.response_format is not None:
            grammar = self.grammars.constraint(spec.response_format, syntax)
        return combine(budget, grammar)
