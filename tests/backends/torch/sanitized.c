/* Every kernel on memory of exactly the size it may touch, for AddressSanitizer, UBSan and ThreadSanitizer.
 * Sizes are odd on purpose: rows and widths that fill no vector, parts that end inside a panel, more threads than rows. */

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "sampling.h"
#include "delta.h"
#include "fused_layers.h"

long INTERNAL(onedraw_packed_bytes)(long kind, long rows, long in);
void INTERNAL(onedraw_pack)(const uint8_t *stored, uint8_t *panels, long kind, long rows, long in, long height, thread_pool *t);
void INTERNAL(onedraw_rows)(const uint8_t *panels, long kind, long in, const int64_t *wanted, long count, float *out, thread_pool *t);
void INTERNAL(onedraw_linear)(const packed_linear *of, const float *x, long stride, float *y, long rows, void *memory, thread_pool *t);
void INTERNAL(onedraw_rms_norm)(const float *x, const float *weight, float *y, long rows, long width, float eps, thread_pool *t);
void INTERNAL(onedraw_silu_gated)(const float *x, float *y, long rows, long width, thread_pool *t);
void INTERNAL(onedraw_attention)(float *qkv, float *out, const attention *a, long tokens, thread_pool *t);
long INTERNAL(onedraw_layers_bytes)(const layer *const *layers, long count, long tokens);
void INTERNAL(onedraw_layers)(const layer *const *layers, const attention *const *attentions, float *const *residuals, long count,
                              long tokens, char *memory, thread_pool *t);
void INTERNAL(onedraw_delta)(const float *projected, float *out, const delta *d, float *work, long work_size, float *window,
                             thread_pool *t);
void INTERNAL(onedraw_delta_commit)(const delta *d, long lane, const int64_t *places, long count, float *window, thread_pool *t);

static uint32_t seed = 1;
static uint32_t draw(void) { return seed = seed * 1664525u + 1013904223u, seed >> 8; }
static float drawn(void) { return (float)(int)(draw() % 2001) / 1000.0f - 1.0f; }

static float *floats_of(long count) {
    float *made = malloc((count ? count : 1) * sizeof(float));
    for (long i = 0; i < count; i++) made[i] = drawn();
    return made;
}

static const struct { int kind; long values, size; } STORED[] = {
    {F32, 1, 4}, {F16, 1, 2}, {BF16, 1, 2}, {Q4_0, 32, 18}, {Q4_1, 32, 20}, {Q5_0, 32, 22}, {Q5_1, 32, 24}, {Q8_0, 32, 34},
    {Q4_K, 256, 144}, {Q5_K, 256, 176}, {Q6_K, 256, 210},
};

/* Random bytes, whatever numbers they are: scales that are not finite are read too. */
static part packed(int which, long rows, long in, long column, thread_pool *t) {
    long size = rows * in / STORED[which].values * STORED[which].size, kind = STORED[which].kind;
    uint8_t *stored = malloc(size), *panels;
    for (long i = 0; i < size; i++) stored[i] = (uint8_t)draw();
    if (kind == F32)
        for (long i = 0; i < rows * in; i++) { float v = drawn(); memcpy(stored + i * 4, &v, 4); }
    panels = aligned_alloc(64, INTERNAL(onedraw_packed_bytes)(kind, rows, in));
    INTERNAL(onedraw_pack)(stored, panels, kind, rows, in, rows, t);
    free(stored);
    return (part){kind, rows, column, panels};
}

static void check_products(thread_pool *t) {
    for (int which = 0; which < (int)(sizeof STORED / sizeof *STORED); which++)
        for (int turn = 0; turn < 4; turn++) {
            long unit = STORED[which].values, in = unit * (1 + draw() % 3) * (unit == 1 ? 7 : 1), rows = 1 + draw() % 70, count = draw() % 20;
            part p = packed(which, rows, in, 0, t);
            packed_linear of = {in, rows, 1, turn % 2, 0, &p};
            float *x = floats_of(count * in), *y = floats_of(count * rows);
            if (turn == 3 && count) x[0] = NAN;
            void *memory = malloc(coded_bytes(count, in) + 1);
            INTERNAL(onedraw_linear)(&of, x, in, y, count, memory, t);
            int64_t wanted[3] = {0, rows - 1, rows / 2};
            float *found = floats_of(3 * in);
            INTERNAL(onedraw_rows)(p.panels, p.kind, in, wanted, 3, found, t);
            free(x); free(y); free(memory); free(found); free((void *)p.panels);
        }
}

