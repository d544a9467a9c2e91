// Work items of packed products with few rows. A unit is sixteen outputs, a span 256 inputs, a segment four spans (1,024 inputs);
// a work item is one unit by one segment.
//
// Compile-time constants: KIND (weight_units.cuh); TILES, tiles of eight rows; ROUTED, defined if rows are (row, expert) pairs.
// Provides: copying rows to shared memory, computing the sums of an item span by span, adding the sums of segments, and writing
// outputs. A warp computes items one at a time; weights are loaded directly into registers, one span ahead. The sums of segments
// are always added in order, so neither the constants nor the number of rows changes a result.
//
// A lane holds four accumulators per tile, in the layout of mma.m16n8k16: with g = lane / 4 and t = lane % 4, accumulator c
// belongs to output g + 8 (c / 2) and row 2 t + c % 2.

#include "weight_units.cuh"

struct ProductArguments {
    const byte *units;      // packed weights, in the layout of tensor_core_layout.py
    const halfword *x;      // [rows, spans * 256] float16: activations, each segment divided by its 2^e
    const float *factors;   // [rows, spans]: the 2^e by which a row's segment was divided (activations.py)
    const halfword *sums;   // [rows, spans, 16] float16: the hi parts of eight block sums, then the lo parts
    const halfword *bias, *residual;  // [outputs] and [rows, outputs] in the dtype of `out`, or null
    halfword *out;          // [rows, outputs] float16 or bf16: the result
    float *partial_sums;    // [unit_count, segments, TILES, 32 lanes, 4]: sums of items, used only without WHOLE_K
    int *counters;          // [unit_count]: finished segments of a unit during a product without WHOLE_K; zero between products
    long long residual_stride, out_stride;  // elements between rows
    int outputs, unit_count, spans, rows;
    int barriers;           // with WHOLE_K: byte offset in shared memory of the mbarriers, one per segment, for copies of rows
    int buffers;            // without WHOLE_K: segments of rows that fit into shared memory
    int bf16, pdl;          // bf16: whether `out` is bf16; pdl: flags PDL, OVERLAPS_PREVIOUS, OVERLAPS_NEXT (few_rows.cu)
#ifdef ROUTED
    const int *pairs;       // [rows]: pair number of each row of this tile
    int divide;             // pairs per row of activations: pair i reads row i / divide
#else
    float *carry;           // [blocks, TILES, 32 lanes, 4]: sums that a block passes to the next; CARRY_EMPTY between products
    int granule;            // with WHOLE_K: items that are assigned to blocks together, either all items of a unit or one
    int even, odd;          // with WHOLE_K: every block has `even` granules, and the first `odd` blocks have one more
    float per_segment;      // 1 / segments, for dividing by multiplication
#endif
};

#define PDL 1
#define OVERLAPS_PREVIOUS 2
#define OVERLAPS_NEXT 4

// Row `row` of a product is row input_row of the activations and row output_row of the output.
__device__ __forceinline__ int input_row(const ProductArguments &p, int row) {
#ifdef ROUTED
    return p.pairs[row] / p.divide;
#else
    return row;
#endif
}

__device__ __forceinline__ int output_row(const ProductArguments &p, int row) {
#ifdef ROUTED
    return p.pairs[row];
#else
    return row;
#endif
}

// A segment in shared memory: for each row its values and its block sums, padded so that eight rows use different banks; a row of
// zeros, which is read in place of rows that a tile does not have; then the factor 2^e of each row.
#define ROW_BYTES (SEGMENT * (SPAN * 2 + 32) + 16)
#define SUMS_AT (SEGMENT * SPAN * 2)

__device__ __forceinline__ int factors_at(const ProductArguments &p) { return (p.rows + 1) * ROW_BYTES; }

__device__ __forceinline__ int buffer_bytes(const ProductArguments &p) { return factors_at(p) + TILES * 8 * 4; }

