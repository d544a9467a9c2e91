// What products of packed weights with few rows have in common: an item is sixteen outputs by a segment of four spans.
//
// In: TILES (of eight rows) beside the KIND; GROUPED where rows are pairs of a row and one of its experts. Out: rows in shared memory, an
// item's sums span by span, and sums of segments added up and written. A warp takes an item after the other; its weights come straight
// into registers, a span ahead. Sums of segments are added from front to back by whoever does it: no number here, and no number of
// rows, changes a bit.

#include "weight_units.cuh"

struct Product {
    const byte *units;
    const halfword *x;      // [rows, spans * 256] float16
    const float *factors;   // [rows, spans]
    const halfword *sums;   // [rows, spans, 16] float16
    const halfword *bias, *residual;
    halfword *out;
    float *parts;           // [tall, segments, TILES, 32 lanes, 4]: sums of segments, where there are several and not INSIDE
    int *counters;          // [tall], zero between products
    long long residual_stride, out_stride;
    int outputs, tall, spans, rows;
    int barriers;           // where in shared memory rows are waited for, where INSIDE
    int buffers;            // segments of rows that there is room for, where not
    int bf16, pdl;          // pdl: of PDL, JOINS and JOINED (few_rows.cu)
#ifdef GROUPED
    const int *pairs;       // of a row and one of its experts: where the rows of this product stand
    int divide;             // pairs that read one row
#else
    float *handed;          // [blocks, TILES, 32 lanes, 4]: sums that a block hands on to the next, NOBODYS between products
    int granule;            // items that no two blocks share, where INSIDE: those of a unit, or one
    int even, odd;          // granules of a block, and how many blocks have one more
    float per_segment;      // one by the segments
#endif
};

#define PDL 1
#define JOINS 2
#define JOINED 4

// Where row `row` of a product stands among all rows, and where its result does
__device__ __forceinline__ int source_of(const Product &p, int row) {
#ifdef GROUPED
    return p.pairs[row] / p.divide;
#else
    return row;
#endif
}

__device__ __forceinline__ int target_of(const Product &p, int row) {
#ifdef GROUPED
    return p.pairs[row];
#else
    return row;
#endif
}

// Shared memory of a segment: per row numbers and their sums, padded so that eight rows lie in different banks, and a row of zeros
// for those that are not there; then 2^e of each row.
#define ROW_BYTES (SEGMENT * (SPAN * 2 + 32) + 16)
#define SUMS_AT (SEGMENT * SPAN * 2)

__device__ __forceinline__ int powers_at(const Product &p) { return (p.rows + 1) * ROW_BYTES; }

__device__ __forceinline__ int buffer_bytes(const Product &p) { return powers_at(p) + TILES * 8 * 4; }

// Eight rows by 32 inputs, four matrices of eight by eight: lane 8 i + r brings row r of matrix i.
__device__ __forceinline__ int row_at(const Product &p, int tile) {
    const int lane = threadIdx.x & 31;
    return min(tile * 8 + (lane & 7), p.rows) * ROW_BYTES + (lane >> 3) * 16;
}

// Of so many buffers the row of zeros, and 2^e of rows that are not there
__device__ __forceinline__ void clear_rows(const Product &p, byte *rows, int bytes, int buffers) {
    const int pieces = (bytes - p.rows * ROW_BYTES) / 16;
    for (int i = threadIdx.x; i < buffers * pieces; i += blockDim.x)
        ((uint4 *)(rows + i / pieces * bytes + p.rows * ROW_BYTES))[i % pieces] = make_uint4(0, 0, 0, 0);
}

