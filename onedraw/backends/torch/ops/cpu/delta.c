/* Gated DeltaNet on a CPU. The operations for a row and head are in one fixed order; threads only divide rows and heads, so
 * their number changes no bit. A lane is the slot of a sequence's recurrent state; the rollback buffer holds the state
 * increments of drafts until the commit. The formulas and a plain implementation are in ../plain/delta.py. */

#include "delta.h"
#include "cpu_features.h"
#include "thread_pool.h"
#include "vectors.h"

#define CHUNK 64
#define MOST 512 /* the largest key or value dimension of a head */

static inline const float *tap_row(const float *projected, const delta *d, int64_t tap) {
    return tap < d->tokens ? projected + tap * d->width : d->windows + (tap - d->tokens) * d->channels;
}

static void unit(float *x, long width, float scale) {
    float by = 1.0f / sqrtf(dot(x, x, width) + 1e-6f) * scale;
    for (long i = 0; i < width; i++) x[i] *= by;
}

/* Convolution, L2 norms and gates of token t. */
static void gate_token(const float *projected, const delta *d, long t) {
    float *x = d->mixed + t * d->channels;
    for (long c = 0; c < d->channels; c++) x[c] = 0.0f;
    for (long j = 0; j < d->conv; j++) {
        int64_t tap = d->taps[t * d->conv + j];
        if (tap < 0) continue;
        const float *row = tap_row(projected, d, tap), *w = d->conv_weight + j * d->channels;
        for (long c = 0; c < d->channels; c++) x[c] += row[c] * w[c];
    }
    for (long c = 0; c < d->channels; c++) x[c] = silu(x[c]);
    for (long h = 0; h < d->key_heads; h++) {
        unit(x + h * d->key_dim, d->key_dim, 1.0f / sqrtf((float)d->key_dim));
        unit(x + (d->key_heads + h) * d->key_dim, d->key_dim, 1.0f);
    }
    long heads = d->value_heads;
    const float *a = projected + t * d->width + d->channels + heads * d->value_dim, *b = a + heads;
    float *g = d->gates + t * 3 * heads;
    for (long h = 0; h < heads; h++) {
        float x = a[h] + d->bias[h];
        float soft = x > 20.0f ? x : log1pf(expf(x));
        g[h] = d->decay_weight[h] * soft;
        g[heads + h] = exponential(g[h]);
        g[2 * heads + h] = 1.0f / (1.0f + exponential(-b[h]));
    }
}

/* Updates one row of the state: s = s * decay + key * change. It is one function that is never inlined, so that the compiler
 * rounds a replayed update exactly like the original one. */
static __attribute__((noinline)) void advance(float *s, float decay, float key, const float *change, long width) {
    for (long j = 0; j < width; j++) s[j] = s[j] * decay + key * change[j];
}

/* Repeats the state update of the draft in slot `place` of the rollback buffer, for head h. key [key_dim]: the draft's key, which
 * several value heads share. */
static void replay(float *state, const delta *d, long place, long h, const float *key) {
    const float *change = d->changes + (place * d->value_heads + h) * d->value_dim;
    float decay = d->decays[place * d->value_heads + h];
    for (long k = 0; k < d->key_dim; k++) advance(state + k * d->value_dim, decay, key[k], change, d->value_dim);
}

/* Recurrent form: token t of head h. Updates the state and stores the state's output [value_dim] and the change written into
 * it. */
static void step(float *state, const delta *d, long t, long h, float *out, float *change) {
    long dk = d->key_dim, dv = d->value_dim, heads = d->value_heads, shared = h / (heads / d->key_heads);
    const float *row = d->mixed + t * d->channels, *q = row + shared * dk, *k = q + d->key_heads * dk;
    const float *v = row + 2 * d->key_heads * dk + h * dv, *g = d->gates + t * 3 * heads;
    float decay = g[heads + h], beta = g[2 * heads + h];
    for (long j = 0; j < dv; j++) change[j] = out[j] = 0.0f;
    for (long i = 0; i < dk; i++)
        for (long j = 0; j < dv; j++) change[j] += state[i * dv + j] * decay * k[i];
    for (long j = 0; j < dv; j++) change[j] = (v[j] - change[j]) * beta;
    for (long i = 0; i < dk; i++) {
        advance(state + i * dv, decay, k[i], change, dv);
        for (long j = 0; j < dv; j++) out[j] += state[i * dv + j] * q[i];
    }
}

