"""Online softmax of the attention kernels: key blocks accumulated into a split, and splits merged into a row.

A split is a range of a row's key positions, and consists of key blocks. The state of a split or row is (maximum, sum,
accumulator): the largest score, the sum of exp2(score - maximum), and the sum of the values weighted by exp2(score - maximum).
Blocks inside a split and splits inside a row are processed from front to back, so the rounding is the same whether splits run in
one program or in many. A slot is a position's place in the page store. Axes: ROWS queries of a tile, C value columns of a
program.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, assignment"
# ruff: noqa: RUF005 - Triton concatenates tuples with +, unpacking is not supported
from __future__ import annotations

import triton
import triton.language as tl

from onedraw.backends.torch.ops.cuda.kv_quant import INT4, unpack_words
from onedraw.backends.torch.ops.cuda.triton_math import launch_dependents, load_int32, wait_for_inputs

# ------------------------------------------------------------------ key blocks


@triton.jit
def key_slots(start, row_pages, head, table_width, KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_KEYS: tl.constexpr):
    """The slots of a block's keys in the page store of one head. Positions that are not read get any slot in the row's pages."""
    # Blocks start at multiples of their length, so rounding `start` down changes nothing; it tells the compiler that `start` is
    # such a multiple, so that divisions become shifts.
    position = (start // BLOCK_KEYS * BLOCK_KEYS + tl.arange(0, BLOCK_KEYS)).to(tl.uint32)
    page = load_int32(row_pages + tl.minimum((position // PAGE_SIZE).to(tl.int32), table_width - 1))
    return (page * KV_HEADS + head) * PAGE_SIZE + (position % PAGE_SIZE).to(tl.int32)


@triton.jit
def path_key_slots(
    start,
    low,
    high,
    tree_start,
    path,
    row_pages,
    head,
    path_width,
    KV_HEADS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
):
    """The slots of a block's keys for a tree node, like `key_slots`: from `tree_start` on, positions map to the slots of the
    drafts on the node's path."""
    position = start + tl.arange(0, BLOCK_KEYS)
    in_range = (position >= low) & (position <= high)
    depth = tl.minimum(tl.maximum(position - tree_start, 0), path_width - 1)
    slot = tl.where(position >= tree_start, tree_start + load_int32(path + depth), position)
    page = load_int32(row_pages + tl.where(in_range, slot // PAGE_SIZE, 0))
    return (page * KV_HEADS + head) * PAGE_SIZE + slot % PAGE_SIZE


@triton.jit
def accumulate(scores, value, ones, row_max, sums, acc, IEEE: tl.constexpr):
    """Add a key block to the state of a split."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - safe_max)
    probs = tl.exp2(scores - safe_max[:, None]).to(value.dtype)
    sums = tl.dot(probs, ones, sums * rescale[:, None], input_precision="ieee" if IEEE else "tf32")
    acc = tl.dot(probs, value, acc * rescale[:, None], input_precision="ieee" if IEEE else "tf32")
    return new_max, sums, acc


@triton.jit
def load_query_parts(q_ptrs, word, mask, PARTS: tl.constexpr):
    """Load the columns of queries, separated by their place in a 16-bit word of key codes: PARTS arrays [ROWS, words], as
    `quantized_scores` needs them."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts = parts + (tl.load(q_ptrs + PARTS * word[None, :] + part, mask=mask, other=0.0),)
    return parts


@triton.jit
def quantized_scores(keys, key_scales, queries, slots, in_range, word, scale, D: tl.constexpr, KV_QUANT: tl.constexpr,
                     IEEE: tl.constexpr):  # fmt: skip
    """Scores of a block of quantized keys. A word of 16 bits has the codes of two or four neighbouring dimensions, so dimensions
    are multiplied separately by their place in a word."""
    PARTS: tl.constexpr = 4 if KV_QUANT == INT4 else 2
    mask = in_range[:, None] & (word < D // PARTS)[None, :]
    offsets = (slots.to(tl.int64) * (D // PARTS))[:, None] + word[None, :]
    parts = unpack_words(tl.load(keys + offsets, mask=mask, other=0), queries[0].dtype, KV_QUANT)
    scores = tl.dot(queries[0], tl.trans(parts[0]), input_precision="ieee" if IEEE else "tf32")
    for part in tl.static_range(1, PARTS):
        scores = tl.dot(queries[part], tl.trans(parts[part]), scores, input_precision="ieee" if IEEE else "tf32")
    return scores * (tl.load(key_scales + slots, mask=in_range, other=0.0) * scale)[None, :]


@triton.jit
def accumulate_quantized(scores, values, value_scales, slots, in_range, word, ones, row_max, sums, accs, D: tl.constexpr,
                         KV_QUANT: tl.constexpr, IEEE: tl.constexpr):  # fmt: skip
    """Add a block of quantized values, like `accumulate`: columns have separate accumulators by their place in a word."""
    PARTS: tl.constexpr = 4 if KV_QUANT == INT4 else 2
    dtype = ones.dtype
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - safe_max)
    probs = tl.exp2(scores - safe_max[:, None])
    sums = tl.dot(probs.to(dtype), ones, sums * rescale[:, None], input_precision="ieee" if IEEE else "tf32")
    offsets = (slots.to(tl.int64) * (D // PARTS))[:, None] + word[None, :]
    mask = in_range[:, None] & (word < D // PARTS)[None, :]
    parts = unpack_words(tl.load(values + offsets, mask=mask, other=0), dtype, KV_QUANT)
    scaled_probs = (probs * tl.load(value_scales + slots, mask=in_range, other=0.0)[None, :]).to(dtype)
    found = ()
    for part in tl.static_range(PARTS):
        acc = accs[part] * rescale[:, None]
        found = found + (tl.dot(scaled_probs, parts[part], acc, input_precision="ieee" if IEEE else "tf32"),)
    return new_max, sums, found


# ------------------------------------------------------------------ splits


@triton.jit
def split_index(position, FIRST_SPLIT: tl.constexpr):
    """The split of a position, by the same formula as `split_indices` on the host (attention.py): from FIRST_SPLIT positions the
    splits grow to 8 times as many."""
    low = tl.minimum(position // FIRST_SPLIT, position // (2 * FIRST_SPLIT) + 4)
    return tl.minimum(low, tl.minimum(position // (4 * FIRST_SPLIT) + 8, position // (8 * FIRST_SPLIT) + 16))


@triton.jit
def split_start(split, FIRST_SPLIT: tl.constexpr):
    """The first position of a split; the inverse of `split_index`."""
    low = tl.maximum(split * FIRST_SPLIT, (split - 4) * (2 * FIRST_SPLIT))
    return tl.maximum(low, tl.maximum((split - 8) * (4 * FIRST_SPLIT), (split - 16) * (8 * FIRST_SPLIT)))


@triton.jit
def merge_split(row_max, row_sum, acc, row_max_s, row_sum_s, acc_s):
    """Append a split to the state of the splits before it; a split without visible keys leaves the state unchanged."""
    new_max = tl.maximum(row_max, row_max_s)
    safe_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    scale_before, scale_now = tl.exp2(row_max - safe_max), tl.exp2(row_max_s - safe_max)
    nonempty = row_sum_s != 0.0
    row_sum = tl.where(nonempty, tl.fma(row_sum, scale_before, row_sum_s * scale_now), row_sum)
    acc = tl.where(nonempty[:, None], tl.fma(acc, scale_before[:, None], acc_s * scale_now[:, None]), acc)
    return tl.where(nonempty, new_max, row_max), row_sum, acc


@triton.jit
def _load_splits(
    split,
    stop,
    split_acc,
    split_max,
    split_sum,
    merge_row,
    merge_count,
    heads,
    live,
    column,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS_PER_LOAD: tl.constexpr,
):
    """Load the states of the next SPLITS_PER_LOAD splits; those from `stop` on are empty states."""
    maxima, sums, accs = (), (), ()
    for offset in tl.static_range(SPLITS_PER_LOAD):
        mask = live & (split + offset < stop)
        split_row = ((split + offset) * merge_count + merge_row).to(tl.int64) * HEADS + heads
        maxima = maxima + (tl.load(split_max + split_row, mask=mask, other=float("-inf")),)
        sums = sums + (tl.load(split_sum + split_row, mask=mask, other=0.0),)
        acc_mask = mask[:, None] & (column < D)[None, :]
        accs = accs + (tl.load(split_acc + split_row[:, None] * D + column[None, :], mask=acc_mask, other=0.0),)
    return maxima, sums, accs


@triton.jit
def merge_split_range(
    begin,
    stop,
    split_acc,
    split_max,
    split_sum,
    merge_row,
    merge_count,
    heads,
    live,
    column,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    SPLITS_PER_LOAD: tl.constexpr,
):
    """Merge splits [begin, stop) of one token, for `heads` [ROWS] and value columns [C], into maximum and sum [ROWS] and
    accumulator [ROWS, C]. Several splits are loaded at once, which hides latency and does not change the order of merging."""
    row_max = tl.full((heads.shape[0],), float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros((heads.shape[0],), dtype=tl.float32)
    acc = tl.zeros((heads.shape[0], column.shape[0]), dtype=tl.float32)
    for split in tl.range(begin, stop, SPLITS_PER_LOAD, num_stages=1):
        maxima, sums, accs = _load_splits(
            split, stop, split_acc, split_max, split_sum, merge_row, merge_count, heads, live, column, HEADS, D, SPLITS_PER_LOAD
        )
        for index in tl.static_range(SPLITS_PER_LOAD):
            row_max, row_sum, acc = merge_split(row_max, row_sum, acc, maxima[index], sums[index], accs[index])
    return row_max, row_sum, acc


@triton.jit(do_not_specialize=["merge_count"])
def merge_splits(
    out,
    split_acc,
    split_max,
    split_sum,
    tokens,
    first_keys,
    last_keys,
    merge_rows,
    merge_count,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FIRST_SPLIT: tl.constexpr,
    SPLITS_PER_LOAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """The attention output of one token and head, from its stored splits."""
    token = tl.load(tokens + tl.program_id(0))
    merge_row = tl.load(merge_rows + token)
    head = tl.program_id(1)
    begin = split_index(tl.load(first_keys + token), FIRST_SPLIT)
    stop = split_index(tl.load(last_keys + token), FIRST_SPLIT) + 1
    wait_for_inputs(PDL)
    d = tl.arange(0, BLOCK_D)
    one = tl.arange(0, 1)
    _, row_sum, acc = merge_split_range(
        begin, stop, split_acc, split_max, split_sum, merge_row, merge_count, head + one, one == 0, d, HEADS, D, SPLITS_PER_LOAD
    )
    launch_dependents(PDL)
    result = tl.div_rn(acc, tl.broadcast_to(row_sum[:, None], (1, BLOCK_D))).to(out.dtype.element_ty)
    out_ptrs = out + ((token.to(tl.int64) * HEADS + head) * D + one)[:, None] + d[None, :]
    tl.store(out_ptrs, result, mask=(d < D)[None, :])
