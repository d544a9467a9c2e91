/* Float32 kernels of the CPU path. A row computes from its row: every output element is one fixed sequence of
 * operations on that row's numbers, whatever other rows, threads or tiles there are. Threads only divide outputs.
 * Slow twins with the same meaning: ../layers/.  Axis letters: ../../../types.py. */

#include "vectors.h"

#define BLOCK 64 /* keys whose softmax weights are made together, on absolute positions */
#define PANEL 32 /* output columns of a packed weight panel: two vectors */
#ifdef __AVX512F__
#define TILE 12 /* rows of x multiplied with a panel at once; the order along K does not follow it */
#else
#define TILE 3
#endif

/* ------------------------------------------------------------------ products */

/* y[m][n] = sum over k, in order, of x[m][k] * w[k][n], for M rows and one panel of PANEL columns. */
#define PRODUCT(M)                                                                                                  \
    static void product_##M(const float *x, const float *w, float *y, long in, long out, const float *bias) {       \
        vec a[M][2];                                                                                                \
        for (int m = 0; m < M; m++) a[m][0] = a[m][1] = splat(0.0f);                                                \
        for (long k = 0; k < in; k++) {                                                                             \
            vec w0 = load(w + k * PANEL), w1 = load(w + k * PANEL + LANES);                                         \
            for (int m = 0; m < M; m++) {                                                                           \
                vec b = splat(x[m * in + k]);                                                                       \
                a[m][0] += b * w0;                                                                                  \
                a[m][1] += b * w1;                                                                                  \
            }                                                                                                       \
        }                                                                                                           \
        for (int m = 0; m < M; m++) {                                                                               \
            if (bias) { a[m][0] += load(bias); a[m][1] += load(bias + LANES); }                                     \
            store(y + m * out, a[m][0]);                                                                            \
            store(y + m * out + LANES, a[m][1]);                                                                    \
        }                                                                                                           \
    }

PRODUCT(1) PRODUCT(2) PRODUCT(3)
#ifdef __AVX512F__
PRODUCT(4) PRODUCT(5) PRODUCT(6) PRODUCT(7) PRODUCT(8) PRODUCT(9) PRODUCT(10) PRODUCT(11) PRODUCT(12)
#endif

typedef void (*product)(const float *, const float *, float *, long, long, const float *);
static const product PRODUCTS[TILE + 1] = {0, product_1, product_2, product_3,
#ifdef __AVX512F__
    product_4, product_5, product_6, product_7, product_8, product_9, product_10, product_11, product_12,
#endif
};

/* weight [out][in] -> panels [out / PANEL][in][PANEL]; out is a multiple of PANEL. */
void onedraw_pack(const float *weight, float *packed, long out, long in, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long p = 0; p < out / PANEL; p++)
        for (long k = 0; k < in; k++)
            for (long n = 0; n < PANEL; n++)
                packed[(p * in + k) * PANEL + n] = weight[(p * PANEL + n) * in + k];
}

/* y [rows][out] = x [rows][in] times the packed weight, plus bias [out] or none. */
void onedraw_linear(const float *x, const float *packed, const float *bias, float *y, long rows, long in, long out,
                    int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (long p = 0; p < out / PANEL; p++) {
        const float *w = packed + p * in * PANEL, *b = bias ? bias + p * PANEL : 0;
        for (long m = 0; m < rows; m += TILE) {
            long count = rows - m < TILE ? rows - m : TILE;
            PRODUCTS[count](x + m * in, w, y + m * out + p * PANEL, in, out, b);
        }
    }
}

/* ------------------------------------------------------------------ norm and activation */

static float mean_square(const float *x, long width) {
    vec sum = splat(0.0f);
    long i = 0;
    for (; i + LANES <= width; i += LANES) { vec v = load(x + i); sum += v * v; }
    float total = lane_sum(sum);
    for (; i < width; i++) total += x[i] * x[i];
    return total / (float)width;
}

static void norm_row(const float *x, const float *weight, float *y, long width, float eps) {
    float scale = 1.0f / sqrtf(mean_square(x, width) + eps);
    if (weight)
        for (long i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
    else
        for (long i = 0; i < width; i++) y[i] = x[i] * scale;
}

void onedraw_rms_norm(const float *x, const float *weight, float *y, long rows, long width, float eps, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > 32768)
    for (long r = 0; r < rows; r++) norm_row(x + r * width, weight, y + r * width, width, eps);
}

/* y = silu(gate) * up for rows [gate | up] of 2 * width. */
void onedraw_silu_gated(const float *x, float *y, long rows, long width, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (rows * width > 32768)
    for (long r = 0; r < rows; r++) {
        const float *gate = x + r * 2 * width, *up = gate + width;
        for (long i = 0; i < width; i++) y[r * width + i] = silu(gate[i]) * up[i];
    }
}

/* ------------------------------------------------------------------ attention */

/* Token t sees positions [firsts[t], ends[t]]. Position p lies in slot p of its row, or, from tails[t] on, in slot
 * tails[t] + paths[t][p - tails[t]]: the nodes of a tree stand in slots of their own and each reads its own path. */