/* Chunked form: tokens [first, first + count) of head h, count <= CHUNK. work [CHUNK][value_dim] receives the tokens' changes. */
static void chunk(float *state, const delta *d, long first, long count, long h, float *out, float *work) {
    long dk = d->key_dim, dv = d->value_dim, heads = d->value_heads, shared = h / (heads / d->key_heads);
    float total[CHUNK];
    for (long i = 0; i < count; i++)
        total[i] = d->gates[(first + i) * 3 * heads + h] + (i ? total[i - 1] : 0.0f);
    for (long i = 0; i < count; i++) {
        const float *row = d->mixed + (first + i) * d->channels, *q = row + shared * dk, *k = q + d->key_heads * dk;
        const float *v = row + 2 * d->key_heads * dk + h * dv;
        float beta = d->gates[(first + i) * 3 * heads + 2 * heads + h], so_far = exponential(total[i]);
        float *change = work + i * dv, *seen = out + (first + i) * heads * dv;
        float held[MOST], read[MOST];
        for (long j = 0; j < dv; j++) held[j] = read[j] = 0.0f;
        for (long n = 0; n < dk; n++)
            for (long j = 0; j < dv; j++) {
                held[j] += state[n * dv + j] * k[n];
                read[j] += state[n * dv + j] * q[n];
            }
        for (long j = 0; j < dv; j++) { held[j] *= so_far; read[j] *= so_far; }
        for (long m = 0; m < i; m++) {
            const float *before = d->mixed + (first + m) * d->channels + (d->key_heads + shared) * dk;
            float fade = exponential(total[i] - total[m]);
            float kk = dot(k, before, dk) * fade, qk = dot(q, before, dk) * fade;
            for (long j = 0; j < dv; j++) { held[j] += kk * work[m * dv + j]; read[j] += qk * work[m * dv + j]; }
        }
        float qk = dot(q, k, dk);
        for (long j = 0; j < dv; j++) {
            change[j] = beta * (v[j] - held[j]);
            seen[j] = read[j] + qk * change[j];
        }
    }
    float all = exponential(total[count - 1]);
    for (long n = 0; n < dk * dv; n++) state[n] *= all;
    for (long i = 0; i < count; i++) {
        const float *k = d->mixed + (first + i) * d->channels + (d->key_heads + shared) * dk;
        float rest = exponential(total[count - 1] - total[i]);
        for (long n = 0; n < dk; n++)
            for (long j = 0; j < dv; j++) state[n * dv + j] += k[n] * rest * work[i * dv + j];
    }
}

/* Computes every draft from its parent's state. If the parent is not the preceding draft, its state is rebuilt from the state
 * after the known tokens by replaying its ancestors. */
static void draft(const run *r, const delta *d, long h, const float *state, float *out, float *work) {
    long size = d->key_dim * d->value_dim, heads = d->value_heads, last = -1, node = r->first + r->known;
    long repeats = heads / d->key_heads;
    int64_t path[r->drafts + 1];
    memcpy(work, state, size * sizeof(float));
    for (long i = 0; i < r->drafts; i++) {
        long parent = d->parents[node + i], depth = 0;
        if (parent != last) {
            memcpy(work, state, size * sizeof(float));
            for (long p = parent; p >= 0; p = d->parents[node + p]) path[depth++] = p;
            while (depth) { /* the key comes from this step's data, because another thread may be writing the buffer's copy */
                long p = path[--depth];
                replay(work, d, r->held + p, h, d->mixed + (node + p) * d->channels + (d->key_heads + h / repeats) * d->key_dim);
            }
        }
        long t = node + i, place = r->held + i;
        d->decays[place * heads + h] = d->gates[t * 3 * heads + heads + h];
        if (h % repeats == 0) {
            long shared = h / repeats;
            memcpy(d->keys + (place * d->key_heads + shared) * d->key_dim,
                   d->mixed + t * d->channels + (d->key_heads + shared) * d->key_dim, d->key_dim * sizeof(float));
        }
        step(work, d, t, h, out + (t * heads + h) * d->value_dim, d->changes + (place * heads + h) * d->value_dim);
        last = i;
    }
}

static void recur(const run *r, const delta *d, long h, float *out, float *work) {
    long size = d->key_dim * d->value_dim, heads = d->value_heads, save = 0;
    float *state = d->states + (r->lane * heads + h) * size, change[MOST];
    if (r->fresh) memset(state, 0, size * sizeof(float));
    for (long t = 0; t < r->prompt; t += CHUNK) {
        long count = r->prompt - t < CHUNK ? r->prompt - t : CHUNK;
        chunk(state, d, r->first + t, count, h, out + h * d->value_dim, work);
        while (save < r->saves && d->save_counts[r->save_first + save] <= t + count) {
            float *slot = d->saved_states + (d->save_slots[r->save_first + save++] * heads + h) * size;
            memcpy(slot, state, size * sizeof(float));
        }
    }
    for (long t = r->first + r->prompt; t < r->first + r->known; t++)
        step(state, d, t, h, out + (t * heads + h) * d->value_dim, change);
    if (r->drafts) draft(r, d, h, state, out, work);
}

