// Products of packed weights with few rows, weights as plain float16, and rows of weights as numbers.
//
// In: units of 16 outputs by 256 inputs, as fragments.py lays them, and rows as spans.py makes them ready; the rule of the
// arithmetic stands there. Out: [rows, outputs]. Compiled at run time by nvrtc.py for a KIND (the kind's number in GGUF): with
// TILES (of eight rows), WARPS (of a block, at most) and INSIDE the product, with GROUPED and BLOCKS (of a multiprocessor, at least) for INSIDE that of experts, without
// them the rest.
//
// Work comes in items: sixteen outputs by a segment of four spans. A warp takes an item after the other; its weights come straight
// into registers, a span ahead, and lie there as the matrix unit takes them. There are two ways to share items out:
//   INSIDE 1  a block of threads has all segments of some outputs. Rows of all segments lie in shared memory, and so do the sums of
//             items, which the block adds up in the end.
//   INSIDE 0  items stand segment by segment, and every block has an equal share of them, so it needs rows of one segment or two.
//             Sums of items go to memory; whoever is the last to finish one of an output adds them.
//   GROUPED   a block of threads has a tile of the rows of one expert, and some of its outputs. A few warps share sixteen outputs, a
//             segment each, and one of them adds up. There is nothing to share out: the tiles are made on the device.
// Sums of segments are added from front to back in every way: no number here, and no number of rows, changes a bit.

#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define MXFP4 39
#define NVFP4 40

#define FIVE (KIND == Q5_0 || KIND == Q5_1 || KIND == Q5_K)
#define SIX_BIT_SCALES (KIND == Q4_K || KIND == Q5_K)
#define FOURS (KIND == MXFP4 || KIND == NVFP4)    // codes of a sign, two bits of exponent and one of mantissa
#define WHOLE (SIX_BIT_SCALES || KIND == Q6_K || KIND == NVFP4)  // one scale for a whole span on top of small ones
#define MINIMA (KIND == Q4_1 || KIND == Q5_1)     // a minimum of float16 per block
#define PLAIN_SCALES (KIND == Q4_0 || KIND == Q5_0 || KIND == Q8_0)

typedef unsigned int word;
typedef unsigned short halfword;
typedef unsigned char byte;

#define CODE_LOADS (KIND == Q8_0 ? 8 : 4)
#define HIGH_LOADS (FIVE ? 1 : KIND == Q6_K ? 2 : 0)
#define SCALE_LOADS (SIX_BIT_SCALES || KIND == MXFP4 ? 1 : MINIMA ? 4 : 2)
#define CODE_BYTES (CODE_LOADS * 512)
#define HIGH_BYTES (HIGH_LOADS * 512)
#define SCALE_BYTES (SCALE_LOADS * 128)
#define EXTRA_BYTES (SIX_BIT_SCALES ? 128 : KIND == NVFP4 ? 64 : KIND == Q6_K ? 32 : 0)
#define UNIT_BYTES (CODE_BYTES + HIGH_BYTES + SCALE_BYTES + EXTRA_BYTES)
#define SPAN 256
#define SEGMENT 4

// ------------------------------------------------------------------ single instructions

// What is read once. Where there is nothing more to read nobody uses what the register has.
__device__ __forceinline__ void load_once(uint4 &v, const byte *at, bool more) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at), "r"((int)more));
}

__device__ __forceinline__ void load_once(word &v, const byte *at, bool more) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.nc.L1::no_allocate.u32 %0, [%1];}"
                 : "=r"(v) : "l"(at), "r"((int)more));
}

__device__ __forceinline__ word and_or(word a, word mask, word c) {  // (a & mask) | c
    word v;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(v) : "r"(a), "r"(mask), "r"(c));
    return v;
}

__device__ __forceinline__ word mul2(word a, word b) {
    word v;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

// Both halves of a with one half of b, the lower or the upper.
template <int HALF> __device__ __forceinline__ word times_half(word a, word b) {
    word v;
    if (HALF) {
        asm("{.reg .b16 l, h; .reg .b32 f; mov.b32 {l, h}, %2; mov.b32 f, {h, h}; mul.rn.f16x2 %0, %1, f;}" : "=r"(v) : "r"(a), "r"(b));
    } else {
        asm("{.reg .b16 l, h; .reg .b32 f; mov.b32 {l, h}, %2; mov.b32 f, {l, l}; mul.rn.f16x2 %0, %1, f;}" : "=r"(v) : "r"(a), "r"(b));
    }
    return v;
}

// The same, and plus one half of c.
template <int HALF> __device__ __forceinline__ word fma_half(word a, word b, word c) {
    word v;
    if (HALF) {
        asm("{.reg .b16 l, h; .reg .b32 f, z; mov.b32 {l, h}, %2; mov.b32 f, {h, h}; mov.b32 {l, h}, %3; mov.b32 z, {h, h}; fma.rn.f16x2 %0, %1, f, z;}"
            : "=r"(v) : "r"(a), "r"(b), "r"(c));
    } else {
        asm("{.reg .b16 l, h; .reg .b32 f, z; mov.b32 {l, h}, %2; mov.b32 f, {l, l}; mov.b32 {l, h}, %3; mov.b32 z, {l, l}; fma.rn.f16x2 %0, %1, f, z;}"
            : "=r"(v) : "r"(a), "r"(b), "r"(c));
    }
    return v;
}

__device__ __forceinline__ word add2(word a, word b) {
    word v;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

__device__ __forceinline__ word permute(word a, word b, word selector) {
    word v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}

__device__ __forceinline__ float half_to_float(word bits) {
    float v;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(bits));
    return v;
}

__device__ __forceinline__ float rounded_to(float value, int bf16) {  // to the result's dtype and back
    float v;
    if (bf16) {
        asm("{.reg .b16 h; .reg .b32 w; cvt.rn.bf16.f32 h, %1; mov.b32 w, {0, h}; mov.b32 %0, w;}" : "=f"(v) : "f"(value));
    } else {
        asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "f"(value));
    }
    return v;
}

