/* Products of rows with weights in panels. Each output is computed by one fixed sequence of operations along its inputs, in
 * order; other rows, tiles and threads do not matter, because tiles and threads only divide the outputs.
 *
 * A panel has all inputs of 16 or 32 outputs; a tile is some rows times one panel; a group is 32 inputs, which share a scale.
 * With activations as 8-bit codes (`coded`), 32 inputs at a time: an exact sum of products of integers, which is scaled once
 * and added to the output's sum. With float activations, and for float weights, one input at a time. */

#include "packed_linear.h"

#include <math.h>

#define AHEAD 16384            /* distance in bytes of the prefetch of weights */
#define ROW_BYTES (384 * 1024) /* bytes of activations in a band of rows, which stay in the cache while panels are read */

void INTERNAL(onedraw_dequantize)(long kind, const uint8_t *panel, long in, long b, float *out);

/* ------------------------------------------------------------------ activations as codes */

/* Codes are x * 127 / (largest |x|), rounded to the nearest integer, with ties to even. A group with a number that is not
 * finite gets the scale NaN, and so do all outputs of its row; a group whose numbers are too small to divide by becomes zero. */
void INTERNAL(onedraw_code_row)(const float *x, coded c, long row, long in) {
    for (long b = 0; b < in / GROUP; b++) {
        const float *from = x + b * GROUP;
        int8_t *codes = c.codes + row * in + b * GROUP;
        group *g = c.groups + row * (in / GROUP) + b;
        uint32_t largest = 0, bits;
        for (int i = 0; i < GROUP; i++) {
            memcpy(&bits, from + i, 4);
            bits &= 0x7fffffffu;
            largest = bits > largest ? bits : largest;
        }
        float most, up = 0.0f;
        memcpy(&most, &largest, 4);
        g->scale = most / 127.0f;
        if (largest >= 0x7f800000u) g->scale = NAN;
        else if (most < 1e-35f) g->scale = 0.0f;
        else up = 127.0f / most;
        int32_t sums[2] = {0, 0}, whole[GROUP];
        for (int i = 0; i < GROUP; i++) {
            /* Adding 1.5 * 2^23 leaves the rounded integer in the last bits. */
            float near = (up == 0.0f ? 0.0f : from[i] * up) + 12582912.0f;
            int32_t as;
            memcpy(&as, &near, 4);
            whole[i] = as - 0x4b400000;
        }
        for (int i = 0; i < GROUP; i++) codes[i] = (int8_t)whole[i];
        for (int i = 0; i < GROUP / 2; i++) { sums[0] += whole[i]; sums[1] += whole[GROUP / 2 + i]; }
        g->first = sums[0];
        g->second = sums[1];
        g->sum = g->scale * (float)(sums[0] + sums[1]);
    }
}

/* ------------------------------------------------------------------ tiles */