/* Computes the layer's output at token t, RMSNorm(out) * silu(z), for all heads. out: the state's output, which is replaced. */
static void close_token(const float *projected, const delta *d, long t, float *out) {
    long dv = d->value_dim;
    const float *z = projected + t * d->width + d->channels;
    for (long h = 0; h < d->value_heads; h++) {
        float *x = out + (t * d->value_heads + h) * dv;
        float scale = 1.0f / sqrtf(dot(x, x, dv) / (float)dv + d->eps);
        for (long j = 0; j < dv; j++) x[j] = x[j] * scale * d->norm[j] * silu(z[h * dv + j]);
    }
}

static void copy_window(const float *projected, const delta *d, const int64_t *taps, float *target) {
    for (long j = 0; j < d->conv - 1; j++) {
        if (taps[j] < 0) memset(target + j * d->channels, 0, d->channels * sizeof(float));
        else memcpy(target + j * d->channels, tap_row(projected, d, taps[j]), d->channels * sizeof(float));
    }
}

typedef struct {
    const float *projected;
    float *out, *work, *window;
    const delta *of;
    long work_size;
} call;

static void run_delta(const void *arguments, worker *m) {
    const call *t = arguments;
    const delta *d = t->of;
    long heads = d->value_heads;
    PARALLEL_FOR(m, d->tokens, 4, i, { gate_token(t->projected, d, i); });
    PARALLEL_FOR(m, d->runs * heads, 1, i, { recur(d->run + i / heads, d, i % heads, t->out, t->work + m->index * t->work_size); });
    PARALLEL_FOR(m, d->tokens, 4, i, { close_token(t->projected, d, i, t->out); });
}

/* Runs the layer for all tokens of a step: projected [tokens][width] → out [tokens][value_heads][value_dim], which must be
 * zero. work: work_size floats per thread; window: scratch memory of the size of a convolution window. */
void EXPORT(onedraw_delta)(const float *projected, float *out, const delta *d, float *work, long work_size, float *window, thread_pool *t) {
    long before = d->conv - 1;
    call own = {projected, out, work, window, d, work_size};
    onedraw_pool_run(t, run_delta, &own, 0);
    for (long r = 0; r < d->runs; r++) { /* convolution windows are written last, after all reads of the old ones */
        const run *one = d->run + r;
        for (long s = 0; s < one->saves; s++) {
            long save = one->save_first + s;
            copy_window(projected, d, d->kept + save * before, d->saved_windows + d->save_slots[save] * before * d->channels);
        }
        /* The new window is built in scratch memory, because it may consist of parts of the old one, which it replaces. */
        copy_window(projected, d, d->closings + r * before, window);
        memcpy(d->windows + one->lane * before * d->channels, window, before * d->channels * sizeof(float));
        for (long i = 0; i < one->drafts; i++)
            memcpy(d->fed + (one->held + i) * d->channels, projected + (one->first + one->known + i) * d->width,
                   d->channels * sizeof(float));
    }
}

typedef struct {
    const delta *of;
    const int64_t *places;
    long lane, count;
} commit_arguments;

static void replay_drafts(const void *arguments, worker *m) {
    const commit_arguments *own = arguments;
    const delta *d = own->of;
    long size = d->key_dim * d->value_dim;
    PARALLEL_FOR(m, d->value_heads, 1, h, {
        for (long i = 0; i < own->count; i++) {
            const float *key = d->keys + (own->places[i] * d->key_heads + h / (d->value_heads / d->key_heads)) * d->key_dim;
            replay(d->states + (own->lane * d->value_heads + h) * size, d, own->places[i], h, key);
        }
    });
}

/* Commits kept drafts to one lane: applies their increments to the lane's states, in order, and moves the lane's convolution
 * window. places [count]: the drafts' slots in the rollback buffer; window: scratch memory of the window's size. */
void EXPORT(onedraw_delta_commit)(const delta *d, long lane, const int64_t *places, long count, float *window, thread_pool *t) {
    long before = d->conv - 1, row = d->channels;
    commit_arguments arguments = {d, places, lane, count};
    onedraw_pool_run(t, replay_drafts, &arguments, 0);
    float *own = d->windows + lane * before * row;
    for (long j = 0; j < before; j++) {
        long from = count + j;  /* index into the rows of the window, followed by those of the kept drafts */
        const float *source = from < before ? own + from * row : d->fed + places[from - before] * row;
        memcpy(window + j * row, source, row * sizeof(float));
    }
    memcpy(own, window, before * row * sizeof(float));
}