static void check_rows(thread_pool *t) {
    for (int i = 0; i < 5; i++) {
        long rows = draw() % 9, width = 1 + draw() % 50;
        float *x = floats_of(rows * width * 2), *y = floats_of(rows * width), *weight = floats_of(width);
        INTERNAL(onedraw_rms_norm)(x, weight, y, rows, width, 1e-5f, t);
        INTERNAL(onedraw_rms_norm)(x, 0, y, rows, width, 1e-5f, t);
        if (rows) x[0] = -1e30f, x[rows * width] = NAN;
        INTERNAL(onedraw_silu_gated)(x, y, rows, width, t);
        free(x); free(y); free(weight);
    }
}

/* Two rows in pages of 8: one of known tokens, one with a tree of drafts behind it. */
static void check_attention(thread_pool *t, long dim) {
    enum { KNOWN = 70, BEFORE = 21, NODES = 5, TOKENS = KNOWN + NODES, PAGES = 13, WIDTH = 9 };
    long heads = 6, kv = 2, rotary = dim / 4 * 2;
    int64_t positions[TOKENS], slots[TOKENS], firsts[TOKENS], ends[TOKENS], rows[TOKENS], tails[TOKENS], paths[TOKENS * 3] = {0};
    int64_t table[2 * WIDTH];
    for (int i = 0; i < 2 * WIDTH; i++) table[i] = i < PAGES ? i : PAGES - 1;
    const int64_t tree[NODES][3] = {{0, 0, 0}, {0, 1, 0}, {2, 0, 0}, {0, 1, 3}, {2, 4, 0}}, depth[NODES] = {0, 1, 0, 2, 1};
    for (int i = 0; i < TOKENS; i++) {
        int node = i - KNOWN;
        rows[i] = node >= 0;
        positions[i] = node < 0 ? i : BEFORE + depth[node];
        slots[i] = node < 0 ? i : BEFORE + node;
        firsts[i] = node < 0 && i > 40 ? i - 40 : 0;
        ends[i] = positions[i];
        tails[i] = node < 0 ? INT64_MAX : BEFORE;
        if (node >= 0) memcpy(paths + i * 3, tree[node], sizeof tree[node]);
    }
    long width = (heads + 2 * kv) * dim, store = PAGES * kv * 8 * dim;
    float *rope_table = floats_of(80 * rotary), *qkv = floats_of(TOKENS * width), *out = floats_of(TOKENS * heads * dim);
    float *keys = floats_of(store), *values = floats_of(store), *norm = floats_of(dim);
    attention a = {heads, kv, dim, rotary, 8, WIDTH, 3, width, 1, 0, 0, 0.2f, 1e-6f, norm, norm, rope_table, positions, slots, firsts,
                   ends, rows, table, tails, paths, keys, values};
    INTERNAL(onedraw_attention)(qkv, out, &a, TOKENS, t);
    INTERNAL(onedraw_attention)(qkv, out, &a, 1, t);
    /* And over pages of every kind, in memory that is no larger than they need. */
    const long bits[6] = {32, 16, 16, 8, 8, 4};
    for (long kept = 1; kept < 6; kept++) {
        attention narrow = a;
        narrow.kv_dtype = kept;
        narrow.keys = calloc(store * bits[kept] / 8, 1);
        narrow.values = calloc(store * bits[kept] / 8, 1);
        if (bits[kept] <= 8) {
            narrow.key_scales = floats_of(store / dim);
            narrow.value_scales = floats_of(store / dim);
        }
        INTERNAL(onedraw_attention)(qkv, out, &narrow, TOKENS, t);
        free(narrow.keys); free(narrow.values);
        if (bits[kept] <= 8) { free(narrow.key_scales); free(narrow.value_scales); }
    }
    /* The same turn through a layer whose weights are of four kinds. */
    part parts[3] = {packed(4, heads * dim, 256, 0, t), packed(10, kv * dim, 256, heads * dim, t),
                     packed(1, kv * dim, 256, (heads + kv) * dim, t)};
    part o = packed(0, 256, heads * dim, 0, t), up = packed(7, 2 * 96, 256, 0, t), down = packed(3, 256, 96, 0, t);
    float *bias = floats_of(width), *hidden = floats_of(256);
    packed_linear products[4] = {{256, width, 3, 1, bias, parts}, {heads * dim, 256, 1, 1, 0, &o}, {256, 192, 1, 1, 0, &up}, {96, 256, 1, 1, 0, &down}};
    layer l = {&products[0], &products[1], &products[2], &products[3], hidden, hidden, norm, norm, keys, values, 256, heads * dim, 96, 1e-5f};
    const layer *layers[2] = {&l, &l};
    const attention *attentions[2] = {&a, &a};
    float *residuals[3] = {floats_of(TOKENS * 256), floats_of(TOKENS * 256), floats_of(TOKENS * 256)};
    char *memory = aligned_alloc(64, INTERNAL(onedraw_layers_bytes)(layers, 2, TOKENS));
    INTERNAL(onedraw_layers)(layers, attentions, residuals, 2, TOKENS, memory, t);
    for (int i = 0; i < 3; i++) { free(residuals[i]); free((void *)parts[i].panels); }
    free((void *)o.panels); free((void *)up.panels); free((void *)down.panels);
    free(rope_table); free(qkv); free(out); free(keys); free(values); free(norm); free(bias); free(hidden); free(memory);
}

