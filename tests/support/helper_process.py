"""The helper process that compiles response formats, for tests that stop or kill it."""

from __future__ import annotations

from onedraw import limits
from onedraw.text.constraints.grammar import GrammarCompiler


def helper_pid(compiler: GrammarCompiler) -> int:
    """Return the id of the process that checks the next format."""
    return compiler._checker._idle[-1]._process.pid  # type: ignore[union-attr]  # None where formats are not isolated


def checking(compiler: GrammarCompiler) -> int:
    """Return how many formats are in helper processes now."""
    return limits.MAX_FORMAT_WORK - compiler._checker._turns._value  # type: ignore[union-attr]
