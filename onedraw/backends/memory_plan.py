"""How much memory a model needs before a byte of it is allocated: weights, pages, states, total. Pure arithmetic.

In: a ModelSpec and the asked sizes. Out: a MemoryPlan, or OutOfMemory that names the bytes missing.
`inspect` prints it, `assemble` allocates by it, so what was promised is what is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onedraw.backends.precision import float_dtype
from onedraw.errors import BadSetting, OutOfMemory
from onedraw.models.spec import DTYPE_BYTES, KV_BYTES, STATE_BYTES, LayerSpec, ModelSpec, MoeSpec

# -------------------- What crosses from one stage of layers to the next, in bytes. Pure arithmetic.


MAX_BOUNDARY_BYTES = 64 * 2**20  # of one boundary
ROW_MULTIPLE = 64  # rows come in multiples of it: rows are padded to blocks of up to 64 (see layers/linear.py)
MIN_STAGING_ROWS = 256  # what the self-check of the torch backend runs at once


@dataclass(frozen=True, slots=True)
class StagingPlan:
    """The buffers of every boundary, in order."""

    rows: int
    boundaries: tuple[int, ...]  # bytes of each

    @property
    def total_bytes(self) -> int:
        return sum(self.boundaries)


def row_bytes(hidden: int, dtype: str, *, inputs: int = 0) -> int:
    """One row at a boundary; `inputs`: numbers of the layers' own inputs that cross with it."""
    return (2 * hidden + inputs) * DTYPE_BYTES[dtype]


def layer_inputs_after(spec: ModelSpec, cut: int) -> int:
    return (len(spec.layers) - cut) * spec.inputs