/* One token over 800 positions in pages of 8, whose spans the threads share: in rounds of two spans, of all, and not at all. */
static void check_long_attention(thread_pool *t) {
    enum { POSITIONS = 800, PAGES = 100, HEADS = 6, KV = 2, DIM = 20, WIDTH = (HEADS + 2 * KV) * DIM };
    int64_t position = POSITIONS - 1, first = 30, row = 0, table[PAGES];
    for (int i = 0; i < PAGES; i++) table[i] = PAGES - 1 - i;
    float *rope_table = floats_of(POSITIONS * DIM), *qkv = floats_of(WIDTH), *keys = floats_of(PAGES * KV * 8 * DIM);
    float *values = floats_of(PAGES * KV * 8 * DIM), *found[3];
    const long results = HEADS * (32 + 2), rooms[3] = {3 * results, 9 * results, 0};
    for (int i = 0; i < 3; i++) {
        float *own = malloc(WIDTH * 4), *waiting = malloc(rooms[i] * 4 + 4);
        memcpy(own, qkv, WIDTH * 4);
        attention a = {HEADS, KV, DIM, DIM, 8, PAGES, 0, WIDTH, 1, 0, 0, 0.2f, 1e-6f, 0, 0, rope_table, &position, &position, &first,
                       &position, &row, table, 0, 0, keys, values, 0, 0, 0, waiting, rooms[i]};
        found[i] = floats_of(HEADS * DIM);
        INTERNAL(onedraw_attention)(own, found[i], &a, 1, t);
        if (memcmp(found[i], found[0], HEADS * DIM * 4)) abort();
        free(own); free(waiting);
    }
    for (int i = 0; i < 3; i++) free(found[i]);
    free(rope_table); free(qkv); free(keys); free(values);
}