__device__ __forceinline__ float read_number(const halfword *at, int bf16) {
    word bits = *at;
    return bf16 ? __uint_as_float(bits << 16) : half_to_float(bits);
}

__device__ __forceinline__ void write_number(halfword *at, float value, int bf16) {
    halfword v;
    if (bf16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(value));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(value));
    }
    *at = v;
}

// One step of the matrix unit: sums [16, 8] += a [16, 16] * b [16, 8]
__device__ __forceinline__ void step(float (&sums)[4], const word (&a)[4], word b0, word b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void matrices(word (&v)[4], word at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}

__device__ __forceinline__ void two_matrices(word &v0, word &v1, word at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(v0), "=r"(v1) : "r"(at));
}

// The same number, of which the compiler knows nothing: it is kept in a register, and what is added to it becomes part of an address.
__device__ __forceinline__ word kept_apart(word v) {
    asm volatile("mov.b32 %0, %0;" : "+r"(v));
    return v;
}

__device__ __forceinline__ void copy_sixteen(word to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void copy_four(word to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}

// Counts one up. What this thread has seen is seen by whoever counts later, and what earlier ones had seen is seen here.
__device__ __forceinline__ int counted(int *counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(__cvta_generic_to_global(counter)) : "memory");
    return before;
}

__device__ __forceinline__ word &part_of(uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ word part_of(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// ------------------------------------------------------------------ one unit in the registers of a warp

#define MAGIC 0x64006400u        // 1024 in float16, twice: its last ten bits are a whole number on top
#define TOP_MAGIC 0x54005400u    // 64, twice: the same without the last four bits
#define MINUS_1024 0xE400E400u
#define MINUS_1152 0xE480E480u
#define MINUS_64 0xD400D400u
#define MINUS_1024_AND_64 0xD400E400u
#define NOTHING_AND_96 0xD6000000u

__constant__ word sixty_fours = 0x64646464u;  // the compiler may not see what it is, or it would put the selectors into registers

struct Unit {
    uint4 codes[CODE_LOADS];
    uint4 high[HIGH_LOADS > 0 ? HIGH_LOADS : 1];
    uint4 scales[SCALE_LOADS];
    word extra;
#if KIND == NVFP4
    word second;
#endif
};

__device__ __forceinline__ void load_codes(Unit &unit, const byte *at, int lane, int which, bool more) {
    load_once(unit.codes[which], at + which * 512 + lane * 16, more);
}

__device__ __forceinline__ void load_high(Unit &unit, const byte *at, int lane, int which, bool more) {
    load_once(unit.high[which], at + CODE_BYTES + which * 512 + lane * 16, more);
}

__device__ __forceinline__ void load_scales(Unit &unit, const byte *at, int lane, bool more) {
    const byte *scales = at + CODE_BYTES + HIGH_BYTES;
#pragma unroll
    for (int i = 0; i < SCALE_LOADS; i++) load_once(unit.scales[i], scales + (lane >> 2) * (16 * SCALE_LOADS) + i * 16, more);
    if (SIX_BIT_SCALES) load_once(unit.extra, scales + SCALE_BYTES + lane * 4, more);
    if (KIND == Q6_K) load_once(unit.extra, scales + SCALE_BYTES + (lane >> 2) * 4, more);
#if KIND == NVFP4
    load_once(unit.extra, scales + SCALE_BYTES + (lane >> 2) * 8, more);
    load_once(unit.second, scales + SCALE_BYTES + (lane >> 2) * 8 + 4, more);
#endif
}

__device__ __forceinline__ void load_unit(Unit &unit, const byte *at, int lane, bool more) {
#pragma unroll
    for (int i = 0; i < CODE_LOADS; i++) load_codes(unit, at, lane, i, more);
#pragma unroll
    for (int i = 0; i < HIGH_LOADS; i++) load_high(unit, at, lane, i, more);
    load_scales(unit, at, lane, more);
}

// Small scales of outputs g and g + 8 in the shape that the codes are multiplied with, that of output g in the lower half.
struct Scales {
    word magic;
    word pairs[8];  // of K kinds: bytes of output g and g + 8 side by side, two of each in a word
    word factor, zero;
};

__device__ __forceinline__ void pair_up(word (&pairs)[8], int i, word first, word second) {
    pairs[2 * i] = permute(first, second, 0x5140u);
    pairs[2 * i + 1] = permute(first, second, 0x7362u);
}

__device__ __forceinline__ void open_scales(Scales &scales, const Unit &unit) {
    scales.magic = sixty_fours;
    if (SIX_BIT_SCALES) {
        const uint4 s = unit.scales[0];
        pair_up(scales.pairs, 0, s.x & 0x3F3F3F3Fu, s.y & 0x3F3F3F3Fu);
        pair_up(scales.pairs, 1, and_or(s.z, 0x0F0F0F0Fu, (s.x >> 2) & 0x30303030u), and_or(s.z >> 4, 0x0F0F0F0Fu, (s.y >> 2) & 0x30303030u));
    }
    if (KIND == Q6_K || KIND == NVFP4) {
        const word sign = KIND == Q6_K ? 0x80808080u : 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            pair_up(scales.pairs, i, part_of(unit.scales[0], i) ^ sign, part_of(unit.scales[1 % SCALE_LOADS], i) ^ sign);
    }
}

// Before step i: K kinds whose small scales change there
__device__ __forceinline__ void next_scales(Scales &scales, int i) {
    if (SIX_BIT_SCALES && i % 2 == 0) {
        const int block = i / 2;
        scales.factor = add2(permute(scales.pairs[block >> 1], scales.magic, block & 1 ? 0x4342u : 0x4140u), MINUS_1024);
        scales.zero = mul2(scales.factor, MINUS_1024_AND_64);
    }
    if (KIND == Q6_K) {
        scales.factor = add2(permute(scales.pairs[i >> 1], scales.magic, i & 1 ? 0x4342u : 0x4140u), MINUS_1152);
        scales.zero = mul2(scales.factor, NOTHING_AND_96);
    }
    if (KIND == NVFP4) {  // four bits of exponent and three of mantissa, brought into float16's places, and half of that
        const word times = 0x58005800u;
        scales.factor = mul2(permute(scales.pairs[i >> 1], 0, i & 1 ? 0x3424u : 0x1404u) >> 1, times);
    }
}

// What is taken off 1024 + code, and off 64 + code, for a kind whose codes are multiplied with nothing
#define OFF_1024 (KIND == Q4_0 ? 0xE408E408u : KIND == Q5_0 ? 0xE410E410u : KIND == Q6_K ? 0xE420E420u : MINUS_1024)
#define OFF_64 (KIND == Q4_0 ? 0xD480D480u : KIND == Q5_0 ? 0xD500D500u : KIND == Q6_K ? 0xD600D600u : MINUS_64)

// The weights of step i of sixteen inputs, in float16
__device__ __forceinline__ void open_step(word (&a)[4], const Unit &unit, const Scales &scales, int i) {
    if (KIND == Q8_0) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const word w = part_of(unit.codes[i / 2], 2 * (i & 1) + u) ^ 0x80808080u;
            a[2 * u] = add2(permute(w, scales.magic, 0x4140u), MINUS_1152);
            a[2 * u + 1] = add2(permute(w, scales.magic, 0x4342u), MINUS_1152);
        }
        return;
    }
    const word w = part_of(unit.codes[i / 4], i & 3);
    if (FOURS) {  // sign, two bits of exponent and one of mantissa, brought into float16's places
        const word times = 0x78007800u;
        a[0] = mul2(and_or(w << 9, 0x0E000E00u, (w << 2) & 0x80008000u), times);
        a[1] = mul2(and_or(w << 6, 0x0E000E00u, (w << 1) & 0x80008000u), times);
        a[2] = mul2((w << 3) & 0x8E008E00u, times);
        a[3] = mul2(w & 0x8E008E00u, times);
        if (KIND == NVFP4) {
#pragma unroll
            for (int u = 0; u < 2; u++) {
                a[2 * u] = times_half<0>(a[2 * u], scales.factor);
                a[2 * u + 1] = times_half<1>(a[2 * u + 1], scales.factor);
            }
        }
        return;
    }
#pragma unroll
    for (int u = 0; u < 2; u++) {
        const word own = u ? w >> 8 : w;
        word low = and_or(own, 0x000F000Fu, MAGIC);  // 1024 + code
        word top = and_or(own, 0x00F000F0u, TOP_MAGIC);  // 64 + code
        if (FIVE) {
            const word high = part_of(unit.high[0], i / 4);
            const int place = 2 * (i & 3) + u;
            const word moved = place < 4 ? high << (4 - place) : high >> place;
            low = and_or(moved, 0x00100010u, low);
            top = and_or(moved, 0x01000100u, top);
        }
        if (KIND == Q6_K) {
            const word high = part_of(unit.high[i / 8], (i / 2) & 3);
            const int place = 2 * (i & 1) + u;
            const word moved = place == 0 ? high << 4 : place == 1 ? high << 2 : place == 2 ? high >> 4 : high >> 6;
            low = and_or(moved, 0x00300030u, low);
            top = and_or(moved, 0x03000300u, top);
        }
        if (SIX_BIT_SCALES) {
            a[2 * u] = fma_half<0>(low, scales.factor, scales.zero);
            a[2 * u + 1] = fma_half<1>(top, scales.factor, scales.zero);
        } else {
            a[2 * u] = add2(low, OFF_1024);
            a[2 * u + 1] = KIND == Q6_K ? fma_half<1>(top, scales.factor, scales.zero) : add2(top, OFF_64);
            if (KIND == Q6_K) a[2 * u] = times_half<0>(a[2 * u], scales.factor);  // 1,056 times a scale may be no number
        }
    }
}

