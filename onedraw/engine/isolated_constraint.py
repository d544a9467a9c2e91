"""IsolatedConstraint wraps a request's constraint, so that an exception in it fails only this request, not the other rows of
the step.

If the constraint raises, no token is allowed, so the row samples none. The engine then asks `failure` for the cause: an error
with a message for the user, or any other exception, which is logged under an error id.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

from onedraw.errors import OnedrawError, StepFailed
from onedraw.types import EMPTY_MASK, Constraint, TokenMask

log = logging.getLogger(__name__)


class IsolatedConstraint:
    """The constraint of one request, with its exceptions caught."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | None:
        answer = self._try(output, drafts)
        return EMPTY_MASK if isinstance(answer, BaseException) else answer

    def legal(self, output: Sequence[int]) -> int:
        return self._constraint.legal(output)

    def failure(self, output: Sequence[int]) -> OnedrawError | None:
        """Return the error that the constraint raises after this output, or None if it does not raise."""
        answer = self._try(output, ())
        if isinstance(answer, OnedrawError):
            return answer
        if not isinstance(answer, BaseException):
            return None
        error_id = secrets.token_hex(6)
        log.error("a constraint failed, error id %s", error_id, exc_info=answer)
        return StepFailed(f"the constraint on this reply failed; see error id {error_id} in the server's log")

    def _try(self, output: Sequence[int], drafts: Sequence[int]) -> TokenMask | BaseException | None:
        try:
            return self._constraint.allowed(output, drafts)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # not only Exception, since a panic in native code is raised as a BaseException
            return error