/* A lane with a prompt of 70, two known tokens and a tree of three drafts, then two of them brought home. */
static void check_delta(thread_pool *t, int threads) {
    enum { PROMPT = 70, KNOWN = 72, DRAFTS = 3, TOKENS = KNOWN + DRAFTS, CONV = 4 };
    long dk = 12, dv = 20, kh = 2, vh = 4, channels = 2 * kh * dk + vh * dv, width = channels + vh * dv + 2 * vh, size = dk * dv;
    int64_t taps[TOKENS * CONV], closings[CONV - 1], kept[CONV - 1], parents[TOKENS], counts[1] = {64}, slots[1] = {0};
    for (int i = 0; i < TOKENS; i++) {
        parents[i] = i == KNOWN + 1 ? 0 : -1;
        for (int j = 0; j < CONV; j++) taps[i * CONV + j] = i + j - CONV + 1 >= 0 ? i + j - CONV + 1 : -1;
    }
    for (int j = 0; j < CONV - 1; j++) { closings[j] = KNOWN - CONV + 1 + j; kept[j] = 64 - CONV + 1 + j; }
    run r = {0, 0, 1, PROMPT, KNOWN, DRAFTS, 0, 0, 1};
    float *weights[4] = {floats_of(CONV * channels), floats_of(vh), floats_of(vh), floats_of(dv)};
    float *stores[10] = {floats_of(vh * size), floats_of((CONV - 1) * channels), floats_of(vh * size), floats_of((CONV - 1) * channels),
                         floats_of(DRAFTS * vh), floats_of(DRAFTS * kh * dk), floats_of(DRAFTS * vh * dv), floats_of(DRAFTS * channels),
                         floats_of(TOKENS * channels), floats_of(TOKENS * 3 * vh)};
    delta d = {kh, vh, dk, dv, CONV, channels, TOKENS, 1, width, 1e-6f, weights[0], weights[1], weights[2], weights[3], taps, closings,
               kept, parents, counts, slots, &r, stores[0], stores[1], stores[2], stores[3], stores[4], stores[5], stores[6],
               stores[7], stores[8], stores[9]};
    long work_size = dv * 64;
    float *projected = floats_of(TOKENS * width), *out = calloc(TOKENS * vh * dv, sizeof(float));
    float *work = floats_of(threads * work_size), *window = floats_of((CONV - 1) * channels);
    INTERNAL(onedraw_delta)(projected, out, &d, work, work_size, window, t);
    int64_t home[2] = {0, 1};
    INTERNAL(onedraw_delta_commit)(&d, 0, home, 2, window, t);
    for (int i = 0; i < 4; i++) free(weights[i]);
    for (int i = 0; i < 10; i++) free(stores[i]);
    free(projected); free(out); free(work); free(window);
}

/* Rows with every filter, a greedy one, one that is no distribution; a vocabulary that fills no block and no vector. */
static void check_sampling(thread_pool *t, int threads) {
    enum { ROWS = 5, VOCAB = 1037, WIDTH = 1088 };
    row_parameters parameters[ROWS] = {{1, 0, 1, INFINITY, {1, 2}, 1, 0},       {0.9, 40, 0.7f, 3, {3, 4}, 0, 0}, {0.5, 0, 1, INFINITY, {5, 6}, 0, 0},
                         {1, 1036, 2, INFINITY, {7, 8}, 0, 0},    {0.1, 3, 1, INFINITY, {9, 10}, 0, 0}};
    float *scores = floats_of(ROWS * VOCAB), *raw = floats_of(ROWS * VOCAB), *deficits = floats_of(ROWS * WIDTH), *limits = floats_of(ROWS);
    scores[4 * VOCAB + 9] = NAN;
    scores[3 * VOCAB + 5] = -INFINITY;
    int64_t *tokens = malloc(ROWS * 8), *masses = malloc((size_t)threads * WIDTH * 8);
    sampling_arguments c = {scores, raw, VOCAB, VOCAB, VOCAB, WIDTH, parameters, deficits, limits, tokens, masses};
    INTERNAL(onedraw_sample)(&c, ROWS, t);
    if (tokens[4] != -1 || tokens[0] < 0) abort();
    free(scores); free(raw); free(deficits); free(limits); free(tokens); free(masses);
}

/* What the sanitizer must catch: a product whose last row is one number short. */
static void fault(thread_pool *t) {
    part p = packed(0, 32, 7, 0, t);
    packed_linear of = {7, 32, 1, 0, 0, &p};
    float *x = floats_of(3 * 7 - 1), *y = floats_of(3 * 32);
    INTERNAL(onedraw_linear)(&of, x, 7, y, 3, 0, t);
}

int main(int count, char **arguments) {
    (void)arguments;
    if (count > 1) fault(onedraw_pool_new(1));
    for (int threads = 1; threads <= 3; threads++) {
        thread_pool *t = onedraw_pool_new(threads);
        check_products(t);
        check_rows(t);
        check_attention(t, 64);
        check_attention(t, 20);
        check_long_attention(t);
        check_delta(t, threads);
        check_sampling(t, threads);
        onedraw_pool_free(t);
    }
    printf("done\n");
    return 0;
}
