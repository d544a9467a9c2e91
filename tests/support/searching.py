"""How many examples a property test draws: a few in `make test`, many in `make test-long`."""

from __future__ import annotations

from hypothesis import HealthCheck, settings


def examples(few: int, *, many: int) -> settings:
    """Settings of a property test. `few` are the same in every run; `many` are new ones (see tests/conftest.py)."""
    searching = not settings().derandomize
    return settings(max_examples=many if searching else few, deadline=None, suppress_health_check=list(HealthCheck))