// The byte offset in shared memory that this lane passes to ldmatrix_x4, which loads eight rows by 32 inputs as four 8 x 8
// matrices: lane 8 i + r addresses row r of matrix i.
__device__ __forceinline__ int row_offset(const ProductArguments &p, int tile) {
    const int lane = threadIdx.x & 31;
    return min(tile * 8 + (lane & 7), p.rows) * ROW_BYTES + (lane >> 3) * 16;
}

// Clears the row of zeros of every buffer, and the factors of rows that a tile does not have.
__device__ __forceinline__ void clear_rows(const ProductArguments &p, byte *rows, int bytes, int buffers) {
    const int pieces = (bytes - p.rows * ROW_BYTES) / 16;
    for (int i = threadIdx.x; i < buffers * pieces; i += blockDim.x)
        ((uint4 *)(rows + i / pieces * bytes + p.rows * ROW_BYTES))[i % pieces] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void copy_rows(const ProductArguments &p, word to, int span) {
    const int live = min(SEGMENT, p.spans - span);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.rows * (SEGMENT * 32); i += blockDim.x) {  // sixteen bytes per copy
        const int row = i / (SEGMENT * 32), piece = i % (SEGMENT * 32);
        if (piece < live * 32)
            copy_async_16(to + row * ROW_BYTES + piece * 16, p.x + ((long long)input_row(p, row) * p.spans + span) * SPAN + piece * 8);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < p.rows * (SEGMENT * 2); i += blockDim.x) {
        const int row = i / (SEGMENT * 2), piece = i % (SEGMENT * 2);
        const long long at = (long long)input_row(p, row) * p.spans + span;
        if (piece < live * 2) copy_async_16(to + row * ROW_BYTES + SUMS_AT + piece * 16, p.sums + at * 16 + piece * 8);
        if (piece == 0) copy_async_4(to + factors_at(p) + row * 4, p.factors + at);
    }
}

__device__ __forceinline__ void clear(float (&sums)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) sums[n][c] = 0.0f;
}

__device__ __forceinline__ void add_to(float (&total)[4], float4 v) {
    total[0] = __fadd_rn(total[0], v.x);
    total[1] = __fadd_rn(total[1], v.y);
    total[2] = __fadd_rn(total[2], v.z);
    total[3] = __fadd_rn(total[3], v.w);
}

__device__ __forceinline__ float4 four(const float (&v)[4]) { return make_float4(v[0], v[1], v[2], v[3]); }

__device__ __forceinline__ float residual_at(const ProductArguments &p, int row, int output) {
    return read_number(p.residual + row * p.residual_stride + output, p.bf16);
}

// Rounds and writes the outputs of a unit; residual(n, c, row, output) returns the residual of accumulator c of tile n.
template <class Residual>
__device__ __forceinline__ void write_outputs(const ProductArguments &p, const float (&total)[TILES][4], int unit_index, Residual residual) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int output = unit_index * 16 + (lane >> 2) + 8 * (c >> 1);
            const int row = n * 8 + 2 * (lane & 3) + (c & 1);
            if (output < p.outputs && row < p.rows) {
                float value = rounded_to(total[n][c], p.bf16);
                if (p.bias) value = rounded_to(value + read_number(p.bias + output, p.bf16), p.bf16);
                if (p.residual) value = rounded_to(value + residual(n, c, row, output), p.bf16);
                write_number(p.out + output_row(p, row) * p.out_stride + output, value, p.bf16);
            }
        }
}

__device__ __forceinline__ void write_outputs(const ProductArguments &p, const float (&total)[TILES][4], int unit_index) {
    write_outputs(p, total, unit_index, [&](int, int, int row, int output) { return residual_at(p, row, output); });
}

// Stores this lane's sums of an item. `to` is the lane's address for the first tile of eight rows.
__device__ __forceinline__ void store_partial_sums(const ProductArguments &p, float4 *to, const float (&sums)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (n * 8 + 2 * (int)(threadIdx.x & 3) < p.rows) __stcg(to + n * 32, four(sums[n]));
}