/* Multiplies `count` rows with one panel, with activations as codes: out [count][16]. */
INLINE void coded_tile(const int kind, const int count, const uint8_t *panel, long in, const int8_t *x, const group *groups,
                       float *out) {
    long blocks = in / GROUP;
    sections s = sections_of(kind, panel, in);
    /* Unless lift is 0, codes are 2^lift too large, so 2^lift times the sum of the activations' codes is subtracted from sums. */
    const int lift = kind == Q8_0 ? CODE_LIFT : kind == Q4_0 ? 3 : kind == Q5_0 ? 4 : kind == Q6_K ? 5 : 0;
    const long share = block_share(kind);
    floats total[8];
    for (int m = 0; m < count; m++) total[m] = f_zero();
    for (long b = 0; b < blocks; b++) {
        const int8_t *at = x + b * GROUP;
        /* This address may be past the end, which is harmless, because a prefetch is only a hint. The panel is prefetched as a
         * whole, whatever section comes next, and so is the beginning of the next panel. */
        const uint8_t *coming = panel + b * share + AHEAD;
        for (long i = 0; i < share; i += 64) __builtin_prefetch(coming + i);
        shared common = shared_of(kind, s, b);
        /* `second` and `later` are for inputs 16 … 31 of Q6_K, which have a scale of their own. */
        ints sum[8], second[8], dots[8], later[8];
        for (int m = 0; m < count; m++) sum[m] = second[m] = dots[m] = later[m] = i_splat(0);
#define STEP(g)                                                                                                     \
    {                                                                                                               \
        bytes codes = codes_of(kind, s, b, g);                                                                      \
        if (kind == Q8_0) codes = b_lift(codes);                                                                    \
        for (int m = 0; m < count; m++) {                                                                           \
            const int8_t *four = at + m * in + 4 * g;                                                               \
            if (kind == Q8_0) sum[m] = dot_lifted(sum[m], codes, four);                                             \
            else if (kind == Q6_K && g >= 4) later[m] = dot(later[m], codes, four);                                 \
            else dots[m] = dot(dots[m], codes, four);                                                               \
        }                                                                                                           \
    }
#define COLLECT                                                                                                     \
    for (int m = 0; m < count; m++) {                                                                               \
        if (kind != Q8_0) sum[m] = i_collect(sum[m], dots[m]);                                                      \
        if (kind == Q6_K) second[m] = i_collect(second[m], later[m]);                                               \
        dots[m] = later[m] = i_splat(0);                                                                            \
    }
        STEP(0) STEP(4) STEP(1) STEP(5) COLLECT STEP(2) STEP(6) STEP(3) STEP(7) COLLECT
#undef STEP
#undef COLLECT
        for (int m = 0; m < count; m++) {
            const group *g = groups + m * blocks + b;
            floats scale = f_splat(g->scale);
            if (lift) sum[m] = i_less(sum[m], g->first, lift);
            if (lift && kind == Q6_K) second[m] = i_less(second[m], g->second, lift);
            else if (lift) sum[m] = i_less(sum[m], g->second, lift);
            total[m] = fused(i_floats(sum[m]), f_mul(common.scale, scale), total[m]);
            if (kind == Q6_K) total[m] = fused(i_floats(second[m]), f_mul(common.second, scale), total[m]);
            if (has_min(kind)) total[m] = fused(common.min, f_splat(g->sum), total[m]);
        }
    }
    for (int m = 0; m < count; m++) f_store(out + m * LANE, total[m]);
}

/* Multiplies `count` rows with one quantized panel, with float activations; weights are dequantized block by block. out
 * [count][16] */
INLINE void dequantized_tile(const int kind, const int count, const uint8_t *panel, long in, const float *x, long stride, float *out) {
    floats total[8];
    float block[GROUP * LANE];
    for (int m = 0; m < count; m++) total[m] = f_zero();
    for (long b = 0; b < in / GROUP; b++) {
        INTERNAL(onedraw_dequantize)(kind, panel, in, b, block);
        for (long k = 0; k < GROUP; k++) {
            floats w = f_load(block + k * LANE);
            for (int m = 0; m < count; m++) total[m] = fused(f_splat(x[m * stride + b * GROUP + k]), w, total[m]);
        }
    }
    for (int m = 0; m < count; m++) f_store(out + m * LANE, total[m]);
}

INLINE floats plain_at(const int kind, const uint8_t *p) {
    return kind == F32 ? f_load((const float *)(const void *)p) : kind == F16 ? f_halves(p) : f_bfloats(p);
}

/* Multiplies `count` rows with one panel of floats: out [count][32]. */
INLINE void plain_tile(const int kind, const int count, const uint8_t *panel, long in, const float *x, long stride, float *out) {
    floats total[FLOAT_ROWS][2];
    for (int m = 0; m < count; m++) total[m][0] = total[m][1] = f_zero();
    for (long k = 0; k < in; k++) {
        const uint8_t *at = panel + k * WIDE * plain_bytes(kind);
        floats w0 = plain_at(kind, at), w1 = plain_at(kind, at + LANE * plain_bytes(kind));
        for (int m = 0; m < count; m++) {
            floats v = f_splat(x[m * stride + k]);
            total[m][0] = fused(v, w0, total[m][0]);
            total[m][1] = fused(v, w1, total[m][1]);
        }
    }
    for (int m = 0; m < count; m++) { f_store(out + m * WIDE, total[m][0]); f_store(out + m * WIDE + LANE, total[m][1]); }
}

typedef void (*tile)(const uint8_t *panel, long in, const float *x, long stride, const int8_t *codes, const group *groups, float *out);
#define UNUSED (void)x, (void)stride, (void)codes, (void)groups
#define TILE(name, call)                                                                                            \
    static void name(const uint8_t *panel, long in, const float *x, long stride, const int8_t *codes, const group *groups,  \
                     float *out) { UNUSED; call; }