// The scale of the whole span of output g + 8 h
__device__ __forceinline__ float whole_scale(const Unit &unit, int h) {
#if KIND == NVFP4
    return __uint_as_float(h ? unit.second : unit.extra);
#endif
    const word pair = SIX_BIT_SCALES ? unit.scales[0].w : unit.extra;
    return half_to_float(h ? pair >> 16 : pair & 0xFFFFu);
}

// The factor of the minima of both outputs, float16 each; all four lanes of a group take part
__device__ __forceinline__ word minima_factors(const Unit &unit, int lane) {
    word mine = ((unit.extra >> 12) & 15u) | ((unit.extra >> 24) & 0xF0u);
    mine <<= 8 * (lane & 3);
    mine |= __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
    return mine | __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
}

// Minima 2 t and 2 t + 1 of output g + 8 h, in float16
__device__ __forceinline__ word minima_pair(const Unit &unit, int h) {
    return add2(and_or(h ? unit.extra >> 6 : unit.extra, 0x003F003Fu, MAGIC), MINUS_1024);
}

__device__ __forceinline__ float power_of_two(word exponent) {  // 2^(exponent - 128)
    return __uint_as_float(exponent > 1 ? (exponent - 1) << 23 : 0x00200000u << exponent);
}

// The scale, and the minimum, of a block of 32 inputs of output g + 8 h
__device__ __forceinline__ float block_scale(const Unit &unit, int block, int h) {
    if (MINIMA) return half_to_float(part_of(unit.scales[SCALE_LOADS / 2 * h + block / 4], block & 3) & 0xFFFFu);
    if (KIND == MXFP4) return power_of_two((part_of(unit.scales[0], 2 * h + block / 4) >> (8 * (block & 3))) & 255u);
    const word pair = part_of(unit.scales[SCALE_LOADS > 1 ? h : 0], block / 2);
    return half_to_float(block & 1 ? pair >> 16 : pair & 0xFFFFu);
}