typedef struct {
    long heads, kv_heads, dim, rotary, page_size, table_width, path_width;
    long width;                             /* of a row of qkv, where more may stand behind it */
    long writes, keys_as_values, norm_values; /* flags: a layer may read another's keys, or have no values of its own */
    float scale, eps;
    const float *q_norm, *k_norm; /* [dim] or null */
    const float *turns;           /* [positions][2][rotary / 2] cos and sin */
    const int64_t *positions, *slots, *firsts, *ends, *rows, *table;
    const int64_t *tails, *paths; /* null where no token has a path */
    float *keys, *values;         /* [page][kv_head][slot][dim] */
} attention;

static void turn_head(float *x, const float *cos_sin, long half_width) {
    const float *c = cos_sin, *s = cos_sin + half_width;
    for (long i = 0; i < half_width; i++) {
        float a = x[i], b = x[i + half_width];
        x[i] = a * c[i] - b * s[i];
        x[i + half_width] = b * c[i] + a * s[i];
    }
}

static void ready_head(float *x, const attention *a, long position, const float *weight) {
    if (weight) norm_row(x, weight, x, a->dim, a->eps);
    turn_head(x, a->turns + position * a->rotary, a->rotary / 2);
}

/* Norm and turn the queries and keys of token t in place; write its keys and values to its page. */
static void prepare_token(float *qkv, const attention *a, long t) {
    long position = a->positions[t], slot = a->slots[t];
    long page = a->table[a->rows[t] * a->table_width + slot / a->page_size];
    float *row = qkv + t * a->width;
    for (long h = 0; h < a->heads; h++) ready_head(row + h * a->dim, a, position, a->q_norm);
    for (long h = 0; a->writes && h < a->kv_heads; h++) {
        float *key = row + (a->heads + h) * a->dim, *value = a->keys_as_values ? key : key + a->kv_heads * a->dim;
        long place = ((page * a->kv_heads + h) * a->page_size + slot % a->page_size) * a->dim;
        if (a->norm_values) norm_row(value, 0, a->values + place, a->dim, a->eps);
        else memcpy(a->values + place, value, a->dim * sizeof(float));
        ready_head(key, a, position, a->k_norm);
        memcpy(a->keys + place, key, a->dim * sizeof(float));
    }
}

/* Where the page store of a head begins, in elements, for the key that token t reads at a position. */
static inline long place_of(const attention *a, long t, long head, long position) {
    long slot = position;
    if (a->tails && position >= a->tails[t]) slot = a->tails[t] + a->paths[t * a->path_width + position - a->tails[t]];
    long page = a->table[a->rows[t] * a->table_width + slot / a->page_size];
    return ((page * a->kv_heads + head) * a->page_size + slot % a->page_size) * a->dim;
}

/* One query head of token t over the keys it sees, block by block in order of position. out [dim] */
static void attend_head(const float *q, float *out, const attention *a, long t, long head) {
    long first = a->firsts[t], end = a->ends[t];
    float peak = -INFINITY, total = 0.0f, weights[BLOCK];
    for (long d = 0; d < a->dim; d++) out[d] = 0.0f;
    for (long start = first / BLOCK * BLOCK; start <= end; start += BLOCK) {
        long low = start < first ? first - start : 0, high = end - start + 1 < BLOCK ? end - start + 1 : BLOCK;
        float best = peak;
        for (long j = 0; j < BLOCK; j++) weights[j] = -INFINITY;
        for (long j = low; j < high; j++) {
            weights[j] = dot(q, a->keys + place_of(a, t, head, start + j), a->dim) * a->scale;
            best = weights[j] > best ? weights[j] : best;
        }
        float fade = exponential(peak - best);
        vec sum = splat(0.0f);
        for (long j = 0; j < BLOCK; j++) weights[j] = j >= low && j < high ? exponential(weights[j] - best) : 0.0f;
        for (long j = 0; j < BLOCK; j += LANES) sum += load(weights + j);
        total = total * fade + lane_sum(sum);
        for (long d = 0; d < a->dim; d++) out[d] *= fade;
        for (long j = low; j < high; j++) {
            const float *value = a->values + place_of(a, t, head, start + j);
            for (long d = 0; d < a->dim; d++) out[d] += weights[j] * value[d];
        }
        peak = best;
    }
    for (long d = 0; d < a->dim; d++) out[d] /= total;
}

/* qkv [tokens][width], first the heads of q, k and v -> out [tokens][heads][dim]. Every token's key is written before
 * any is read. */
void onedraw_attention(float *qkv, float *out, const attention *a, long tokens, int threads) {
    long width = a->width, per = a->heads / a->kv_heads;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < tokens; t++) prepare_token(qkv, a, t);
#pragma omp for schedule(dynamic, 4)
        for (long i = 0; i < tokens * a->kv_heads; i++) {
            long t = i / a->kv_heads, head = i % a->kv_heads;
            for (long g = 0; g < per; g++) {
                long h = head * per + g;
                attend_head(qkv + t * width + h * a->dim, out + (t * a->heads + h) * a->dim, a, t, head);
            }
        }
    }
}
