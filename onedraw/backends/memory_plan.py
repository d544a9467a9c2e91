"""Memory arithmetic: the bytes that weights, KV pages, recurrent states and steps of a model take. Nothing is allocated here.

In: a ModelSpec and sizes. Out: a MemoryPlan, or OutOfMemory with the number of missing bytes. `build/fit_devices.py` calls
`memory_plan` with the settings and the devices; `backends/placement.py` divides a plan among devices. A lane is the slot of a
sequence's recurrent state; the rollback buffer holds the state increments of drafts until they are verified; a checkpoint is the
saved state after a prompt prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onedraw.backends.devices import float_dtype, kv_precision
from onedraw.errors import BadSetting, OutOfMemory
from onedraw.models.spec import DTYPE_BYTES, KV_BITS, STATE_BYTES, AttentionSpec, LayerSpec, ModelSpec, MoeSpec

DEFAULT_KV_BYTES = 2**30  # maximum of KV pages without --kv-memory, unless one sequence of full length needs more
DEFAULT_DRAFT_BYTES = 2**30  # maximum of the rollback buffer without --draft-memory
DEFAULT_CHECKPOINT_BYTES = 2**30  # maximum of checkpoints without --checkpoint-memory
MAX_CHECKPOINTS = 64
DRAFTS_PER_LANE = 16  # drafts of a lane for which the rollback buffer has room by default
MAX_ROW_DRAFTS = 64
LOGITS_BYTES = 256 * 2**20  # most bytes of float32 logits in memory at once
GRAPH_BYTES = 512 * 2**20  # bytes reserved for captured CUDA graphs
# Layers with a sliding window get pages for the window and this many more tokens of a prompt. In larger steps a sequence computes
# more tokens at once only if the pages suffice.
WINDOW_STEP_TOKENS = 512
DEQUANT_BYTES = 256 * 2**20  # buffer for dequantized slices of packed weights (products with many rows on a GPU)
PARTIAL_SUM_BYTES = 160 * 2**20  # partial sums of a packed product with few rows; a larger product runs in slices of its outputs
RUNTIME_RESERVE = 0.05  # share of an accelerator's memory left to its runtime
# Positions that a layer of a DFlash drafter sees at most: drafters are trained with contexts of about this length.
DRAFTER_WINDOW = 4096
INT4_MULTIPLE = 8  # with int4, head sizes must be multiples of this: 4-bit codes are moved in words of 32 bits
MIN_DEFAULT_CONTEXT = 4096  # without --kv-memory, the default context is not shortened below this


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """KV pages of layers with the same attention window."""

    window: int | None
    page_bytes: int  # bytes of one page over all layers of the group
    pages: int
    pages_per_sequence: int  # pages that one sequence of full context length needs


@dataclass(frozen=True, slots=True)
class PackedWeightBytes:
    """Bytes of packed weights. Field names are keys of `inspect --json`."""

    first: int  # bytes outside the layers on the first device: the embedding
    layers: tuple[int, ...]
    last: int  # bytes outside the layers on the last device: the last norm and the head
    parts: int = 0  # bytes of partial sums of products with few rows on a GPU, which are workspace and not in `total`
    tied_embed: int = 0  # bytes of a tied embedding on the first device, if the head is in another memory; not in `total`

    @property
    def total(self) -> int:
        return self.first + sum(self.layers) + self.last


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Sizes that an engine runs with, and their bytes. Field names are keys of `inspect --json`."""

    dtype: str
    max_context: int
    max_batch: int
    page_size: int
    weight_bytes: int
    groups: tuple[GroupPlan, ...]
    lane_bytes: int  # bytes of the recurrent state of one lane over all layers; 0 for attention-only models
    draft_positions: int  # number of drafts that the rollback buffer holds
    draft_bytes: int  # bytes of one draft in the rollback buffer
    checkpoints: int
    checkpoint_bytes: int  # bytes of one checkpoint
    kv_dtype: str
    weights: PackedWeightBytes | None = None  # bytes of packed weights; None for other weights

    @property
    def pages(self) -> tuple[int, ...]:
        return tuple(group.pages for group in self.groups)

    @property
    def sequence_bytes(self) -> int:
        """KV pages of one sequence of full context length."""
        return sum(group.pages_per_sequence * group.page_bytes for group in self.groups)

    @property
    def kv_bytes(self) -> int:
        return sum(group.pages * group.page_bytes for group in self.groups)

    @property
    def full_sequences(self) -> int:
        """Sequences of full context length that can run at once without preemption."""
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
    step_tokens: int = 512,
    kv_memory: int | None = None,
    kv_dtype: str | None = None,
    drafts: int = 0,
    draft_memory: int | None = None,
    checkpoint_memory: int | None = None,
    default_kv_bytes: int = DEFAULT_KV_BYTES,
) -> MemoryPlan:
    """Plan how many pages, lanes, rollback positions and checkpoints a model gets, and count their bytes.

    `weights`: bytes of packed weights; None computes them from `dtype`.
    `max_context` None: the model's own maximum, shortened until one sequence fits into the memory for pages, but
    without `kv_memory` not below MIN_DEFAULT_CONTEXT.
    `kv_memory` None: pages for `max_batch` full sequences, at most `default_kv_bytes`, but at least for one sequence.
    `drafts`: maximum drafts per lane, 0 without speculative decoding; only recurrent layers need memory for them.
    """
    kv_dtype = kv_dtype or kv_precision("auto", products=dtype)
    if kv_dtype not in KV_BITS:
        raise BadSetting(f"--dtype: memory cannot be planned for {dtype!r}; use one of {', '.join(DTYPE_BYTES)}")
    check_heads(spec, kv_dtype)

    def needs(context: int) -> list[tuple[int, int]]:
        """For each group, the pages that one sequence of this length needs, and the bytes of a page."""
        step = min(step_tokens, WINDOW_STEP_TOKENS) + MAX_ROW_DRAFTS
        lengths = [context if window is None else min(context, window + step) for window in spec.windows]
        return [
            (pages_for(length, page_size) + (length < context), spec.group_page_bytes(group, page_size, kv_dtype))
            for group, length in enumerate(lengths)
        ]

    memory = default_kv_bytes if kv_memory is None else kv_memory
    context = _context(spec, max_context, fits=lambda tokens: _bytes(needs(tokens)) <= memory, fixed=kv_memory is not None)
    one = _bytes(needs(context))
    if kv_memory is not None and kv_memory < one:
        raise OutOfMemory(
            f"one sequence of {context} tokens needs {one} bytes of KV pages ({human_bytes(one)}) and "
            f"--kv-memory gives {kv_memory} ({human_bytes(kv_memory)}); raise --kv-memory or lower --max-context",
        )
    # An explicit --kv-memory is used entirely: the prefix cache uses the pages that running sequences do not need.
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