__device__ __forceinline__ void bring_rows(const Product &p, word to, int span) {
    const int live = min(SEGMENT, p.spans - span);
#pragma unroll 1
    for (int i = threadIdx.x; i < p.rows * (SEGMENT * 32); i += blockDim.x) {  // pieces of sixteen bytes
        const int row = i / (SEGMENT * 32), piece = i % (SEGMENT * 32);
        if (piece < live * 32)
            copy_sixteen(to + row * ROW_BYTES + piece * 16, p.x + ((long long)source_of(p, row) * p.spans + span) * SPAN + piece * 8);
    }
#pragma unroll 1
    for (int i = threadIdx.x; i < p.rows * (SEGMENT * 2); i += blockDim.x) {
        const int row = i / (SEGMENT * 2), piece = i % (SEGMENT * 2);
        const long long at = (long long)source_of(p, row) * p.spans + span;
        if (piece < live * 2) copy_sixteen(to + row * ROW_BYTES + SUMS_AT + piece * 16, p.sums + at * 16 + piece * 8);
        if (piece == 0) copy_four(to + powers_at(p) + row * 4, p.factors + at);
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

__device__ __forceinline__ float residual_at(const Product &p, int row, int output) {
    return read_number(p.residual + row * p.residual_stride + output, p.bf16);
}

// The outputs of a unit. `residual` says what is added to output c of tile n where something is, which is this row's.
template <class Residual>
__device__ __forceinline__ void finish(const Product &p, const float (&total)[TILES][4], int tall, Residual residual) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int output = tall * 16 + (lane >> 2) + 8 * (c >> 1);
            const int row = n * 8 + 2 * (lane & 3) + (c & 1);
            if (output < p.outputs && row < p.rows) {
                float value = rounded_to(total[n][c], p.bf16);
                if (p.bias) value = rounded_to(value + read_number(p.bias + output, p.bf16), p.bf16);
                if (p.residual) value = rounded_to(value + residual(n, c, row, output), p.bf16);
                write_number(p.out + target_of(p, row) * p.out_stride + output, value, p.bf16);
            }
        }
}

__device__ __forceinline__ void finish(const Product &p, const float (&total)[TILES][4], int tall) {
    finish(p, total, tall, [&](int, int, int row, int output) { return residual_at(p, row, output); });
}

// Sums of an item, as this lane has them: `to` is its place of the first tile.
__device__ __forceinline__ void keep(const Product &p, float4 *to, const float (&sums)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (n * 8 + 2 * (int)(threadIdx.x & 3) < p.rows) __stcg(to + n * 32, four(sums[n]));
}