__device__ __forceinline__ float block_minimum(const Unit &unit, int block, int h) {
    return half_to_float(part_of(unit.scales[(SCALE_LOADS / 2 * h + block / 4) % SCALE_LOADS], block & 3) >> 16);
}

#ifdef TILES
// ------------------------------------------------------------------ the product

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
    int height, step;       // units of outputs that a block has, where INSIDE, and those whose sums there is room for
    int buffers;            // segments of rows that there is room for, where not
    int bf16, pdl;
#ifdef GROUPED
    const int *pairs;       // of a row and one of its experts: where the rows of this product stand
    int divide;             // pairs that read one row
#endif
};

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
// for those that are not there; then 2^e.
#define ROW_BYTES (SEGMENT * (SPAN * 2 + 32) + 16)
#define SUMS_AT (SEGMENT * SPAN * 2)

__device__ __forceinline__ int powers_at(const Product &p) { return (p.rows + 1) * ROW_BYTES; }

__device__ __forceinline__ int buffer_bytes(const Product &p) { return powers_at(p) + TILES * 8 * SEGMENT * 4; }

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
        if (piece < live) copy_four(to + powers_at(p) + (piece * TILES * 8 + row) * 4, p.factors + at + piece);
    }
}

__device__ __forceinline__ void finish(const Product &p, const float (&total)[TILES][4], int tall) {
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
                if (p.residual)
                    value = rounded_to(value + read_number(p.residual + row * p.residual_stride + output, p.bf16), p.bf16);
                write_number(p.out + target_of(p, row) * p.out_stride + output, value, p.bf16);
            }
        }
}

// Sums of an item, as this lane has them: `to` is its place of the first tile.
__device__ __forceinline__ void keep(const Product &p, float4 *to, const float (&sums)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (n * 8 + 2 * (int)(threadIdx.x & 3) < p.rows) __stcg(to + n * 32, make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]));
}

// Segments from front to back, `apart` from each other
__device__ __forceinline__ void add_up(const Product &p, const float4 *from, int segments, int apart, int tall) {
    float total[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) total[n][c] = 0.0f;
#pragma unroll 4
    for (int i = 0; i < segments; i++)
#pragma unroll
        for (int n = 0; n < TILES; n++)
            if (n * 8 + 2 * (int)(threadIdx.x & 3) < p.rows) {
                const float4 v = __ldcg(from + (long long)i * apart + n * 32);
                total[n][0] = __fadd_rn(total[n][0], v.x);
                total[n][1] = __fadd_rn(total[n][1], v.y);
                total[n][2] = __fadd_rn(total[n][2], v.z);
                total[n][3] = __fadd_rn(total[n][3], v.w);
            }
    finish(p, total, tall);
}

