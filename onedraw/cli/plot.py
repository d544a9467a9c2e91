"""What `bench --plot` draws: throughput over batch, latency over context.

In: measured numbers. Out: a picture. matplotlib is loaded when it is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from onedraw.errors import BadSetting


def require_matplotlib() -> None:
    """Say that it is missing before anything is measured."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise BadSetting("--plot: needs matplotlib; pip install 'onedraw[plot]'") from None


def draw(
    path: Path,
    title: str,
    *,
    throughput: Sequence[tuple[int, float]],
    latency: Sequence[tuple[int, float]],
    peer: Sequence[tuple[int, float]] = (),
) -> None:
    """(batch, tokens per second) and (context, milliseconds per token)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    figure.suptitle(title)
    left.plot(*zip(*throughput, strict=True), marker="o", label="onedraw")
    if peer:
        left.plot(*zip(*peer, strict=True), marker="s", label="transformers")
        left.legend(frameon=False)
    left.set(xlabel="requests at once", ylabel="decoded tokens per second, all together", ylim=(0, None))
    left.set_xscale("log", base=2)
    left.set_xticks([batch for batch, _ in throughput], [str(batch) for batch, _ in throughput])
    left.minorticks_off()
    right.plot(*zip(*latency, strict=True), marker="o")
    right.set(xlabel="tokens of context", ylabel="milliseconds per token, one request", xlim=(0, None), ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)
    pyplot.close(figure)
