/* Attention: keys in blocks of 64 on absolute positions, one after the other, an online softmax between them. One query head
 * of one token is one fixed sequence of operations, so batch, chunk, page and tree leave no trace in it.
 * Slow twin: ../layers/attention.py. */

#include "attention.h"

#include "rowwise.h"

#define BLOCK 64
#define SHARED 16 /* query heads of one key head that are computed together, at most */

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

/* Where the keys and values of positions start + [low, high) begin in their stores, as token t reads them with one head. */
static void places_of(const attention *a, long t, long head, long start, long low, long high, long *places) {
    const int64_t *table = a->table + a->rows[t] * a->table_width;
    int shift = __builtin_ctzl((unsigned long)a->page_size); /* page sizes are powers of two */
    for (long j = low; j < high; j++) {
        long slot = start + j;
        if (a->tails && slot >= a->tails[t]) slot = a->tails[t] + a->paths[t * a->path_width + slot - a->tails[t]];
        places[j] = (((table[slot >> shift] * a->kv_heads + head) << shift) + (slot & (a->page_size - 1))) * a->dim;
    }
    /* Sixteen keys are read at a time: those that are not seen stand for the first that is. */
    for (long j = low / 16 * 16; j < low; j++) places[j] = places[low];
    for (long j = high; j % 16; j++) places[j] = places[low];
}

/* weights[j] = q · key j for whole sixteens around [low, high). */
INLINE void scores_of(const float *q, const float *keys, const long *places, long low, long high, const long dim, float *weights) {
    for (long j = low / 16 * 16; j < high; j += 16) {
        floats sums[16];
        for (int i = 0; i < 16; i++) {
            const float *key = keys + places[j + i];
            floats sum = f_zero();
            for (long d = 0; d + 16 <= dim; d += 16) sum = fused(f_load(q + d), f_load(key + d), sum);
            sums[i] = sum;
        }
        floats found = f_sums(sums);
        f_store(weights + j, found);
        for (long d = dim / 16 * 16; d < dim; d++)
            for (int i = 0; i < 16; i++) weights[j + i] += q[d] * keys[places[j + i] + d];
    }
}

/* out = out * fade + sum over j of weights[j] * value j, key by key. */
INLINE void add_values(float *out, float fade, const float *values, const long *places, const float *weights, long low, long high,
                       const long dim) {
    long d = 0;
    for (; d + 64 <= dim; d += 64) {
        floats by = f_splat(fade), s0 = f_mul(f_load(out + d), by), s1 = f_mul(f_load(out + d + 16), by);
        floats s2 = f_mul(f_load(out + d + 32), by), s3 = f_mul(f_load(out + d + 48), by);
        for (long j = low; j < high; j++) {
            const float *value = values + places[j] + d;
            floats w = f_splat(weights[j]);
            s0 = fused(w, f_load(value), s0);
            s1 = fused(w, f_load(value + 16), s1);
            s2 = fused(w, f_load(value + 32), s2);
            s3 = fused(w, f_load(value + 48), s3);
        }
        f_store(out + d, s0); f_store(out + d + 16, s1); f_store(out + d + 32, s2); f_store(out + d + 48, s3);
    }
    for (; d + 16 <= dim; d += 16) {
        floats s = f_mul(f_load(out + d), f_splat(fade));
        for (long j = low; j < high; j++) s = fused(f_splat(weights[j]), f_load(values + places[j] + d), s);
        f_store(out + d, s);
    }
    for (; d < dim; d++) {
        float s = out[d] * fade;
        for (long j = low; j < high; j++) s += weights[j] * values[places[j] + d];
        out[d] = s;
    }
}

/* One block of keys for one query head. */
INLINE void block_of(const float *q, float *out, const attention *a, const long *places, long low, long high, const long dim,
                     float *peak, float *total) {
    float weights[BLOCK], best = *peak;
    scores_of(q, a->keys, places, low, high, dim, weights);
    for (long j = low; j < high; j++) {
        weights[j] *= a->scale;
        best = weights[j] > best ? weights[j] : best;
    }
    for (long j = 0; j < low; j++) weights[j] = -INFINITY;
    for (long j = high; j < BLOCK; j++) weights[j] = -INFINITY;
    float fade = exponential(*peak - best);
    for (long j = 0; j < BLOCK; j++) weights[j] = weights[j] == -INFINITY ? 0.0f : exponential(weights[j] - best);
    floats sum = f_zero();
    for (long j = 0; j < BLOCK; j += 16) sum = f_add(sum, f_load(weights + j));
    *total = *total * fade + f_sum(sum);
    add_values(out, fade, a->values, places, weights, low, high, dim);
    *peak = best;
}

/* Query heads [h, h + count) of token t, which share a key head; count <= SHARED. out [heads][dim] of the token. */
INLINE void attend_heads(const float *row, float *out, const attention *a, long t, long h, long count, const long dim) {
    long head = h / (a->heads / a->kv_heads), first = a->firsts[t], end = a->ends[t], places[BLOCK];
    float peak[SHARED], total[SHARED];
    for (long g = 0; g < count; g++) {
        peak[g] = -INFINITY;
        total[g] = 0.0f;
        for (long d = 0; d < dim; d++) out[(h + g) * dim + d] = 0.0f;
    }
    for (long start = first / BLOCK * BLOCK; start <= end; start += BLOCK) {
        long low = start < first ? first - start : 0, high = end - start + 1 < BLOCK ? end - start + 1 : BLOCK;
        places_of(a, t, head, start, low, high, places);
        for (long g = 0; g < count; g++)
            block_of(row + (h + g) * dim, out + (h + g) * dim, a, places, low, high, dim, peak + g, total + g);
    }
    for (long g = 0; g < count; g++)
        for (long d = 0; d < dim; d++) out[(h + g) * dim + d] /= total[g];
}

typedef void (*attending)(const float *row, float *out, const attention *a, long t, long h, long count);
#define ATTEND(name, dim)                                                                                           \
    static void name(const float *row, float *out, const attention *a, long t, long h, long count) {                \
        attend_heads(row, out, a, t, h, count, dim);                                                                \
    }
ATTEND(attend_64, 64) ATTEND(attend_128, 128) ATTEND(attend_any, a->dim)

/* Heads that one member takes at once: those of a key head, fewer where there is little to share out. */
static long together(const attention *a, const member *m, long tokens) {
    long count = a->heads / a->kv_heads;
    while (count > 1 && (count > SHARED || (a->heads / a->kv_heads) % count || tokens * a->heads / count < 4 * m->count)) count--;
    return count;
}

void INTERNAL(onedraw_attend)(member *m, float *qkv, float *out, const attention *a, long tokens) {
    attending attend = a->dim == 64 ? attend_64 : a->dim == 128 ? attend_128 : attend_any;
    SHARE(m, tokens, 1 + tokens / 64, t, { prepare_token(qkv, a, t); });
    if (!a->heads) return;
    long count = together(a, m, tokens), items = a->heads / count;
    SHARE(m, tokens * items, 1, i, {
        long t = i / items;
        attend(qkv + t * a->width, out + t * a->heads * a->dim, a, t, i % items * count, count);
    });
}

typedef struct {
    float *qkv, *out;
    const attention *a;
    long tokens;
} turn;

static void attend_turn(const void *given, member *m) {
    const turn *t = given;
    INTERNAL(onedraw_attend)(m, t->qkv, t->out, t->a, t->tokens);
}

void EXPORT(onedraw_attention)(float *qkv, float *out, const attention *a, long tokens, team *t) {
    turn own = {qkv, out, a, tokens};
    onedraw_team_run(t, attend_turn, &own, 0);
}