// Sums of all items of a block, in shared memory, segment by segment
__device__ __forceinline__ void add_inside(const Product &p, const float4 *kept, int segments, int first, int count) {
    for (int tall = threadIdx.x >> 5; tall < count; tall += blockDim.x >> 5) {
        float total[TILES][4];
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) total[n][c] = 0.0f;
        for (int i = 0; i < segments; i++)
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float4 v = kept[((i * count + tall) * TILES + n) * 32];
                total[n][0] = __fadd_rn(total[n][0], v.x);
                total[n][1] = __fadd_rn(total[n][1], v.y);
                total[n][2] = __fadd_rn(total[n][2], v.z);
                total[n][3] = __fadd_rn(total[n][3], v.w);
            }
        finish(p, total, first + tall);
    }
}

// Waiting for memory once for several items pays, but then one warp may have several outputs to add up, segment by segment.
#define MOST_UNSETTLED 8
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
        const int whose = __shfl_sync(0xFFFFFFFFu, tall, __ffs(last) - 1);
        add_up(p, (const float4 *)p.parts + (long long)whose * segments * TILES * 32 + lane, segments, TILES * 32, whose);
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
    const float *powers = (const float *)(rows + powers_at(p)) + place * TILES * 8 + 2 * (lane & 3);
    float span_sums[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) span_sums[n][c] = 0.0f;
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
            const float two[2] = {powers[n * 8], powers[n * 8 + 1]};
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
                const float scale = __fmul_rn(block_scale(now, block, c >> 1), two[c & 1]);
                sums[n][c] = __fmaf_rn(span_sums[n][c], scale, sums[n][c]);
                span_sums[n][c] = 0.0f;
                if (MINIMA) {
                    const float least = __fmul_rn(block_minimum(now, block, c >> 1), two[c & 1]);
                    sums[n][c] = __fmaf_rn(whole[c & 1], least, sums[n][c]);
                }
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
        const float two[2] = {powers[n * 8], powers[n * 8 + 1]};
#pragma unroll
        for (int c = 0; c < 4; c++) sums[n][c] = __fmaf_rn(span_sums[n][c], __fmul_rn(whole[c >> 1], two[c & 1]), sums[n][c]);
        if (SIX_BIT_SCALES) {
            float taken[4] = {0.0f, 0.0f, 0.0f, 0.0f};
            word b0, b1;
            two_matrices(b0, b1, own[n] + SUMS_AT + place * 32);
            step(taken, minima, b0, b1);
#pragma unroll
            for (int c = 0; c < 4; c++) sums[n][c] = __fmaf_rn(taken[c], -__fmul_rn(least[c >> 1], two[c & 1]), sums[n][c]);
        }
    }
}

// Where the weights of an item lie, and how many spans it has. Items of a block with all segments count from its first unit.
struct Item {
    const byte *at;
    int tall, segment, live;
};

__device__ __forceinline__ Item place_of(const Product &p, int item, int first, int count) {
    Item found;
    found.segment = item / count;
    found.tall = first + item - found.segment * count;
    found.at = p.units + ((long long)found.tall * p.spans + found.segment * SEGMENT) * UNIT_BYTES;
    found.live = min(SEGMENT, p.spans - found.segment * SEGMENT);
    return found;
}

