/* Attention over KV pages: keys are read in blocks of 64 absolute positions, in order, with an online softmax. The operations
 * of a query head of a token are in one fixed order, so batch, prompt chunk, page size and draft tree change no bit. The plain
 * implementation is ../plain/attention.py. A place is the offset in a page store at which a head's key or value begins; [low,
 * high) are the positions of a block that a token attends to. */

#include "attention.h"

#include "kv_quant.h"
#include "rowwise.h"

#define BLOCK 64  /* keys per block */
#define SHARED 16 /* the most query heads of one KV head that are computed together */

static void norm_and_rope_head(float *x, const attention *a, long position, const float *weight) {
    if (weight) norm_row(x, weight, x, a->dim, a->eps);
    rotate_head(x, a->rope_table + position * a->rotary, a->rotary / 2);
}

/* Writes one head's key and value to pages that are not float32. 8-bit codes have no NaN, so if key or value is not finite,
 * the key's scale is NaN. */
static void write_narrow_head(float *key, const float *value, const attention *a, long position, long head) {
    long place = head * a->dim;
    float own[a->dim];
    if (a->norm_values) norm_row(value, 0, own, a->dim, a->eps);
    else memcpy(own, value, a->dim * sizeof(float));
    norm_and_rope_head(key, a, position, a->k_norm);
    if (a->kv_dtype == KV_BF16 || a->kv_dtype == KV_F16) {
        uint16_t *keys = (uint16_t *)a->keys + place, *values = (uint16_t *)a->values + place;
        for (long d = 0; d < a->dim; d++) keys[d] = a->kv_dtype == KV_F16 ? float_to_half(key[d]) : float_to_bfloat(key[d]);
        for (long d = 0; d < a->dim; d++) values[d] = a->kv_dtype == KV_F16 ? float_to_half(own[d]) : float_to_bfloat(own[d]);
        return;
    }
    int finite = head_is_finite(key, a->dim) && head_is_finite(own, a->dim);
    for (long d = 0; !finite && d < a->dim; d++) key[d] = own[d] = 0.0f;
    float scale = put_codes(key, a->keys, a->kv_dtype, place, a->dim);
    a->key_scales[head] = finite ? scale : NAN;
    a->value_scales[head] = put_codes(own, a->values, a->kv_dtype, place, a->dim);
}

/* Normalizes and rotates the queries and keys of token t in place, and writes its keys and values to its page. */
static void prepare_token(float *qkv, const attention *a, long t) {
    long position = a->positions[t], slot = a->slots[t];
    long page = a->table[a->rows[t] * a->table_width + slot / a->page_size];
    float *row = qkv + t * a->width;
    for (long h = 0; h < a->heads; h++) norm_and_rope_head(row + h * a->dim, a, position, a->q_norm);
    for (long h = 0; a->writes && h < a->kv_heads; h++) {
        float *key = row + (a->heads + h) * a->dim, *value = a->keys_as_values ? key : key + a->kv_heads * a->dim;
        long head = (page * a->kv_heads + h) * a->page_size + slot % a->page_size, place = head * a->dim;
        if (a->kv_dtype != KV_F32) {
            write_narrow_head(key, value, a, position, head);
            continue;
        }
        if (a->norm_values) norm_row(value, 0, a->values + place, a->dim, a->eps);
        else memcpy(a->values + place, value, a->dim * sizeof(float));
        norm_and_rope_head(key, a, position, a->k_norm);
        memcpy(a->keys + place, key, a->dim * sizeof(float));
    }
}

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

/* Computes weights[j] = q · key j for the positions [low, high), widened to multiples of sixteen. */
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

/* Updates out = out * fade + sum over j of weights[j] * value j, added key by key in order. */
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

/* Keys and values of a block as floats, and the scales of 8-bit codes by position in the block, or null. */
typedef struct {
    const float *keys, *values, *key_scales, *value_scales;
} block;

/* Adds one block of keys to the online softmax of one query head: its maximum *peak, its sum *total, and its weighted values
 * `out`. */
INLINE void block_of(const float *q, float *out, const attention *a, const block b, const long *places, long low, long high,
                     const long dim, float *peak, float *total) {
    float weights[BLOCK], best = *peak;
    scores_of(q, b.keys, places, low, high, dim, weights);
    for (long j = low; j < high; j++) {
        weights[j] *= b.key_scales ? a->scale * b.key_scales[j] : a->scale;
        best = weights[j] > best ? weights[j] : best;
    }
    for (long j = 0; j < low; j++) weights[j] = -INFINITY;
    for (long j = high; j < BLOCK; j++) weights[j] = -INFINITY;
    float fade = exponential(*peak - best);
    for (long j = 0; j < BLOCK; j++) weights[j] = weights[j] == -INFINITY ? 0.0f : exponential(weights[j] - best);
    floats sum = f_zero();
    for (long j = 0; j < BLOCK; j += 16) sum = f_add(sum, f_load(weights + j));
    *total = *total * fade + f_sum(sum);
    for (long j = low; b.value_scales && j < high; j++) weights[j] *= b.value_scales[j];
    add_values(out, fade, b.values, places, weights, low, high, dim);
    *peak = best;
}

