/* Attention over KV pages. The key and value of a position are read once for a tile: the query heads of one KV head, for
 * several neighbouring tokens of one sequence. Keys are read in blocks of 64 absolute positions, in order, with an online
 * softmax. Four blocks form a span; the results of spans are merged in order, so that threads can share a long context. The
 * operations of a query head of a token are in one fixed order, so batch, prompt chunk, tile, page size, draft tree and threads
 * change no bit. The plain implementation is ../plain/attention.py. A place is the offset in a page store at which a head's key
 * or value begins. A query is one query head of one token. */

#include "attention.h"

#include "kv_quant.h"
#include "rowwise.h"

#define BLOCK 64    /* keys per block */
#define SPAN 256    /* keys per span */
#define QUERIES 64  /* the most queries of a tile */
#define ALIGNED __attribute__((aligned(64)))

static long smaller(long a, long b) { return a < b ? a : b; }
static long larger(long a, long b) { return a > b ? a : b; }
static long padded_dim(const attention *a) { return (a->dim + 15) / 16 * 16; }

/* ------------------------------------------------------------------ queries, and keys and values that are written */

static void norm_and_rope_head(float *x, const attention *a, long position, const float *weight) {
    if (weight) norm_row(x, weight, x, a->dim, a->eps);
    rotate_head(x, a->rope_table + position * a->rotary, a->rotary / 2);
}

/* Writes one head's key and value to its page. If the value is not finite as stored, zeros are stored in its place and NaN in
 * place of the key: a query that sees the key gets NaN, and others, which multiply the value by zero, are not affected. Codes
 * have no NaN, so with them the key's scale becomes NaN instead, also if only the key is not finite. */
static void write_head(float *key, float *value, const attention *a, long head) {
    long place = head * a->dim;
    if (a->key_scales) {
        if (a->kv_dtype == KV_INT4) transform_head(key, a->dim, 1), transform_head(value, a->dim, 1);
        int finite = head_is_finite(key, a->dim) && head_is_finite(value, a->dim);
        for (long d = 0; !finite && d < a->dim; d++) key[d] = value[d] = 0.0f;
        float scale = put_codes(key, a->keys, a->kv_dtype, place, a->dim);
        a->key_scales[head] = finite ? scale : NAN;
        a->value_scales[head] = put_codes(value, a->values, a->kv_dtype, place, a->dim);
        return;
    }
    if (!put_numbers(value, a->values, a->kv_dtype, place, a->dim)) {
        for (long d = 0; d < a->dim; d++) key[d] = NAN, value[d] = 0.0f;
        put_numbers(value, a->values, a->kv_dtype, place, a->dim);
    }
    put_numbers(key, a->keys, a->kv_dtype, place, a->dim);
}

/* Normalizes and rotates the queries and keys of token t in place, and, if a->writes, stores its keys and values in its page. */
static void prepare_token(float *qkv, const attention *a, long t) {
    long position = a->positions[t], slot = a->slots[t];
    long page = a->table[a->rows[t] * a->table_width + slot / a->page_size];
    float *row = qkv + t * a->width, own[a->dim];
    for (long h = 0; h < a->heads; h++) {
        norm_and_rope_head(row + h * a->dim, a, position, a->q_norm);
        if (a->kv_dtype == KV_INT4) transform_head(row + h * a->dim, a->dim, 0);
    }
    for (long h = 0; a->writes && h < a->kv_heads; h++) {
        float *key = row + (a->heads + h) * a->dim, *value = a->keys_as_values ? key : key + a->kv_heads * a->dim;
        if (a->norm_values) norm_row(value, 0, own, a->dim, a->eps);
        else memcpy(own, value, a->dim * sizeof(float));
        norm_and_rope_head(key, a, position, a->k_norm);
        write_head(key, own, a, (page * a->kv_heads + h) * a->page_size + slot % a->page_size);
    }
}

/* ------------------------------------------------------------------ blocks of keys and values */