#ifndef GROUPED
__device__ __forceinline__ void product(const Product &p) {
    extern __shared__ __align__(16) byte rows[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, buffers = INSIDE ? segments : p.buffers, bytes = buffer_bytes(p);
    // Where INSIDE, `begin` and `end` are units of outputs, and items count from `begin`. Else they are items.
    const int end = INSIDE ? min((int)(blockIdx.x + 1) * p.height, p.tall) : (int)((long long)segments * p.tall * (blockIdx.x + 1) / gridDim.x);
    int begin = INSIDE ? blockIdx.x * p.height : (int)((long long)segments * p.tall * blockIdx.x / gridDim.x);
    const word rows_at = (word)__cvta_generic_to_shared(rows);
    float4 *kept = INSIDE ? (float4 *)(rows + buffers * bytes) + lane : (float4 *)p.parts + lane;
    // Eight rows by 32 inputs, four matrices of eight by eight: lane 8 i + r brings row r of matrix i.
    int row_of[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) row_of[n] = kept_apart(min(n * 8 + (lane & 7), p.rows) * ROW_BYTES + (lane >> 3) * 16);
    const int pieces = (bytes - p.rows * ROW_BYTES) / 16;
    for (int i = threadIdx.x; i < buffers * pieces; i += blockDim.x)  // the row of zeros, and 2^e of those that are not there
        ((uint4 *)(rows + i / pieces * bytes + p.rows * ROW_BYTES))[i % pieces] = make_uint4(0, 0, 0, 0);
    const int most_unsettled = segments > FEW_SEGMENTS ? 1 : MOST_UNSETTLED;
    bool waits = p.pdl, starts = true;
    while (begin < end) {  // once, but where there is no room for all sums, or for rows of all segments
        const int count = INSIDE ? min(p.step, end - begin) : p.tall, first = INSIDE ? begin : 0;
        const int segment = INSIDE ? 0 : begin / count, stop = INSIDE ? segments * count : min(end, (segment + buffers) * count);
        int item = (INSIDE ? 0 : begin) + warp, unsettled = 0, mine = 0;
        Item own = place_of(p, min(item, stop - 1), first, count);
        // Weights hang on nothing that runs before this kernel: the first are on their way before it waits.
        Unit unit;
        load_unit(unit, own.at, lane, item < stop);
        __syncthreads();
        if (!INSIDE || starts) {
#if __CUDA_ARCH__ >= 900
            if (waits) asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
            waits = starts = false;
            for (int i = segment; i * count < stop; i++) bring_rows(p, rows_at + (i - segment) * bytes, i * SEGMENT);
            asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
            __syncthreads();
        }
#pragma unroll 1
        for (; item < stop; item += warps) {
            const bool more = item + warps < stop;
            const Item next = place_of(p, more ? item + warps : item, first, count);
            const int buffer = (own.segment - segment) * bytes;
            word own_rows[TILES];
            float sums[TILES][4];
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                own_rows[n] = kept_apart(rows_at + buffer + row_of[n]);
#pragma unroll
                for (int c = 0; c < 4; c++) sums[n][c] = 0.0f;
            }
#pragma unroll
            for (int s = 0; s < SEGMENT; s++) {
                if (s >= own.live) break;
                const bool closes = s + 1 >= own.live;
                add_span(p, sums, unit, closes ? next.at : own.at + (s + 1) * UNIT_BYTES, !closes || more, rows + buffer, own_rows, s);
            }
            if (INSIDE) {
#pragma unroll
                for (int n = 0; n < TILES; n++) kept[(item * TILES + n) * 32] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
            } else {
                keep(p, kept + ((long long)own.tall * segments + own.segment) * TILES * 32, sums);
                if (lane == unsettled) mine = own.tall;
                if (++unsettled == most_unsettled || !more) {
                    settle(p, mine, unsettled, segments);
                    unsettled = 0;
                }
            }
            own = next;
        }
        if (INSIDE) {
            __syncthreads();
            add_inside(p, kept, segments, first, count);
        }
        begin = INSIDE ? begin + count : stop;
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) rows_product(const __grid_constant__ Product p) { product(p); }
#else
// ------------------------------------------------------------------ the products of many experts

struct Grouped {
    Product all;            // of one expert, but for its weights and its rows
    const int *order;       // pairs, those of one expert one behind the other
    const int *tiles;       // [gridDim.x, 3]: an expert, its first pair of this tile in `order`, pairs of the tile, which may be none
    long long expert_bytes;
    int sides;              // warps that share sixteen outputs, a segment each at a time
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) grouped_product(const __grid_constant__ Grouped g) {
    extern __shared__ __align__(16) byte rows[];
    __shared__ int pairs[TILES * 8];
#if __CUDA_ARCH__ >= 900
    if (g.all.pdl) asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
    const int *tile = g.tiles + blockIdx.x * 3;
    if (tile[2] == 0) return;
    Product p = g.all;
    p.units += tile[0] * g.expert_bytes;
    p.rows = tile[2];
    p.pairs = pairs;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp % g.sides;
    const int units = (blockDim.x >> 5) / g.sides, tall = blockIdx.y * units + warp / g.sides;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const word rows_at = (word)__cvta_generic_to_shared(rows);
    const byte *weights = p.units + (long long)tall * p.spans * UNIT_BYTES;
    bool live = tall < p.tall && side < segments;
    Unit unit;
    load_unit(unit, weights + side * SEGMENT * UNIT_BYTES, lane, live);
    for (int i = threadIdx.x; i < p.rows; i += blockDim.x) pairs[i] = g.order[tile[1] + i];
    const int pieces = (bytes - p.rows * ROW_BYTES) / 16;
    for (int i = threadIdx.x; i < g.sides * pieces; i += blockDim.x)  // the row of zeros, and 2^e of those that are not there
        ((uint4 *)(rows + i / pieces * bytes + p.rows * ROW_BYTES))[i % pieces] = make_uint4(0, 0, 0, 0);
    word own_rows[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) own_rows[n] = kept_apart(rows_at + side * bytes + min(n * 8 + (lane & 7), p.rows) * ROW_BYTES + (lane >> 3) * 16);
    float4 *kept = (float4 *)(rows + g.sides * bytes) + lane;  // sums of the other sides: [units, sides - 1, TILES, 32 lanes]
    float total[TILES][4];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) total[n][c] = 0.0f;
#pragma unroll 1
    for (int first = 0; first < segments; first += g.sides) {
        const int here = min(g.sides, segments - first);
        __syncthreads();  // the pairs are there, and nobody reads what was there before
        for (int i = 0; i < here; i++) bring_rows(p, rows_at + i * bytes, (first + i) * SEGMENT);
        asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        float sums[TILES][4];
#pragma unroll
        for (int n = 0; n < TILES; n++)
#pragma unroll
            for (int c = 0; c < 4; c++) sums[n][c] = 0.0f;
        if (live) {
            const int segment = first + side, spans = min(SEGMENT, p.spans - segment * SEGMENT);
            const bool more = segment + g.sides < segments;
            const byte *at = weights + segment * SEGMENT * UNIT_BYTES, *next = at + (more ? g.sides * SEGMENT * UNIT_BYTES : 0);
#pragma unroll
            for (int s = 0; s < SEGMENT; s++) {
                if (s >= spans) break;
                const bool closes = s + 1 >= spans;
                add_span(p, sums, unit, closes ? next : at + (s + 1) * UNIT_BYTES, !closes || more, rows + side * bytes, own_rows, s);
            }
            live = more;
        }
        if (side > 0) {
#pragma unroll
            for (int n = 0; n < TILES; n++)
                kept[((warp / g.sides * (g.sides - 1) + side - 1) * TILES + n) * 32] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
        }
        if (g.sides > 1) __syncthreads();
        if (side > 0) continue;
        for (int i = 0; i < here; i++)
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float4 v = i == 0 ? make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3])
                                        : kept[((warp / g.sides * (g.sides - 1) + i - 1) * TILES + n) * 32];
                total[n][0] = __fadd_rn(total[n][0], v.x);
                total[n][1] = __fadd_rn(total[n][1], v.y);
                total[n][2] = __fadd_rn(total[n][2], v.z);
                total[n][3] = __fadd_rn(total[n][3], v.w);
            }
    }
    if (side == 0 && tall < p.tall) finish(p, total, tall);
}
#endif
#else
// ------------------------------------------------------------------ weights as plain float16