/* Converts the keys and values of the positions [low, high) of a block to floats in `keys` and `values`, and sets `places` to
 * their offsets there. Where pages are quantized, it also copies their scales to `scales`: those of the keys, then those of the
 * values. */
static block load_block(const attention *a, long *places, long low, long high, float *keys, float *values, float *scales) {
    for (long j = low; j < high; j++) {
        get_head(keys + j * a->dim, a->keys, a->kv_dtype, places[j], a->dim);
        get_head(values + j * a->dim, a->values, a->kv_dtype, places[j], a->dim);
        if (a->key_scales) {
            scales[j] = a->key_scales[places[j] / a->dim];
            scales[BLOCK + j] = a->value_scales[places[j] / a->dim];
        }
    }
    for (long j = 0; j < BLOCK; j++) places[j] = (j < low || j >= high ? low : j) * a->dim;
    return (block){keys, values, a->key_scales ? scales : 0, a->key_scales ? scales + BLOCK : 0};
}

/* Attention of query heads [h, h + count) of token t, which share a KV head; count <= SHARED. out: [heads][dim] of the token.
 * `room`: scratch memory for the keys and values of a block if pages are not float32, otherwise null. */
INLINE void attend_heads(const float *row, float *out, const attention *a, long t, long h, long count, const long dim, float *room) {
    long head = h / (a->heads / a->kv_heads), first = a->firsts[t], end = a->ends[t], places[BLOCK];
    float peak[SHARED], total[SHARED], scales[2 * BLOCK];
    for (long g = 0; g < count; g++) {
        peak[g] = -INFINITY;
        total[g] = 0.0f;
        for (long d = 0; d < dim; d++) out[(h + g) * dim + d] = 0.0f;
    }
    for (long start = first / BLOCK * BLOCK; start <= end; start += BLOCK) {
        long low = start < first ? first - start : 0, high = end - start + 1 < BLOCK ? end - start + 1 : BLOCK;
        places_of(a, t, head, start, low, high, places);
        block b = {a->keys, a->values, 0, 0};
        if (room) b = load_block(a, places, low, high, room, room + BLOCK * dim, scales);
        for (long g = 0; g < count; g++)
            block_of(row + (h + g) * dim, out + (h + g) * dim, a, b, places, low, high, dim, peak + g, total + g);
    }
    for (long g = 0; g < count; g++)
        for (long d = 0; d < dim; d++) out[(h + g) * dim + d] /= total[g];
}

typedef void (*attend_function)(const float *row, float *out, const attention *a, long t, long h, long count);
#define ATTEND(name, dim)                                                                                           \
    static void name(const float *row, float *out, const attention *a, long t, long h, long count) {                \
        attend_heads(row, out, a, t, h, count, dim, 0);                                                             \
    }
ATTEND(attend_64, 64) ATTEND(attend_128, 128) ATTEND(attend_any, a->dim)

static void attend_narrow(const float *row, float *out, const attention *a, long t, long h, long count) {
    float room[2 * BLOCK * a->dim];
    attend_heads(row, out, a, t, h, count, a->dim, room);
}

/* The number of query heads that one item of work computes: those of a KV head, or fewer if there would be too few items for
 * all threads. */
static long heads_per_item(const attention *a, const worker *m, long tokens) {
    long count = a->heads / a->kv_heads;
    while (count > 1 && (count > SHARED || (a->heads / a->kv_heads) % count || tokens * a->heads / count < 4 * m->count)) count--;
    return count;
}

void INTERNAL(onedraw_attend)(worker *m, float *qkv, float *out, const attention *a, long tokens) {
    attend_function attend = a->kv_dtype != KV_F32 ? attend_narrow : a->dim == 64 ? attend_64 : a->dim == 128 ? attend_128 : attend_any;
    PARALLEL_FOR(m, tokens, 1 + tokens / 64, t, { prepare_token(qkv, a, t); });
    if (!a->heads) return;
    long count = heads_per_item(a, m, tokens), items = a->heads / count;
    PARALLEL_FOR(m, tokens * items, 1, i, {
        long t = i / items;
        attend(qkv + t * a->width, out + t * a->heads * a->dim, a, t, i % items * count, count);
    });
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