def drafter_window(window: int | None) -> int:
    """The window that a drafter's layer gets, at most DRAFTER_WINDOW. `window`: that of its checkpoint; None: all positions."""
    return min(window or DRAFTER_WINDOW, DRAFTER_WINDOW)


def drafter_pages(window: int, *, target_pages: int, lanes: int, block: int, page_size: int) -> int:
    """Pages of a drafter's layers with this window: enough for the window and the `block` drafted positions of each lane, but no
    more than the target (the model that is drafted for) has."""
    return min(target_pages, lanes * (pages_for(window + block, page_size) + 1))


def check_heads(spec: ModelSpec, kv_dtype: str) -> None:
    """Raise BadSetting if heads of this model cannot be stored in this dtype."""
    for mixer in (layer.mixer for layer in spec.layers):
        if kv_dtype == "int4" and isinstance(mixer, AttentionSpec) and mixer.head_dim % INT4_MULTIPLE:
            raise BadSetting(
                f"--kv-dtype int4: {mixer.head_dim}, the size of a head, is no multiple of {INT4_MULTIPLE}; use int8"
            )


def page_budget(plan: MemoryPlan, spec: ModelSpec, *, memory: int, step_tokens: int, drafter_bytes: int = 0) -> int:
    """Bytes of an accelerator's free `memory` that remain for KV pages after weights, states, a drafter, the workspace
    of a step, CUDA graphs and the runtime's reserve; 0 if nothing remains."""
    padding = sum(group.page_bytes for group in plan.groups)  # one page per group, to which padding rows write
    step = step_bytes(spec, plan.dtype, step_tokens=step_tokens, weights=plan.weights, recorded=True)
    taken = plan.total_bytes - plan.kv_bytes + padding + drafter_bytes + step.total
    return max(int(memory * (1 - RUNTIME_RESERVE)) - taken, 0)


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Workspace of a step on an accelerator. Field names are keys of `inspect --json`."""

    numbers: int  # bytes of activations and logits
    opened: int  # bytes of dequantized slices of packed weights
    parts: int  # bytes of partial sums of packed products
    recorded: int  # bytes of captured CUDA graphs

    @property
    def total(self) -> int:
        return self.numbers + self.opened + self.parts + self.recorded


def step_bytes(spec: ModelSpec, dtype: str, *, step_tokens: int, weights: PackedWeightBytes | None, recorded: bool) -> StepBytes:
    """The workspace of a step. `weights`: bytes of packed weights, None for other weights. `recorded`: whether steps are captured
    as CUDA graphs."""
    return StepBytes(
        numbers=activation_bytes(spec, float_dtype(dtype), step_tokens),
        opened=0 if weights is None else DEQUANT_BYTES,
        parts=0 if weights is None else weights.parts,
        recorded=GRAPH_BYTES if recorded else 0,
    )


def activation_bytes(spec: ModelSpec, dtype: str, step_tokens: int) -> int:
    """Upper bound of the activations and logits that exist at once in a step of this many tokens."""
    rows = [
        sum(shape[0] for shape in layer.shapes(spec.hidden).values() if len(shape) == 2)
        + 4 * spec.hidden
        + _experts_rows(spec, layer)
        for layer in dict.fromkeys(spec.layers)
    ]
    return step_tokens * max(rows) * DTYPE_BYTES[dtype] + 3 * LOGITS_BYTES


def _experts_rows(spec: ModelSpec, layer: LayerSpec) -> int:
    """Values per token in the expert layers: gate and up projections, their product in two layouts, and the outputs."""
    mixture = layer.feed_forward
    return mixture.used * (4 * mixture.width + spec.hidden) if isinstance(mixture, MoeSpec) else 0


def padded_vocab(spec: ModelSpec) -> int:
    """The vocabulary size rounded up to 64: the width of a stored row of logits."""
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
            f"gives {memory}; raise --draft-memory or use --draft none"
        )
    return min(wanted, affordable)


def _checkpoints(size: int, memory: int | None) -> int:
    """Checkpoint slots within `memory` bytes; each has the recurrent states and last logits of a prompt prefix."""
    return min(MAX_CHECKPOINTS, (DEFAULT_CHECKPOINT_BYTES if memory is None else memory) // size)


def _context(spec: ModelSpec, requested: int | None, *, fits: Callable[[int], bool], fixed: bool) -> int:
    """The context length: the requested one, or for None the longest that fits. Raises BadSetting for one that the model does not
    support. `fixed`: whether the memory for pages was given, so that no minimum applies."""
    if requested is not None:
        if requested > spec.max_context:
            raise BadSetting(f"--max-context: {requested} is over the {spec.max_context} tokens that this model supports")
        return requested
    low, high = 1 if fixed else min(MIN_DEFAULT_CONTEXT, spec.max_context), spec.max_context
    while low < high:  # bisection for the longest context that fits
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def pages_for(tokens: int, page_size: int) -> int:
    return -(-tokens // page_size)


def human_bytes(count: int) -> str:
    """A number of bytes for people: 1536 gives '1.5 KiB'."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, 4)
    return f"{count / 1024**power:.1f} {'KMGT'[power - 1]}iB"