struct Opened {
    const byte *units;
    halfword *weights;   // [count, spans * 256] float16
    float *scales;       // [spans, stride], or [spans * 8, stride]: outputs stand side by side
    halfword *minima;    // [count, spans, 8] float16, of K kinds with minima
    float *least;        // the factors of the minima [spans, stride], or minima [spans * 8, stride]
    int first, count, spans, stride;  // first: in units
};

#define OPENED_WARPS 4
#define OPENED_ROW (SPAN + 8)

extern "C" __global__ void __launch_bounds__(OPENED_WARPS * 32) opened(const __grid_constant__ Opened p) {
    __shared__ __align__(16) halfword tile[OPENED_WARPS][16 * OPENED_ROW];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const long long which = (long long)blockIdx.x * OPENED_WARPS + warp;
    const int tall = (int)(which / p.spans), span = (int)(which - (long long)tall * p.spans);
    if (tall * 16 >= p.count) return;
    Unit unit;
    load_unit(unit, p.units + ((long long)(p.first + tall) * p.spans + span) * UNIT_BYTES, lane, true);
    Scales scales;
    open_scales(scales, unit);
    word *own = (word *)tile[warp];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        word a[4];
        next_scales(scales, i);
        open_step(a, unit, scales, i);
#pragma unroll
        for (int j = 0; j < 4; j++) own[(g + 8 * (j & 1)) * (OPENED_ROW / 2) + i * 8 + (j >> 1) * 4 + t] = a[j];
    }
    __syncwarp();
    for (int row = 0; row < 16; row++) {
        const long long output = (long long)tall * 16 + row;
        if (output < p.count)
            ((uint4 *)(p.weights + (output * p.spans + span) * SPAN))[lane] = ((const uint4 *)(tile[warp] + row * OPENED_ROW))[lane];
    }
    const word factors = SIX_BIT_SCALES ? minima_factors(unit, lane) : 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const long long output = (long long)tall * 16 + g + 8 * h;
        if (output >= p.count) continue;
        const long long at = output * p.spans + span;
        if (WHOLE) {
            const long long beside = (long long)span * p.stride + output;
            if (t == 0) p.scales[beside] = whole_scale(unit, h);
            if (SIX_BIT_SCALES) {
                ((word *)(p.minima + at * 8))[t] = minima_pair(unit, h);
                if (t == 0) p.least[beside] = half_to_float(h ? factors >> 16 : factors & 0xFFFFu);
            }
        } else {
#pragma unroll
            for (int block = 0; block < 8; block++)
                if (t == (block & 3)) {
                    const long long beside = ((long long)span * 8 + block) * p.stride + output;
                    p.scales[beside] = block_scale(unit, block, h);
                    if (MINIMA) p.least[beside] = block_minimum(unit, block, h);
                }
        }
    }
}

// ------------------------------------------------------------------ rows of a weight as numbers

struct Looked {
    const byte *units;
    const long long *wanted;  // rows, or nothing for all of them in order
    void *out;                // [count, width]
    int count, spans, width, dtype;  // 0 float16, 1 bfloat16, 2 float32
};

