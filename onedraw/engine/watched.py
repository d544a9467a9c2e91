"""A request's constraint, watched: where it fails, its own request does, and nobody who rides with it.

In: a constraint. Out: one that answers the same, and allows nothing where the other one raised. What happened stands in the log
under an error id, by which the request's error can name it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Sequence

import numpy as np

from onedraw.types import Bits, Constraint

log = logging.getLogger(__name__)


class Watched:
    """Owner: one request."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self.failure = ""  # the error id of the first time it failed where the reply stands

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> Bits | None:
        try:
            return self._constraint.allowed(output, drafts)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic below Python is no Exception
            if not drafts and not self.failure:  # behind drafts nobody may ever come there
                self.failure = secrets.token_hex(6)
                log.error("a constraint failed, error id %s", self.failure, exc_info=error)
            return np.zeros(0, dtype=np.uint32)