// Adds a unit's sums of segments in order, from global memory, and writes the unit's outputs.
__device__ __forceinline__ void reduce_segments(const ProductArguments &p, int segments, int unit_index) {
    const float4 *from = (const float4 *)p.partial_sums + (long long)unit_index * segments * TILES * 32 + (threadIdx.x & 31);
    float total[TILES][4];
    clear(total);
#pragma unroll 4
    for (int i = 0; i < segments; i++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
            if (n * 8 + 2 * (int)(threadIdx.x & 3) < p.rows) add_to(total[n], __ldcg(from + (long long)i * (TILES * 32) + n * 32));
    write_outputs(p, total, unit_index);
}

// Adds the stored sum of the preceding segments, or zero if `stored` is null.
__device__ __forceinline__ void add_previous(float (&sums)[TILES][4], const float4 *stored) {
#pragma unroll
    for (int n = 0; n < TILES; n++) add_to(sums[n], stored ? stored[n * 32] : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}

// After storing the sums of an item, a warp increments the counter of the item's unit. If the product has at most FEW_SEGMENTS
// segments and the block at least MANY_ITEMS items per warp, a warp increments the counters of MAX_UNCOUNTED items at once, so
// that their stores need one memory fence. Counting more at once would postpone the reduction of more units to the end of the
// product.
#define MAX_UNCOUNTED 2
#define MANY_ITEMS 4
#define FEW_SEGMENTS 8

// Increments the counters of a warp's stored items (lane i has the unit of item i) and, where an item was the last of its unit to
// be stored, writes the unit's outputs. __syncwarp before and after the atomic orders all lanes' stores before it and their loads
// after it: neither ballot nor shuffle orders memory.
__device__ __forceinline__ void finish_counted(const ProductArguments &p, int unit_index, int count, int segments) {
    const int lane = threadIdx.x & 31;
    __syncwarp();
    int is_last = 0;
    if (lane < count) {
        is_last = atomic_increment(p.counters + unit_index) == segments - 1;
        if (is_last) p.counters[unit_index] = 0;
    }
    word last = __ballot_sync(0xFFFFFFFFu, is_last);
    if (last) __syncwarp();
    while (last) {
        reduce_segments(p, segments, __shfl_sync(0xFFFFFFFFu, unit_index, __ffs(last) - 1));
        last &= last - 1;
    }
}

// Adds the products of one span to the sums of sixteen outputs. Each register of `unit` is refilled with weights of the span at
// `next` as soon as it has been used.
__device__ __forceinline__ void add_span(const ProductArguments &p, float (&sums)[TILES][4], Unit &unit, const byte *next, bool more, const byte *rows,
                                         const word (&own)[TILES], int place) {
    const int lane = threadIdx.x & 31;
    const Unit now = unit;
    load_scales(unit, next, lane, more);
    if (FIFTH_BIT) load_high(unit, next, lane, 0, more);
    Scales scales;
    unpack_scales(scales, now);
    float span_sums[TILES][4];
    clear(span_sums);
#pragma unroll
    for (int block = 0; block < 8; block++) {
        word a[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            select_scales(scales, 2 * block + i);
            dequantize_step(a[i], now, scales, 2 * block + i);
        }
        if (KIND == Q8_0) {
            load_codes(unit, next, lane, block, more);
        } else if (block & 1) {
            load_codes(unit, next, lane, block / 2, more);
        }
        if (KIND == Q6_K && (block & 3) == 3) load_high(unit, next, lane, block / 4, more);
#pragma unroll
        for (int n = 0; n < TILES; n++) {
            word b[4];
            ldmatrix_x4(b, own[n] + place * SPAN * 2 + block * 64);
            mma(span_sums[n], a[0], b[0], b[1]);
            mma(span_sums[n], a[1], b[2], b[3]);
            if (SPAN_SCALE) continue;
            float whole[2] = {0.0f, 0.0f};
            if (MINIMA) {
#pragma unroll
                for (int c = 0; c < 2; c++) {
                    const int row = min(n * 8 + 2 * (lane & 3) + c, p.rows);
                    const halfword *sum = (const halfword *)(rows + row * ROW_BYTES + SUMS_AT + place * 32) + block;
                    whole[c] = half_to_float(sum[0]) + half_to_float(sum[8]);
                }
            }
#pragma unroll
            for (int c = 0; c < 4; c++) {
                sums[n][c] = __fmaf_rn(span_sums[n][c], block_scale(now, block, c >> 1), sums[n][c]);
                span_sums[n][c] = 0.0f;
                if (MINIMA) sums[n][c] = __fmaf_rn(whole[c & 1], block_minimum(now, block, c >> 1), sums[n][c]);
            }
        }
    }
    if (!SPAN_SCALE) return;
    const float whole[2] = {span_scale(now, 0), span_scale(now, 1)};
    word minima[4];
    float min_scales[2];
    if (SIX_BIT_SCALES) {
        minima[0] = minima[2] = minima_pair(now, 0);
        minima[1] = minima[3] = minima_pair(now, 1);
        const word factors = minima_scales(now, lane);
        min_scales[0] = half_to_float(factors & 0xFFFFu);
        min_scales[1] = half_to_float(factors >> 16);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int c = 0; c < 4; c++) sums[n][c] = __fmaf_rn(span_sums[n][c], whole[c >> 1], sums[n][c]);
        if (SIX_BIT_SCALES) {
            float taken[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            word b0, b1;
            ldmatrix_x2(b0, b1, own[n] + SUMS_AT + place * 32);
            mma(taken, minima, b0, b1);
#pragma unroll
            for (int c = 0; c < 4; c++) sums[n][c] = __fmaf_rn(taken[c], -min_scales[c >> 1], sums[n][c]);
        }
    }
}

// Computes the sums of an item: its spans in order, then times 2^e. The loads of the first span of `next` are issued before
// this returns.
__device__ __forceinline__ void add_item(const ProductArguments &p, float (&sums)[TILES][4], Unit &unit, const byte *at, int spans, const byte *next,
                                         bool more, const byte *rows, const word (&own)[TILES]) {
#pragma unroll
    for (int s = 0; s < SEGMENT; s++) {
        if (s >= spans) break;
        const bool closes = s + 1 >= spans;
        add_span(p, sums, unit, closes ? next : at + (s + 1) * UNIT_BYTES, !closes || more, rows, own, s);
    }
    const float *powers = (const float *)(rows + factors_at(p)) + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++)  // two multiplications, because the product of both factors may overflow
            sums[n][c] = __fmul_rn(__fmul_rn(sums[n][c], subnormal_inverse(c >> 1)), powers[n * 8 + (c & 1)]);
}

// Numbers the items of a block from item `turn` on, so that blocks start at different units: returns (item + turn) mod items, for
// item and turn below items.
__device__ __forceinline__ int rotated(int item, int turn, int items) { return item + turn < items ? item + turn : item + turn - items; }

// A work item: its unit and segment, the address of its weights, and the number of spans in its segment (`live`).
struct Item {
    const byte *at;
    int unit_index, segment, live;
};

__device__ __forceinline__ void locate(const ProductArguments &p, Item &item) {
    item.at = p.units + ((long long)item.unit_index * p.spans + item.segment * SEGMENT) * UNIT_BYTES;
    item.live = min(SEGMENT, p.spans - item.segment * SEGMENT);
}

// Item number `item`, when items are numbered by segment first and by unit within a segment.
__device__ __forceinline__ Item locate_item(const ProductArguments &p, int item) {
    Item found;
    found.segment = item / p.unit_count;
    found.unit_index = item - found.segment * p.unit_count;
    locate(p, found);
    return found;
}
