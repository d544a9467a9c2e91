/* RMSNorm and gated silu for all rows, and whole dense layers in one call:
 * norm → q, k, v → attention → output projection → norm → gate, up → silu → down. A fused layer runs the same code as the
 * separate operations, in the same order, so the bits are the same; it saves the calls and the wake-ups of the threads. */

#include <stddef.h>

#include "fused_layers.h"
#include "kv_quant.h"
#include "rowwise.h"

typedef struct {
    const float *x, *weight;
    float *y;
    long rows, width;
    float eps;
} rowwise;

#define FEW 32768 /* with fewer numbers than this the caller works alone, because waking threads would take longer */

static void norm_rows(const void *arguments, worker *m) {
    const rowwise *r = arguments;
    PARALLEL_FOR(m, r->rows, 4096 / r->width + 1, i, {
        norm_row(r->x + i * r->width, r->weight, r->y + i * r->width, r->width, r->eps);
    });
}

void EXPORT(onedraw_rms_norm)(const float *x, const float *weight, float *y, long rows, long width, float eps, thread_pool *t) {
    rowwise own = {x, weight, y, rows, width, eps};
    onedraw_pool_run(t, norm_rows, &own, rows * width < FEW);
}

static void gate_rows(const void *arguments, worker *m) {
    const rowwise *r = arguments;
    PARALLEL_FOR(m, r->rows, 4096 / r->width + 1, i, { silu_gated_row(r->x + i * 2 * r->width, r->y + i * r->width, r->width); });
}

/* Gated activation of rows [gate | up] of 2 * width floats: y = silu(gate) * up. */
void EXPORT(onedraw_silu_gated)(const float *x, float *y, long rows, long width, thread_pool *t) {
    rowwise own = {x, 0, y, rows, width, 0.0f};
    onedraw_pool_run(t, gate_rows, &own, rows * width < FEW);
}

/* ------------------------------------------------------------------ dense layers */

/* The arguments of one pass over layers. */
typedef struct {
    const layer *const *layers;
    const attention *const *attentions; /* arguments of each layer's attention; run_layers fills in the layer's fields */
    float *const *residuals;            /* [count + 1], each [tokens][hidden]: the input, then the output of each layer */
    char *memory;
    long count, tokens;
} pass;

static long padded(long bytes) { return (bytes + 63) / 64 * 64; }
static long wider(long a, long b) { return a > b ? a : b; }

/* Addresses of a layer's intermediate results in the scratch memory of a pass, and the size of that memory. */
typedef struct {
    float *normed, *qkv, *mixed, *fed, *gated;
    void *codes;
    long size;
} places;

static places places_in(const layer *l, char *memory, long tokens) {
    long widest = wider(wider(l->hidden, l->width), l->mixed), at = 0, starts[5];
    long sizes[5] = {l->hidden, l->qkv->out, l->mixed, l->gate_up->out, l->width};
    for (int i = 0; i < 5; i++) {
        starts[i] = at;
        at += padded(tokens * sizes[i] * (long)sizeof(float));
    }
    float *to[5];
    for (int i = 0; i < 5; i++) to[i] = memory ? (float *)(void *)(memory + starts[i]) : 0;
    return (places){to[0], to[1], to[2], to[3], to[4], memory ? memory + at : 0, at + padded(coded_bytes(tokens, widest))};
}

/* Scratch memory for rows quantized to 8-bit codes; null if no part of the product takes codes. */
static coded coded_rows(const packed_linear *p, void *memory, long rows) {
    return wants_codes(p) ? coded_at(memory, rows, p->in) : (coded){0, 0};
}

/* Rounds a row of the residual stream to the stream's type. Its values stay floats, so reading them converts nothing. */
INLINE void round_row(float *x, long width, long type) {
    if (type == KV_BF16)
        for (long i = 0; i < width; i++) x[i] = bfloat_to_float(float_to_bfloat(x[i]));
    if (type == KV_F16)
        for (long i = 0; i < width; i++) x[i] = half_to_float(float_to_half(x[i]));
}

static void run_layer(const layer *l, const attention *a, const float *x, float *y, places at, long n, worker *m) {
    long few = 1 + n / (m->count * 16);
    coded c = coded_rows(l->qkv, at.codes, n);
    PARALLEL_FOR(m, n, few, r, {
        norm_row(x + r * l->hidden, l->attn_norm, at.normed + r * l->hidden, l->hidden, l->eps);
        if (c.codes) INTERNAL(onedraw_code_row)(at.normed + r * l->hidden, c, r, l->qkv->in);
    });
    INTERNAL(onedraw_multiply)(m, l->qkv, at.normed, l->hidden, c, at.qkv, 0, n);
    INTERNAL(onedraw_attend)(m, at.qkv, at.mixed, a, n);
    c = coded_rows(l->out, at.codes, n);
    if (c.codes) PARALLEL_FOR(m, n, few, r, { INTERNAL(onedraw_code_row)(at.mixed + r * l->mixed, c, r, l->out->in); });
    INTERNAL(onedraw_multiply)(m, l->out, at.mixed, l->mixed, c, y, x, n);
    c = coded_rows(l->gate_up, at.codes, n);
    PARALLEL_FOR(m, n, few, r, {
        round_row(y + r * l->hidden, l->hidden, l->stream);
        norm_row(y + r * l->hidden, l->mlp_norm, at.normed + r * l->hidden, l->hidden, l->eps);
        if (c.codes) INTERNAL(onedraw_code_row)(at.normed + r * l->hidden, c, r, l->gate_up->in);
    });
    INTERNAL(onedraw_multiply)(m, l->gate_up, at.normed, l->hidden, c, at.fed, 0, n);
    c = coded_rows(l->down, at.codes, n);
    PARALLEL_FOR(m, n, few, r, {
        silu_gated_row(at.fed + r * l->gate_up->out, at.gated + r * l->width, l->width);
        if (c.codes) INTERNAL(onedraw_code_row)(at.gated + r * l->width, c, r, l->down->in);
    });
    INTERNAL(onedraw_multiply)(m, l->down, at.gated, l->width, c, y, y, n);
    if (l->stream != KV_F32) PARALLEL_FOR(m, n, few, r, { round_row(y + r * l->hidden, l->hidden, l->stream); });
}

static void run_layers(const void *arguments, worker *m) {
    const pass *p = arguments;
    for (long i = 0; i < p->count; i++) {
        const layer *l = p->layers[i];
        attention a = *p->attentions[i];
        a.q_norm = l->q_norm;
        a.k_norm = l->k_norm;
        a.keys = l->keys;
        a.values = l->values;
        a.key_scales = l->key_scales;
        a.value_scales = l->value_scales;
        a.kv_dtype = l->kv_dtype;
        a.eps = l->eps;
        a.width = l->qkv->out;
        run_layer(l, &a, p->residuals[i], p->residuals[i + 1], places_in(l, p->memory, p->tokens), p->tokens, m);
    }
}

/* Bytes of scratch memory that a pass over `tokens` tokens needs. */
long EXPORT(onedraw_layers_bytes)(const layer *const *layers, long count, long tokens) {
    long most = 0;
    for (long i = 0; i < count; i++) most = wider(most, places_in(layers[i], NULL, tokens).size);
    return most;
}

/* Runs layers one after the other as one job of the thread pool. `memory` is aligned to 64 bytes. */
void EXPORT(onedraw_layers)(const layer *const *layers, const attention *const *attentions, float *const *residuals, long count,
                            long tokens, char *memory, thread_pool *t) {
    pass own = {layers, attentions, residuals, memory, count, tokens};
    onedraw_pool_run(t, run_layers, &own, 0);
}