#define LOOKED_WARPS 4

// One warp per row and span, eight inputs per lane, step by step as the kind is described.
extern "C" __global__ void __launch_bounds__(LOOKED_WARPS * 32) looked_up(const __grid_constant__ Looked p) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const long long which = (long long)blockIdx.x * LOOKED_WARPS + warp;
    const int place = (int)(which / p.spans), span = (int)(which - (long long)place * p.spans);
    if (place >= p.count) return;
    const long long row = p.wanted ? p.wanted[place] : place;
    const int h = (int)(row >> 3) & 1, g = (int)row & 7;
    const byte *unit = p.units + ((row >> 4) * p.spans + span) * UNIT_BYTES;
    const byte *high = unit + CODE_BYTES, *scales = high + HIGH_BYTES, *extra = scales + SCALE_BYTES;
    const int i = lane >> 1, u = lane & 1, block = lane >> 2;
    const byte *own = scales + g * (16 * SCALE_LOADS) + h * (8 * SCALE_LOADS);
    float scale, least = 0.0f;
    if (SIX_BIT_SCALES) {
        const byte *of_pair = scales + g * 16, *of_lane = extra + 16 * g + 4 * (block >> 1);
        const word low = of_pair[4 * h + (block & 3)];
        const word small = block < 4 ? low & 63 : (low >> 6 << 4) | ((of_pair[8 + (block & 3)] >> (4 * h)) & 15);
        scale = __fmul_rn(half_to_float(*(const halfword *)(of_pair + 12 + 2 * h)), (float)small);
        const word minimum = (*(const halfword *)(of_lane + 2 * (block & 1)) >> (6 * h)) & 63;
        word factor = 0;
        for (int b = 0; b < 2; b++) {
            const byte *part = extra + 16 * g + 4 * (2 * h + b);
            factor |= (word)((part[1] >> 4) | (part[3] & 0xF0)) << (8 * b);
        }
        least = __fmul_rn(half_to_float(factor), (float)minimum);
    } else if (KIND == Q6_K) {
        scale = __fmul_rn(half_to_float(*(const halfword *)(extra + 4 * g + 2 * h)), (float)(signed char)own[i]);
    } else if (KIND == NVFP4) {
        scale = __fmul_rn(half_to_float((word)own[i] << 7), 128.0f);
    } else if (KIND == MXFP4) {
        scale = power_of_two(own[block]);
    } else if (MINIMA) {
        scale = half_to_float(((const halfword *)own)[2 * block]);
        least = half_to_float(((const halfword *)own)[2 * block + 1]);
    } else {
        scale = half_to_float(((const halfword *)own)[block]);
    }
    for (int t = 0; t < 4; t++)
        for (int e = 0; e < 2; e++) {
            const int of_lane = 4 * g + t;
            float value;
            if (KIND == Q8_0) {
                value = (float)(signed char)unit[(i >> 1) * 512 + of_lane * 16 + (i & 1) * 8 + u * 4 + e + 2 * h];
            } else {
                const word half = *(const halfword *)(unit + (i >> 2) * 512 + of_lane * 16 + (i & 3) * 4 + 2 * e);
                if (FOURS) {
                    const int j = 2 * u + h;
                    const int sign = (half >> (j == 0 ? 13 : j == 1 ? 14 : j == 2 ? 12 : 15)) & 1;
                    const int size = (half >> (3 * j)) & 7;
                    const int twice = size < 4 ? size : size == 4 ? 4 : size == 5 ? 6 : size == 6 ? 8 : 12;
                    value = sign ? -(float)twice : (float)twice;
                } else {
                    word code = (half >> (8 * u + 4 * h)) & 15;
                    if (FIVE) {
                        const byte bits = high[of_lane * 16 + (i >> 2) * 4 + 2 * e + ((i & 3) >> 1)];
                        code |= ((bits >> (2 * (i & 1) + u + 4 * h)) & 1) << 4;
                    }
                    if (KIND == Q6_K) {
                        const byte bits = high[(i >> 3) * 512 + of_lane * 16 + ((i >> 1) & 3) * 4 + 2 * e + (i & 1)];
                        code |= ((bits >> (2 * u + 4 * h)) & 3) << 4;
                    }
                    value = (float)((int)code - (KIND == Q4_0 ? 8 : KIND == Q5_0 ? 16 : KIND == Q6_K ? 32 : 0));
                }
            }
            value = __fmul_rn(value, scale);
            if (KIND == NVFP4) value = __fmul_rn(value, *(const float *)(extra + 8 * g + 4 * h));
            if (SIX_BIT_SCALES) value = __fsub_rn(value, least);
            if (MINIMA) value = __fadd_rn(value, least);
            const int input = span * SPAN + i * 16 + u * 8 + 2 * t + e;
            if (input < p.width) {
                const long long to = (long long)place * p.width + input;
                if (p.dtype == 2) {
                    ((float *)p.out)[to] = value;
                } else {
                    write_number((halfword *)p.out + to, value, p.dtype);
                }
            }
        }
}

#endif
