"""How much memory a model needs before a byte of it is allocated: weights, pages, total. Pure arithmetic.

In: a ModelSpec and the asked sizes. Out: a MemoryPlan, or NoRoom that names the bytes missing.
`inspect` prints it, `assemble` allocates by it, so what was promised is what is taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from onedraw.errors import BadSetting, NoRoom
from onedraw.models.spec import DTYPE_BYTES, ModelSpec

DEFAULT_KV_BYTES = 2**30  # of pages, where nobody said how many; one full sequence always fits
SMALLEST_DEFAULT_CONTEXT = 4096  # a default context is not cut below this to save pages


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes an engine runs with, and the bytes they cost."""

    dtype: str
    max_context: int
    max_batch: int
    page_size: int
    weight_bytes: int
    page_bytes: int  # of one page over all layers
    pages: int
    lane_bytes: int  # of one lane over all layers; attention has none

    @property
    def pages_per_sequence(self) -> int:
        """Pages of one sequence that fills the context."""
        return pages_for(self.max_context, self.page_size)

    @property
    def kv_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def full_sequences(self) -> int:
        """Sequences that can fill the whole context at once, nobody preempted."""
        return min(self.pages // self.pages_per_sequence, self.max_batch)

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.lane_bytes * self.max_batch


def memory_plan(
    spec: ModelSpec,
    *,
    dtype: str,
    max_context: int | None = None,
    max_batch: int,
    page_size: int,
    kv_memory: int | None = None,
    kv_dtype: str | None = None,
    default_kv_bytes: int = DEFAULT_KV_BYTES,
) -> MemoryPlan:
    """Sizes for a model. `kv_memory` None: enough for max_batch full sequences, within default_kv_bytes.

    `max_context` None: the model's own, shortened where one such sequence is over the memory for pages.
    """
    if dtype not in DTYPE_BYTES:
        raise BadSetting(f"--dtype: no plan for {dtype!r}; a plan needs one of {', '.join(DTYPE_BYTES)}")
    page_bytes = spec.total_page_bytes(page_size, kv_dtype or dtype)
    affordable = (default_kv_bytes if kv_memory is None else kv_memory) // page_bytes
    context = _context(spec, max_context, affordable=affordable * page_size, fixed=kv_memory is not None)
    one = pages_for(context, page_size)
    if kv_memory is None:
        pages = max(one, min(max_batch * one, affordable))
    elif affordable < one:
        raise NoRoom(
            f"one sequence of {context} tokens needs {one * page_bytes} bytes of pages ({human_bytes(one * page_bytes)}) and "
            f"--kv-memory gives {kv_memory} ({human_bytes(kv_memory)}); raise --kv-memory or lower --max-context",
        )
    else:
        pages = affordable  # beyond the running sequences the prefix cache has use for them
    return MemoryPlan(
        dtype=dtype,
        max_context=context,
        max_batch=max_batch,
        page_size=page_size,
        weight_bytes=spec.parameters * DTYPE_BYTES[dtype],
        page_bytes=page_bytes,
        pages=pages,
        lane_bytes=sum(spec.lane_bytes(i) for i in range(len(spec.layers))),
    )


def _context(spec: ModelSpec, asked: int | None, *, affordable: int, fixed: bool) -> int:
    """The context to serve. An asked one stands, within what the model was made for."""
    if asked is not None:
        if asked > spec.max_context:
            raise BadSetting(f"--max-context: {asked} is over the {spec.max_context} tokens this model was made for")
        return asked
    least = 1 if fixed else SMALLEST_DEFAULT_CONTEXT
    return min(spec.max_context, max(affordable, least))


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def human_bytes(count: int) -> str:
    """1536 → '1.5 KiB'."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"