def staging_plan(spec: ModelSpec, cuts: tuple[int, ...], *, tokens: int, dtype: str) -> StagingPlan:
    """Buffers for turns of up to `tokens` tokens, or fewer where those would take more than MAX_BOUNDARY_BYTES."""
    sizes = [row_bytes(spec.hidden, dtype, inputs=layer_inputs_after(spec, cut)) for cut in cuts]
    wanted = -(-max(tokens, MIN_STAGING_ROWS) // ROW_MULTIPLE) * ROW_MULTIPLE
    rows = min([wanted, *(MAX_BOUNDARY_BYTES // size // ROW_MULTIPLE * ROW_MULTIPLE for size in sizes)])
    if rows < MIN_STAGING_ROWS:
        raise OutOfMemory(
            f"a boundary of {max(sizes)} bytes per row leaves {rows} rows within {MAX_BOUNDARY_BYTES} bytes; use one device"
        )
    return StagingPlan(rows, tuple(rows * size for size in sizes))


def max_step_tokens(rows: int, *, chunk: int) -> int:
    """The token budget that keeps a turn within so many rows: a prompt moves by one chunk beside whatever else runs."""
    return rows - chunk


def context_bytes(hidden: int, *, buffers: int, context: int, dtype: str) -> int:
    """Buffers that hold every position of a context."""
    return buffers * hidden * context * DTYPE_BYTES[dtype]


# -------------------- How much memory a model needs before a byte of it is allocated: weights, pages, states, to


DEFAULT_KV_BYTES = 2**30  # of pages, where nobody said how many; one full sequence always fits
DEFAULT_DRAFT_BYTES = 2**30  # of the rollback buffer, at most
DEFAULT_CHECKPOINT_BYTES = 2**30  # of checkpoints, at most
MAX_CHECKPOINTS = 64
DRAFTS_PER_LANE = 16  # places of the rollback buffer, where nobody asked for more
MAX_ROW_DRAFTS = 64  # of one row
LOGITS_BYTES = 256 * 2**20  # float32 logits held at once
GRAPH_BYTES = 512 * 2**20  # of recorded turns
DEQUANT_BYTES = 256 * 2**20  # of packed weights that a GPU writes out for products with many rows, a slice at a time
PARTIAL_SUM_BYTES = (
    160 * 2**20
)  # of sums that wait in a packed product with few rows, whose outputs come a slab at a time where it has more
RUNTIME_RESERVE = 0.05  # of an accelerator's memory: what its runtime takes
MIN_DEFAULT_CONTEXT = 4096  # a default context is not cut below this to save pages


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Pages of layers that keep the same positions."""

    window: int | None
    page_bytes: int  # of one page over all layers of the group
    pages: int
    pages_per_sequence: int  # of one sequence that fills the context


@dataclass(frozen=True, slots=True)
class PackedWeightBytes:
    """Bytes of packed weights: with the first layer, of each layer, with the last one."""

    first: int
    layers: tuple[int, ...]
    last: int
    parts: int = 0  # of sums that wait in their products with few rows: a GPU's, and no bytes of the weights

    @property
    def total(self) -> int:
        return self.first + sum(self.layers) + self.last


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The sizes an engine runs with, and the bytes they cost."""

    dtype: str
    max_context: int
    max_batch: int
    page_size: int
    weight_bytes: int
    groups: tuple[GroupPlan, ...]
    lane_bytes: int  # recurrent state of one lane over all layers; attention has none
    draft_positions: int  # places of the rollback buffer
    draft_bytes: int  # of one place
    checkpoints: int
    checkpoint_bytes: int  # of one
    kv_dtype: str  # of keys and values
    weights: PackedWeightBytes | None = None  # where they are packed

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(group.pages for group in self.groups)

    @property
    def sequence_bytes(self) -> int:
        """Pages of one sequence that fills the context."""
        return sum(group.pages_per_sequence * group.page_bytes for group in self.groups)

    @property
    def kv_bytes(self) -> int:
        return sum(group.pages * group.page_bytes for group in self.groups)

    @property
    def full_sequences(self) -> int:
        """Sequences that can fill the whole context at once, nobody preempted."""
        return min(*(group.pages // group.pages_per_sequence for group in self.groups), self.max_batch)

    @property
    def total_bytes(self) -> int:
        states = self.lane_bytes * self.max_batch + self.draft_positions * self.draft_bytes
        return self.weight_bytes + self.kv_bytes + states + self.checkpoints * self.checkpoint_bytes


def memory_plan(
    spec: ModelSpec,
    *,
    dtype: str,
    weights: PackedWeightBytes | None = None,
    max_context: int | None = None,
    max_batch: int,
    page_size: int,
    turn_tokens: int = 512,
    kv_memory: int | None = None,
    kv_dtype: str | None = None,
    drafts: int = 0,
    draft_memory: int | None = None,
    checkpoint_memory: int | None = None,
    default_kv_bytes: int = DEFAULT_KV_BYTES,
) -> MemoryPlan:
    """Sizes for a model. `kv_memory` None: enough for max_batch full sequences, within default_kv_bytes.

    `weights`: bytes of packed weights.

    `max_context` None: the model's own, shortened where one such sequence is over the memory for pages.
    `drafts`: how many a lane may carry, 0 where drafting is off; only recurrent layers need room for them.
    """
    kv_dtype = kv_dtype or float_dtype(dtype)
    if kv_dtype not in KV_BYTES:
        raise BadSetting(f"--dtype: no plan for {dtype!r}; a plan needs one of {', '.join(DTYPE_BYTES)}")

    def needs(context: int) -> list[tuple[int, int]]:
        """(pages of one sequence, bytes of a page) per group."""
        turn = turn_tokens + MAX_ROW_DRAFTS
        spans = [context if window is None else min(context, window + turn) for window in spec.windows]
        return [
            (pages_for(span, page_size) + (span < context), spec.group_page_bytes(group, page_size, kv_dtype))
            for group, span in enumerate(spans)
        ]

    memory = default_kv_bytes if kv_memory is None else kv_memory
    context = _context(spec, max_context, fits=lambda tokens: _bytes(needs(tokens)) <= memory, fixed=kv_memory is not None)
    one = _bytes(needs(context))
    if kv_memory is not None and kv_memory < one:
        raise OutOfMemory(
            f"one sequence of {context} tokens needs {one} bytes of pages ({human_bytes(one)}) and "
            f"--kv-memory gives {kv_memory} ({human_bytes(kv_memory)}); raise --kv-memory or lower --max-context",
        )
    # Beyond the running sequences the prefix cache has use for pages, where their memory was asked for.
    budget = max(one, min(max_batch * one, memory) if kv_memory is None else memory)
    groups = [
        GroupPlan(window, size, budget * count // max(one, 1), count)
        for window, (count, size) in zip(spec.windows, needs(context), strict=True)
    ]
    lane_bytes = sum(spec.lane_bytes(i) for i in range(len(spec.layers)))
    checkpoint_bytes = lane_bytes + padded_vocab(spec) * STATE_BYTES
    return MemoryPlan(
        dtype=dtype,
        max_context=context,
        max_batch=max_batch,
        page_size=page_size,
        weight_bytes=spec.parameters * DTYPE_BYTES[dtype] if weights is None else weights.total,
        weights=weights,
        kv_dtype=kv_dtype,
        groups=tuple(groups),
        lane_bytes=lane_bytes,
        draft_positions=_draft_positions(spec, drafts * max_batch, draft_memory),
        draft_bytes=spec.draft_bytes(),
        checkpoints=_checkpoints(checkpoint_bytes, checkpoint_memory),
        checkpoint_bytes=checkpoint_bytes,
    )


def page_budget(plan: MemoryPlan, spec: ModelSpec, *, memory: int, turn_tokens: int, beside: int = 0) -> int:
    """Bytes of an accelerator's free memory that pages may take: what weights, states, a drafter `beside`, the numbers of a
    turn, what packed products write and recorded turns leave, less a share that its runtime takes. 0 where they leave nothing."""
    nobodys = sum(group.page_bytes for group in plan.groups)  # where padding writes
    turns = step_bytes(spec, plan.dtype, turn_tokens=turn_tokens, weights=plan.weights, recorded=True)
    taken = plan.total_bytes - plan.kv_bytes + nobodys + beside + turns.total
    return max(int(memory * (1 - RUNTIME_RESERVE)) - taken, 0)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """What turns take on an accelerator beside what they read."""

    numbers: int  # of a turn, and logits
    opened: int  # packed weights written out
    parts: int  # sums that wait in packed products
    recorded: int  # turns

    @property
    def total(self) -> int:
        return self.numbers + self.opened + self.parts + self.recorded


def step_bytes(spec: ModelSpec, dtype: str, *, turn_tokens: int, weights: PackedWeightBytes | None, recorded: bool) -> StepBytes:
    """`weights`: packed ones, where they are."""
    return StepBytes(
        numbers=activation_bytes(spec, float_dtype(dtype), turn_tokens),
        opened=0 if weights is None else DEQUANT_BYTES,
        parts=0 if weights is None else weights.parts,
        recorded=GRAPH_BYTES if recorded else 0,
    )


def activation_bytes(spec: ModelSpec, dtype: str, turn_tokens: int) -> int:
    """Bytes of numbers that a turn of so many tokens holds at once, as an upper bound: a layer's widest rows, and logits."""
    rows = [
        sum(shape[0] for shape in layer.shapes(spec.hidden).values() if len(shape) == 2)
        + 4 * spec.hidden
        + _experts_rows(spec, layer)
        for layer in dict.fromkeys(spec.layers)
    ]
    return turn_tokens * max(rows) * DTYPE_BYTES[dtype] + 3 * LOGITS_BYTES


def _experts_rows(spec: ModelSpec, layer: LayerSpec) -> int:
    """Numbers of one token at its experts: what each opens, gate and up, made ready, and answers."""
    mixture = layer.feed_forward
    return mixture.used * (4 * mixture.width + spec.hidden) if isinstance(mixture, MoeSpec) else 0


def padded_vocab(spec: ModelSpec) -> int:
    """Logits are kept in rows of whole vectors."""
    return pages_for(spec.vocab, 64) * 64


def _bytes(needs: list[tuple[int, int]]) -> int:
    return sum(count * size for count, size in needs)


def _draft_positions(spec: ModelSpec, wanted: int, memory: int | None) -> int:
    if not spec.recurrent or not wanted:
        return 0
    affordable = (DEFAULT_DRAFT_BYTES if memory is None else memory) // spec.draft_bytes()
    if memory is not None and not affordable:
        raise OutOfMemory(
            f"one drafted position needs {spec.draft_bytes()} bytes ({human_bytes(spec.draft_bytes())}) and --draft-memory "
            f"gives {memory}; raise it, or say --draft none"
        )
    return min(wanted, affordable)


def _checkpoints(size: int, memory: int | None) -> int:
    """How many prompts' states and last logits are kept. 0 bytes: none."""
    return min(MAX_CHECKPOINTS, (DEFAULT_CHECKPOINT_BYTES if memory is None else memory) // size)


def _context(spec: ModelSpec, asked: int | None, *, fits: Callable[[int], bool], fixed: bool) -> int:
    """The context to serve. An asked one stands, within what the model was made for."""
    if asked is not None:
        if asked > spec.max_context:
            raise BadSetting(f"--max-context: {asked} is over the {spec.max_context} tokens this model was made for")
        return asked
    low, high = 1 if fixed else min(MIN_DEFAULT_CONTEXT, spec.max_context), spec.max_context
    while low < high:  # the longest that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def human_bytes(count: int) -> str:
    """1536 → '1.5 KiB'."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"
