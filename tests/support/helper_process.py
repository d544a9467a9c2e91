"""The helper process that compiles response formats, for tests that stop or kill it."""

from __future__ import annotations

from onedraw.text.constraints.grammar import GrammarCompiler


def helper_pid(compiler: GrammarCompiler) -> int:
    process = compiler._checker._process  # type: ignore[union-attr]  # None where formats are not isolated
    assert process is not None
    return process._process.pid


def is_checking(compiler: GrammarCompiler) -> bool:
    """Whether a format is in the helper process now."""
    return compiler._checker._lock.locked()  # type: ignore[union-attr]