/* Finds the offsets in the stores at which the keys and values of positions start + [low, high) begin, for token t and one KV
 * head. */
static void places_of(const attention *a, long t, long head, long start, long low, long high, long *places) {
    const int64_t *table = a->table + a->rows[t] * a->table_width;
    int shift = __builtin_ctzl((unsigned long)a->page_size);  /* page sizes are powers of two */
    for (long j = low; j < high; j++) {
        long slot = start + j;
        if (a->tails && slot >= a->tails[t]) slot = a->tails[t] + a->paths[t * a->path_width + slot - a->tails[t]];
        places[j] = (((table[slot >> shift] * a->kv_heads + head) << shift) + (slot & (a->page_size - 1))) * a->dim;
    }
    /* Sixteen keys are read at a time; in place of those outside the range, the first one inside is read. */
    for (long j = low / 16 * 16; j < low; j++) places[j] = places[low];
    for (long j = high; j % 16; j++) places[j] = places[low];
}

/* Prefetches the key or value of one head and position, at offset `place` of a store. */
INLINE void fetch(const void *store, const long kind, long place, long dim) {
    const char *from = (const char *)store + place * kv_bits(kind) / 8;
    for (long byte = 0; byte < dim * kv_bits(kind) / 8; byte += 64) __builtin_prefetch(from + byte);
}

/* Reads the keys of a block at the positions [low, high), widened to multiples of sixteen, as floats: to[d][position].
 * Prefetches the values of these positions. */
INLINE void load_keys(float *to, const attention *a, const long kind, const long *places, long low, long high) {
    for (long j = low / 16 * 16; j < high; j += 16) {
        floats scales = f_zero();
        for (int i = 0; i < 16; i++) fetch(a->values, kind, places[j + i], a->dim);
        if (a->key_scales) {
            float found[16];
            for (int i = 0; i < 16; i++) found[i] = a->key_scales[places[j + i] / a->dim];
            scales = f_load(found);
        }
        long d = 0;
        for (; d + 16 <= a->dim; d += 16) {
            floats x[16];
            for (int i = 0; i < 16; i++) x[i] = get_numbers(a->keys, kind, places[j + i] + d);
            f_transpose(x);
            for (int i = 0; i < 16; i++) f_store(to + (d + i) * BLOCK + j, a->key_scales ? f_mul(x[i], scales) : x[i]);
        }
        for (; d < a->dim; d++) {
            float x[16];
            for (int i = 0; i < 16; i++) x[i] = get_number(a->keys, kind, places[j + i] + d);
            f_store(to + d * BLOCK + j, a->key_scales ? f_mul(f_load(x), scales) : f_load(x));
        }
    }
}

/* Reads the values of a block at the positions [low, high) as floats: to[position][dimension, padded with zeros]. Prefetches
 * the keys of the next block, at the offsets next[0 … 63], if next is not null. */
INLINE void load_values(float *to, const attention *a, const long kind, const long *places, const long *next, long low, long high) {
    long width = padded_dim(a);
    for (long j = low; j < high; j++) {
        if (next) fetch(a->keys, kind, next[j], a->dim);
        floats scale = f_splat(a->value_scales ? a->value_scales[places[j] / a->dim] : 1.0f);
        long d = 0;
        for (; d + 16 <= a->dim; d += 16) {
            floats x = get_numbers(a->values, kind, places[j] + d);
            f_store(to + j * width + d, a->value_scales ? f_mul(x, scale) : x);
        }
        if (d == a->dim) continue;
        float x[16] = {0};
        for (int i = 0; d + i < a->dim; i++) x[i] = get_number(a->values, kind, places[j] + d + i);
        f_store(to + j * width + d, a->value_scales ? f_mul(f_load(x), scale) : f_load(x));
    }
}

static void load_block(float *keys, float *values, const attention *a, const long *places, const long *next, long low, long high) {
#define LOAD(kind) \
    case kind: load_keys(keys, a, kind, places, low, high); load_values(values, a, kind, places, next, low, high); break
    switch (a->kv_dtype) { LOAD(KV_F32); LOAD(KV_BF16); LOAD(KV_F16); LOAD(KV_FP8); LOAD(KV_INT8); LOAD(KV_INT4); }
#undef LOAD
}

