"""A request's constraint, watched: where it fails, its own request does, and nobody who rides with it.

In: a constraint. Out: one that answers the same, and allows nothing where the other one raised. Whoever finds that nothing is
allowed asks whether it failed there: with an error that it says on purpose, or with one that stands in the log under an id.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from onedraw.errors import OnedrawError, StepFailed
from onedraw.types import EMPTY_MASK, Constraint, TokenMask

log = logging.getLogger(__name__)


class Watched:
    """Owner: one request."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        answer = self._asked(output, drafts)
        return EMPTY_MASK if isinstance(answer, BaseException) else answer

    def failure(self, output: Sequence[int]) -> OnedrawError | None:
        """What it fails with behind this output, if it does: what it says itself, or an error id."""
        answer = self._asked(output, ())
        if isinstance(answer, OnedrawError):
            return answer
        if not isinstance(answer, BaseException):
            return None
        number = secrets.token_hex(6)
        log.error("a constraint failed, error id %s", number, exc_info=answer)
        return StepFailed(f"holding this reply to its form failed; error id {number} stands in the server's log")

    def _asked(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | BaseException | None:
        try:
            return self._constraint.allowed(output, drafts)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic below Python is no Exception
            return error
