"""How many replicas a load asks for. In: the number of requests, the present number of replicas, and the time. Out: the number
that there should be. `RayReplicas` starts and ends replicas accordingly.

Names and meanings are those of Ray Serve's AutoscalingConfig, with one difference: after the delay, the change is the smallest
that the load has asked for during the delay, so that a peak at its end does not decide.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onedraw.errors import BadSetting

UPSCALE_DELAY = 10.0  # seconds; a burst that is over sooner would be over before another replica has loaded its weights
DOWNSCALE_DELAY = 600.0  # seconds; a replica that ends loses its prefix cache


@dataclass(frozen=True, slots=True)
class AutoscalingConfig:
    min_replicas: int
    max_replicas: int
    target_ongoing_requests: float | None = None  # requests per replica, running and waiting; None: as many as run at once
    upscale_delay: float = UPSCALE_DELAY
    downscale_delay: float = DOWNSCALE_DELAY

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            raise BadSetting(
                "--replicas: write a number of at least 1, or the least and the most like 1..4, not "
                f"{self.min_replicas}..{self.max_replicas}"
            )
        if self.target_ongoing_requests is not None and not 0 < self.target_ongoing_requests < math.inf:
            raise BadSetting(f"--target-ongoing-requests: must be more than 0, not {self.target_ongoing_requests:g}")
        for name in ("upscale_delay", "downscale_delay"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadSetting(f"--{name.replace('_', '-')}: must be a number of seconds, not {getattr(self, name):g}")

    def desired(self, ongoing: int, *, lanes: int) -> int:
        """Return the number of replicas for so many ongoing requests. `lanes`: requests that run at once in a replica."""
        needed = min(ongoing / (self.target_ongoing_requests or lanes), self.max_replicas)  # infinite for a tiny target
        return max(math.ceil(needed), self.min_replicas)


@dataclass(frozen=True, slots=True)
class Change:
    """A change that the load has asked for without interruption."""

    since: float
    replicas: int  # how many replicas the smallest change would leave that it has asked for


def scaled(
    config: AutoscalingConfig, change: Change | None, *, replicas: int, desired: int, now: float
) -> tuple[int, Change | None]:
    """Return the number of replicas that there should be now, and the change that waits for its delay, to be given to the next
    call as `change`. `replicas`: how many there should have been so far."""
    if desired == replicas:
        return replicas, None
    up = desired > replicas
    if change is None or (change.replicas > replicas) != up:
        change = Change(now, desired)
    else:
        change = Change(change.since, (min if up else max)(change.replicas, desired))
    if now - change.since < (config.upscale_delay if up else config.downscale_delay):
        return replicas, change
    return change.replicas, None


def replica_range(text: str) -> tuple[int, int]:
    """Parse the least and the most number of replicas: '2' → (2, 2), '1..4' → (1, 4)."""
    least, dots, most = text.partition("..")
    try:
        return int(least), int(most if dots else least)
    except ValueError:
        raise BadSetting(f"not a number of replicas: {text!r}; write for example 2, or 1..4") from None