#define CODED(kind, count) TILE(coded_##kind##_##count, coded_tile(kind, count, panel, in, codes, groups, out))
#define PLAIN(kind, count) TILE(plain_##kind##_##count, plain_tile(kind, count, panel, in, x, stride, out))

/* Heights of tiles: powers of two up to MOST_ROWS for quantized weights, every height up to FLOAT_ROWS for float weights. */
#if MOST_ROWS == 8
#define HEIGHTS(of, kind) of(kind, 1) of(kind, 2) of(kind, 4) of(kind, 8)
#define TABLE(name) {name##_1, name##_2, name##_4, name##_8}
#elif MOST_ROWS == 4
#define HEIGHTS(of, kind) of(kind, 1) of(kind, 2) of(kind, 4)
#define TABLE(name) {name##_1, name##_2, name##_4, 0}
#else
#define HEIGHTS(of, kind) of(kind, 1) of(kind, 2)
#define TABLE(name) {name##_1, name##_2, 0, 0}
#endif
HEIGHTS(CODED, Q4_0) HEIGHTS(CODED, Q4_1) HEIGHTS(CODED, Q5_0) HEIGHTS(CODED, Q5_1)
HEIGHTS(CODED, Q8_0) HEIGHTS(CODED, Q4_K) HEIGHTS(CODED, Q5_K) HEIGHTS(CODED, Q6_K)
static const tile CODED_TILES[KINDS][4] = {
    [Q4_0] = TABLE(coded_Q4_0), [Q4_1] = TABLE(coded_Q4_1), [Q5_0] = TABLE(coded_Q5_0), [Q5_1] = TABLE(coded_Q5_1),
    [Q8_0] = TABLE(coded_Q8_0), [Q4_K] = TABLE(coded_Q4_K), [Q5_K] = TABLE(coded_Q5_K), [Q6_K] = TABLE(coded_Q6_K),
};

#if FLOAT_ROWS == 12
#define ALL(kind)                                                                                                   \
    PLAIN(kind, 1) PLAIN(kind, 2) PLAIN(kind, 3) PLAIN(kind, 4) PLAIN(kind, 5) PLAIN(kind, 6) PLAIN(kind, 7) PLAIN(kind, 8)   \
    PLAIN(kind, 9) PLAIN(kind, 10) PLAIN(kind, 11) PLAIN(kind, 12)
#define ROWS(n) {0, n##_1, n##_2, n##_3, n##_4, n##_5, n##_6, n##_7, n##_8, n##_9, n##_10, n##_11, n##_12}
#else
#define ALL(kind) PLAIN(kind, 1) PLAIN(kind, 2) PLAIN(kind, 3)
#define ROWS(n) {0, n##_1, n##_2, n##_3}
#endif
ALL(F32) ALL(F16) ALL(BF16)
static const tile PLAIN_TILES[KINDS][FLOAT_ROWS + 1] = {[F32] = ROWS(plain_F32), [F16] = ROWS(plain_F16), [BF16] = ROWS(plain_BF16)};

static void dequantized_rows(long kind, int count, const uint8_t *panel, long in, const float *x, long stride, float *out) {
    switch (count) {
    case 1: dequantized_tile((int)kind, 1, panel, in, x, stride, out); return;
    case 2: dequantized_tile((int)kind, 2, panel, in, x, stride, out); return;
#if MOST_ROWS >= 4
    case 4: dequantized_tile((int)kind, 4, panel, in, x, stride, out); return;
#endif
#if MOST_ROWS >= 8
    case 8: dequantized_tile((int)kind, 8, panel, in, x, stride, out); return;
#endif
    }
}

/* ------------------------------------------------------------------ products */

typedef struct {
    const packed_linear *of;
    const float *x, *add;
    float *y;
    coded c;
    long stride;
} rows;

/* Adds bias and residual to the result of a tile, `width` columns of `count` rows, and stores it in y. Only the first `left`
 * columns belong to the weight; the others are padding. */