/* ------------------------------------------------------------------ products of a tile with a block */

/* A product of `rows` queries with a block: out[row][column] = out[row][column] * fades[row], or 0 without fades, plus the sum
 * over k in [start, stop) of left[row][k] * right[k][column], added in order of k. Strides are the floats of a row. */
typedef struct {
    const float *left, *right, *fades;
    float *out;
    long left_stride, right_stride, out_stride, start, stop;
} product;

INLINE void multiply_piece(const int rows, const int vectors, const product *p, long row, long column) {
    const float *left = p->left + row * p->left_stride, *right = p->right + column;
    float *out = p->out + row * p->out_stride + column;
    floats sums[QUERY_ROWS][QUERY_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[i][v] = p->fades ? f_mul(f_load(out + i * p->out_stride + 16 * v), f_splat(p->fades[row + i])) : f_zero();
    for (long k = p->start; k < p->stop; k++) {
        floats x[QUERY_VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) x[v] = f_load(right + k * p->right_stride + 16 * v);
#pragma GCC unroll 8
        for (int i = 0; i < rows; i++) {
            floats by = f_splat(left[i * p->left_stride + k]);
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++) sums[i][v] = fused(by, x[v], sums[i][v]);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) f_store(out + i * p->out_stride + 16 * v, sums[i][v]);
}

INLINE void multiply_columns(const int rows, const product *p, long row, long columns) {
    long column = 0;
    for (; column + 16 * QUERY_VECTORS <= columns; column += 16 * QUERY_VECTORS) multiply_piece(rows, QUERY_VECTORS, p, row, column);
    for (; column < columns; column += 16) multiply_piece(rows, 1, p, row, column);
}

/* Computes the product in pieces of up to QUERY_ROWS rows, of about equal heights. `columns` is a multiple of sixteen. */
static void multiply(const product *p, long rows, long columns) {
    for (long row = 0, pieces = (rows + QUERY_ROWS - 1) / QUERY_ROWS; pieces; pieces--) {
        long height = (rows - row) / pieces;
#define HEIGHT(n) case n: multiply_columns(n <= QUERY_ROWS ? n : 1, p, row, columns); break
        switch (height) { HEIGHT(1); HEIGHT(2); HEIGHT(3); HEIGHT(4); HEIGHT(5); HEIGHT(6); }
#undef HEIGHT
        row += height;
    }
}

/* ------------------------------------------------------------------ softmax */

/* Adds the scores of a block at the positions [low, high) to the online softmax of a query, and replaces the scores of the block
 * by their weights: zeros outside of the range. Returns the factor for sums of earlier blocks. */
static float add_scores(float *scores, long low, long high, float *peak, float *total) {
    for (int j = 0; j < (int)low && j < BLOCK; j++) scores[j] = -INFINITY;
    for (int j = (int)larger(high, 0); j < BLOCK; j++) scores[j] = -INFINITY;
    if (low >= high) {
        for (int j = 0; j < BLOCK; j++) scores[j] = 0.0f;
        return 1.0f;
    }
    floats most = f_splat(*peak);
    for (int j = 0; j < BLOCK; j += 16) most = f_max(f_load(scores + j), most);
    float best = f_most(most), fade = exponential(*peak - best);
    for (int j = 0; j < BLOCK; j++) scores[j] = scores[j] == -INFINITY ? 0.0f : exponential(scores[j] - best);
    floats sum = f_zero();
    for (int j = 0; j < BLOCK; j += 16) sum = f_add(sum, f_load(scores + j));
    *total = *total * fade + f_sum(sum);
    *peak = best;
    return fade;
}

/* Results of queries over some of their keys: for each the maximum of its scores, the sum of their weights, and the sum of the
 * weighted values, [query][dimension, padded]. */
typedef struct {
    float *peaks, *totals, *sums;
} results;

static void clear(results r, long queries, long width) {
    for (long i = 0; i < queries; i++) r.peaks[i] = -INFINITY, r.totals[i] = 0.0f;
    memset(r.sums, 0, queries * width * sizeof(float));
}

/* Merges the results of query `from` of the next span into those of query i over the spans before it. */
static void merge(results all, long i, results next, long from, long width) {
    float best = next.peaks[from] > all.peaks[i] ? next.peaks[from] : all.peaks[i];
    float fade = exponential(all.peaks[i] - best), by = exponential(next.peaks[from] - best);
    float *sums = all.sums + i * width, *added = next.sums + from * width;
    all.totals[i] = all.totals[i] * fade + next.totals[from] * by;
    for (long d = 0; d < width; d += 16)
        f_store(sums + d, fused(f_load(added + d), f_splat(by), f_mul(f_load(sums + d), f_splat(fade))));
    all.peaks[i] = best;
}

/* Writes the attention of query i. A sum of zeros may be 0 or -0, depending on which keys outside the query's range, with weight
 * zero, the tile has added; adding zero makes both 0. */
static void finish(float *out, const attention *a, results all, long i, long width) {
    for (long d = 0; d < a->dim; d++) out[d] = all.sums[i * width + d] / all.totals[i] + 0.0f;
    if (a->kv_dtype == KV_INT4) transform_head(out, a->dim, 0);
}

/* ------------------------------------------------------------------ tiles */

/* Queries that read the same places: heads [head, head + heads) of tokens [token, token + tokens). Query i is head
 * head + i % heads of token token + i / heads. */
typedef struct {
    long token, tokens, head, heads;
} tile;

static int sees(const attention *a, long t, long span) { return a->firsts[t] < (span + 1) * SPAN && a->ends[t] >= span * SPAN; }

/* Whether tokens t and t + 1 read every position at the same offset: they are in one row, and read no node of a draft tree. */
static int shares_places(const attention *a, long t) {
    return a->rows[t] == a->rows[t + 1] && (!a->tails || (a->ends[t] < a->tails[t] && a->ends[t + 1] < a->tails[t + 1]));
}

/* Copies the queries of a tile to q, [query][dim], multiplied by the scale of scores. */
static void copy_queries(float *q, const float *qkv, const attention *a, tile w) {
    for (long i = 0; i < w.tokens * w.heads; i++) {
        const float *from = qkv + (w.token + i / w.heads) * a->width + (w.head + i % w.heads) * a->dim;
        for (long d = 0; d < a->dim; d++) q[i * a->dim + d] = from[d] * a->scale;
    }
}

/* Computes the results of a tile over one span. */
static void attend_span(const float *q, const attention *a, tile w, long span, results to) {
    long width = padded_dim(a), queries = w.tokens * w.heads, first = (span + 1) * SPAN, end = span * SPAN - 1;
    long head = w.head / (a->heads / a->kv_heads), two[2][BLOCK], *places = two[0], *next = two[1];
    ALIGNED float keys[BLOCK * a->dim], values[BLOCK * width], scores[queries * BLOCK], fades[queries];
    for (long t = w.token; t < w.token + w.tokens; t++) {
        first = smaller(first, larger(a->firsts[t], span * SPAN));
        end = larger(end, smaller(a->ends[t], (span + 1) * SPAN - 1));
    }
    clear(to, queries, width);
    long start = first / BLOCK * BLOCK, low = first - start;
    if (start <= end) places_of(a, w.token, head, start, low, smaller(end - start + 1, BLOCK), places);
    for (; start <= end; start += BLOCK, low = 0) {
        long high = smaller(end - start + 1, BLOCK), after = smaller(end - start - BLOCK + 1, BLOCK), *read = places;
        if (after > 0) places_of(a, w.token, head, start + BLOCK, 0, after, next);
        load_block(keys, values, a, read, after == BLOCK ? next : 0, low, high);
        places = next, next = read;
        product scoring = {q, keys, 0, scores, a->dim, BLOCK, BLOCK, 0, a->dim};
        multiply(&scoring, queries, BLOCK);
        for (long i = 0; i < queries; i++) {
            long t = w.token + i / w.heads;
            fades[i] = add_scores(scores + i * BLOCK, larger(a->firsts[t] - start, 0), smaller(a->ends[t] - start + 1, BLOCK),
                                  to.peaks + i, to.totals + i);
        }
        product mixing = {scores, values, fades, to.sums, BLOCK, width, width, low, high};
        multiply(&mixing, queries, width);
    }
}

/* Computes the attention of a tile, over its spans in order. */
static void attend_tile(const float *qkv, float *out, const attention *a, tile w) {
    long width = padded_dim(a), queries = w.tokens * w.heads, first = a->firsts[w.token], end = a->ends[w.token];
    ALIGNED float q[queries * a->dim], sums[queries * width], next_sums[queries * width];
    float peaks[queries], totals[queries], next_peaks[queries], next_totals[queries];
    results all = {peaks, totals, sums}, next = {next_peaks, next_totals, next_sums};
    copy_queries(q, qkv, a, w);
    clear(all, queries, width);
    for (long t = w.token; t < w.token + w.tokens; t++) first = smaller(first, a->firsts[t]), end = larger(end, a->ends[t]);
    for (long span = first / SPAN; span <= end / SPAN; span++) {
        attend_span(q, a, w, span, next);
        for (long i = 0; i < queries; i++)
            if (sees(a, w.token + i / w.heads, span)) merge(all, i, next, i, width);
    }
    for (long i = 0; i < queries; i++)
        finish(out + ((w.token + i / w.heads) * a->heads + w.head + i % w.heads) * a->dim, a, all, i, width);
}

/* ------------------------------------------------------------------ division of the work */

/* An item of work is one range of tokens and some query heads of one KV head. If there are too few items for the threads, an item
 * is one span of them, and its results wait in a->waiting until the spans of a round are merged. */
typedef struct {
    long height;         /* tokens of a range */
    long parts;          /* parts into which the query heads of a KV head are divided */
    long items;          /* items, if they are not divided into spans */
    long base, spans;    /* base: the first span; spans: number of spans */
    long round;          /* spans whose results wait together; 0 if items are not divided into spans */
} division;

static division divide(const attention *a, const worker *m, long tokens) {
    long per = a->heads / a->kv_heads, most = larger(smaller(QUERIES, 8192 / a->dim), 1), low = INT64_MAX, high = 0;
    for (long t = 0; t < tokens; t++) low = smaller(low, a->firsts[t]), high = larger(high, a->ends[t]);
    division d = {.parts = (per + most - 1) / most, .base = low / SPAN, .spans = high / SPAN - low / SPAN + 1};
    long groups = a->kv_heads * d.parts, each = (per + d.parts - 1) / d.parts;
    d.height = larger(1, smaller(most / each, tokens * groups * d.spans / (4 * m->count)));
    d.items = (tokens + d.height - 1) / d.height * groups;
    long fitting = a->room / (tokens * a->heads * (padded_dim(a) + 2)) - 1;
    if (d.items < 4 * m->count && m->count > 1 && d.spans > 1 && fitting > 1) d.round = smaller(fitting, d.spans);
    return d;
}

/* Finds the tokens and heads of an item. The tokens may be of several sequences. */
static tile item_of(const attention *a, const division *d, long tokens, long item) {
    long groups = a->kv_heads * d->parts, per = a->heads / a->kv_heads, group = item % groups, token = item / groups * d->height;
    long head = group / d->parts * per + per * (group % d->parts) / d->parts;
    long stop = group / d->parts * per + per * (group % d->parts + 1) / d->parts;
    return (tile){token, smaller(d->height, tokens - token), head, stop - head};
}

/* Takes the first tokens of an item that read the same places. */
static tile first_tile(const attention *a, tile item) {
    tile w = item;
    for (w.tokens = 1; w.tokens < item.tokens && shares_places(a, w.token + w.tokens - 1); w.tokens++) {}
    return w;
}

/* The results in a->waiting of the queries of a step: over span `number` of a round, or, for number d->round, over all spans
 * merged so far. */
static results waiting(const attention *a, const division *d, long tokens, long number) {
    long queries = tokens * a->heads;
    float *peaks = a->waiting, *totals = peaks + (d->round + 1) * queries, *sums = totals + (d->round + 1) * queries;
    return (results){peaks + number * queries, totals + number * queries, sums + number * queries * padded_dim(a)};
}

static void attend_item(const float *qkv, float *out, const attention *a, tile item) {
    while (item.tokens) {
        tile w = first_tile(a, item);
        attend_tile(qkv, out, a, w);
        item.token += w.tokens, item.tokens -= w.tokens;
    }
}

/* The index of the results of head h of token t among those of a step. Results that one item computes are neighbours. */
static long query_place(tile item, long tokens, long t, long h) { return tokens * item.head + t * item.heads + h - item.head; }

static void attend_item_span(const float *qkv, const attention *a, tile item, long tokens, long span, results to) {
    while (item.tokens) {
        tile w = first_tile(a, item);
        long at = query_place(w, tokens, w.token, w.head);
        ALIGNED float q[w.tokens * w.heads * a->dim];
        copy_queries(q, qkv, a, w);
        attend_span(q, a, w, span, (results){to.peaks + at, to.totals + at, to.sums + at * padded_dim(a)});
        item.token += w.tokens, item.tokens -= w.tokens;
    }
}

static void attend_in_rounds(worker *m, const float *qkv, float *out, const attention *a, const division *d, long tokens) {
    long stop = d->base + d->spans, width = padded_dim(a), groups = a->kv_heads * d->parts;
    results all = waiting(a, d, tokens, d->round);
    for (long start = d->base; start < stop; start += d->round) {
        long count = smaller(d->round, stop - start);
        PARALLEL_FOR(m, d->items * count, 1, i, {
            attend_item_span(qkv, a, item_of(a, d, tokens, i % d->items), tokens, start + i / d->items,
                             waiting(a, d, tokens, i / d->items));
        });
        PARALLEL_FOR(m, tokens * groups, 1, i, {
            tile w = item_of(a, d, tokens, i % groups);
            for (long h = w.head, t = i / groups; h < w.head + w.heads; h++) {
                long at = query_place(w, tokens, t, h);
                if (start == d->base) all.peaks[at] = -INFINITY, all.totals[at] = 0.0f, memset(all.sums + at * width, 0, width * 4);
                for (long s = 0; s < count; s++)
                    if (sees(a, t, start + s)) merge(all, at, waiting(a, d, tokens, s), at, width);
                if (start + count == stop) finish(out + (t * a->heads + h) * a->dim, a, all, at, width);
            }
        });
    }
}

void INTERNAL(onedraw_attend)(worker *m, float *qkv, float *out, const attention *a, long tokens) {
    PARALLEL_FOR(m, tokens, 1 + tokens / 64, t, { prepare_token(qkv, a, t); });
    if (!a->heads || !tokens) return;
    division d = divide(a, m, tokens);
    if (d.round) attend_in_rounds(m, qkv, out, a, &d, tokens);
    else PARALLEL_FOR(m, d.items, 1, i, { attend_item(qkv, out, a, item_of(a, &d, tokens, i)); });
}

typedef struct {
    float *qkv, *out;
    const attention *a;
    long tokens;
} call;

static void run_attention(const void *arguments, worker *m) {
    const call *t = arguments;
    INTERNAL(onedraw_attend)(m, t->qkv, t->out, t->a, t->tokens);
}

void EXPORT(onedraw_attention)(float *qkv, float *out, const attention *a, long tokens, thread_pool *t) {
    call own = {qkv, out, a, tokens};
    onedraw_pool_run(t, run_attention, &own, 0);
}