// Sums of a unit's items, in memory, segment by segment
__device__ __forceinline__ void add_up(const Product &p, int segments, int tall) {
    const float4 *from = (const float4 *)p.parts + (long long)tall * segments * TILES * 32 + (threadIdx.x & 31);
    float total[TILES][4];
    clear(total);
#pragma unroll 4
    for (int i = 0; i < segments; i++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
            if (n * 8 + 2 * (int)(threadIdx.x & 3) < p.rows) add_to(total[n], __ldcg(from + (long long)i * (TILES * 32) + n * 32));
    finish(p, total, tall);
}

// To the sums of the segments before, or to nothing
__device__ __forceinline__ void add_before(float (&sums)[TILES][4], const float4 *kept) {
#pragma unroll
    for (int n = 0; n < TILES; n++) add_to(sums[n], kept ? kept[n * 32] : make_float4(0.0f, 0.0f, 0.0f, 0.0f));
}

// Waiting for memory once for two items pays where a warp has many, but what is settled late is more to add up in the end.
#define MOST_UNSETTLED 2
#define MANY_ITEMS 4
#define FEW_SEGMENTS 8

// Items of a warp whose sums are in memory, and nobody knows yet: lane i holds the unit of item i. All lanes' sums come before
// the lane that counts, and what it finds comes before all lanes' reading: a warp meets before and after, since neither a ballot
// nor a shuffle puts memory in order.
__device__ __forceinline__ void settle(const Product &p, int tall, int count, int segments) {
    const int lane = threadIdx.x & 31;
    __syncwarp();
    int is_last = 0;
    if (lane < count) {
        is_last = counted(p.counters + tall) == segments - 1;
        if (is_last) p.counters[tall] = 0;
    }
    word last = __ballot_sync(0xFFFFFFFFu, is_last);
    if (last) __syncwarp();
    while (last) {
        add_up(p, segments, __shfl_sync(0xFFFFFFFFu, tall, __ffs(last) - 1));
        last &= last - 1;
    }
}

// One span of sixteen outputs: `unit` is used up, and filled again from `next`, register by register as they become free.
__device__ __forceinline__ void add_span(const Product &p, float (&sums)[TILES][4], Unit &unit, const byte *next, bool more, const byte *rows,
                                         const word (&own)[TILES], int place) {
    const int lane = threadIdx.x & 31;
    const Unit now = unit;
    load_scales(unit, next, lane, more);
    if (FIVE) load_high(unit, next, lane, 0, more);
    Scales scales;
    open_scales(scales, now);
    float span_sums[TILES][4];
    clear(span_sums);
#pragma unroll
    for (int block = 0; block < 8; block++) {
        word a[2][4];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            next_scales(scales, 2 * block + i);
            open_step(a[i], now, scales, 2 * block + i);
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
            matrices(b, own[n] + place * SPAN * 2 + block * 64);
            step(span_sums[n], a[0], b[0], b[1]);
            step(span_sums[n], a[1], b[2], b[3]);
            if (WHOLE) continue;
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
    if (!WHOLE) return;
    const float whole[2] = {whole_scale(now, 0), whole_scale(now, 1)};
    word minima[4];
    float least[2];
    if (SIX_BIT_SCALES) {
        minima[0] = minima[2] = minima_pair(now, 0);
        minima[1] = minima[3] = minima_pair(now, 1);
        const word factors = minima_factors(now, lane);
        least[0] = half_to_float(factors & 0xFFFFu);
        least[1] = half_to_float(factors >> 16);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
#pragma unroll
        for (int c = 0; c < 4; c++) sums[n][c] = __fmaf_rn(span_sums[n][c], whole[c >> 1], sums[n][c]);
        if (SIX_BIT_SCALES) {
            float taken[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            word b0, b1;
            two_matrices(b0, b1, own[n] + SUMS_AT + place * 32);
            step(taken, minima, b0, b1);
#pragma unroll
            for (int c = 0; c < 4; c++) sums[n][c] = __fmaf_rn(taken[c], -least[c >> 1], sums[n][c]);
        }
    }
}

// So many spans of sixteen outputs, one behind the other, then times 2^e; and the first of what comes `next` is on its way.
__device__ __forceinline__ void add_item(const Product &p, float (&sums)[TILES][4], Unit &unit, const byte *at, int spans, const byte *next,
                                         bool more, const byte *rows, const word (&own)[TILES]) {
#pragma unroll
    for (int s = 0; s < SEGMENT; s++) {
        if (s >= spans) break;
        const bool closes = s + 1 >= spans;
        add_span(p, sums, unit, closes ? next : at + (s + 1) * UNIT_BYTES, !closes || more, rows, own, s);
    }
    const float *powers = (const float *)(rows + powers_at(p)) + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++)  // size and power together may be no number
            sums[n][c] = __fmul_rn(__fmul_rn(sums[n][c], size_of(c >> 1)), powers[n * 8 + (c & 1)]);
}

// Item `item` of so many, where the first is another one
__device__ __forceinline__ int turned(int item, int turn, int items) { return item + turn < items ? item + turn : item + turn - items; }

// Which unit and segment an item is, where its weights lie, and how many spans it has
struct Item {
    const byte *at;
    int tall, segment, live;
};

__device__ __forceinline__ void place(const Product &p, Item &item) {
    item.at = p.units + ((long long)item.tall * p.spans + item.segment * SEGMENT) * UNIT_BYTES;
    item.live = min(SEGMENT, p.spans - item.segment * SEGMENT);
}

// Item `item` of all, segment by segment
__device__ __forceinline__ Item place_of(const Product &p, int item) {
    Item found;
    found.segment = item / p.tall;
    found.tall = item - found.segment * p.tall;
    place(p, found);
    return found;
}