static void put(const rows *r, const float *found, long first, long count, long width, long column, long left) {
    for (long m = 0; m < count; m++) {
        const float *from = found + m * width, *bias = r->of->bias ? r->of->bias + column : 0;
        float *to = r->y + (first + m) * r->of->out + column;
        const float *add = r->add ? r->add + (first + m) * r->of->out + column : 0;
        long n = 0;
        for (; n + LANE <= left && n < width; n += LANE) {
            floats v = f_load(from + n);
            if (bias) v = f_add(v, f_load(bias + n));
            if (add) v = f_add(f_load(add + n), v);
            f_store(to + n, v);
        }
        for (; n < left && n < width; n++) {
            float v = from[n];
            if (bias) v = v + bias[n];
            to[n] = add ? add[n] + v : v;
        }
    }
}

/* Computes rows [first, last) of unit number `unit` of a part. A unit is WIDE neighbouring outputs. */
static void unit_of(const rows *r, const part *p, long unit, long first, long last) {
    long in = r->of->in, kind = p->kind, size = panel_bytes((int)kind, in);
    float found[(FLOAT_ROWS > 8 ? FLOAT_ROWS : 8) * WIDE];
    if (is_plain((int)kind)) {
        for (long m = first, count; m < last; m += count) {
            count = last - m < FLOAT_ROWS ? last - m : FLOAT_ROWS;
            PLAIN_TILES[kind][count](p->panels + unit * size, in, r->x + m * r->stride, r->stride, 0, 0, found);
            put(r, found, m, count, WIDE, p->column + unit * WIDE, p->rows - unit * WIDE);
        }
        return;
    }
    for (long half = 0; half < 2 && unit * WIDE + half * LANE < p->rows; half++) {
        const uint8_t *panel = p->panels + (unit * 2 + half) * size;
        long column = unit * WIDE + half * LANE;
        for (long m = first, count; m < last; m += count) {
            int height = MOST_ROWS == 8 ? 3 : MOST_ROWS == 4 ? 2 : 1;
            while (1 << height > last - m) height--;
            count = 1 << height;
            if (r->of->coded)
                CODED_TILES[kind][height](panel, in, 0, 0, r->c.codes + m * in, r->c.groups + m * (in / GROUP), found);
            else dequantized_rows(kind, (int)count, panel, in, r->x + m * r->stride, r->stride, found);
            put(r, found, m, count, LANE, p->column + column, p->rows - column);
        }
    }
}

void INTERNAL(onedraw_multiply)(worker *m, const packed_linear *p, const float *x, long stride, coded c, float *y, const float *add,
                                long count) {
    rows r = {p, x, add, y, c, stride};
    long units = 0, tall = ROW_BYTES / (p->in * (wants_codes(p) ? 1 : 4)) / 24 * 24;
    tall = tall < 48 ? 48 : tall;
    for (long i = 0; i < p->count; i++) units += (p->parts[i].rows + WIDE - 1) / WIDE;
    long bands = (count + tall - 1) / tall, piece = units / (m->count * 8L);
    PARALLEL_FOR(m, units * bands, m->count == 1 ? units : piece < 1 ? 1 : piece > 16 ? 16 : piece, i, {
        long unit = i % units, first = i / units * tall, last = first + tall < count ? first + tall : count;
        const part *at = p->parts;
        for (long own; unit >= (own = (at->rows + WIDE - 1) / WIDE); at++) unit -= own;
        unit_of(&r, at, unit, first, last);
    });
}

typedef struct {
    const packed_linear *of;
    const float *x;
    float *y;
    void *memory;
    long stride, rows;
} linear;

static void run_linear(const void *arguments, worker *m) {
    const linear *l = arguments;
    coded c = {0, 0};
    if (wants_codes(l->of)) {
        c = coded_at(l->memory, l->rows, l->of->in);
        PARALLEL_FOR(m, l->rows, 1, r, { INTERNAL(onedraw_code_row)(l->x + r * l->stride, c, r, l->of->in); });
    }
    INTERNAL(onedraw_multiply)(m, l->of, l->x, l->stride, c, l->y, 0, l->rows);
}

/* Multiplies rows x, which are `stride` floats apart, with the product's weights: y [rows][out]. memory: scratch memory for the
 * rows as codes. */
void EXPORT(onedraw_linear)(const packed_linear *of, const float *x, long stride, float *y, long rows, void *memory, thread_pool *t) {
    linear l = {of, x, y, memory, stride, rows};
    onedraw_pool_run(t, run_linear, &l, rows * of->in * of->out < 65536);
}
