"""The progress of a download as a line of text: a bar, the amounts, the speed and the time that is left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

BAR_CELLS = 20
WINDOW_SECONDS = 10.0  # the speed is the average over this time


class DownloadMeter:
    """Turns counts of bytes into lines. `clock` returns seconds."""

    def __init__(self, what: str, report: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._report = report
        self._clock = clock
        self._counts: deque[tuple[float, float]] = deque()  # (time, bytes so far) of the last WINDOW_SECONDS

    def update(self, done: float, total: float) -> None:
        """Report that `done` of `total` bytes are here. Bytes that were here before the first call count as no speed."""
        now, done = self._clock(), min(done, total)
        self._counts.append((now, done))
        while now - self._counts[0][0] > WINDOW_SECONDS:
            self._counts.popleft()
        since, before = self._counts[0]
        speed = (done - before) / (now - since) if now > since else 0.0
        share = done / total if total else 0.0
        filled = int(share * BAR_CELLS)
        parts = [f"{done / 2**20:.0f} of {total / 2**20:.0f} MiB"]
        if speed > 0:
            seconds = int((total - done) / speed)
            parts += [f"{speed / 2**20:.1f} MiB/s", f"{seconds // 60}:{seconds % 60:02} left"]
        bar = "#" * filled + "." * (BAR_CELLS - filled)
        self._report(f"{self._what}: [{bar}] {share:.0%}, {', '.join(parts)}")
