/* A turn of delta layers as delta.c reads it. */

#ifndef ONEDRAW_DELTA_H
#define ONEDRAW_DELTA_H

#include <stdint.h>

typedef struct {
    long first, lane, fresh, prompt, known, drafts, held, save_first, saves; /* Run of ../runs.py */
} run;

typedef struct {
    long key_heads, value_heads, key_dim, value_dim, conv, channels;
    long tokens, runs, width; /* width: of a row of projections [qkv | z | a | b] */
    float eps;
    const float *conv_weight, *decay_weight, *bias, *norm;
    const int64_t *taps, *closings, *kept; /* rows of [tokens, then conv - 1 window rows per lane]; negative: zeros */
    const int64_t *parents;                /* [tokens] of a draft, its parent draft or -1 */
    const int64_t *save_counts, *save_slots;
    const run *run;
    float *states, *windows, *saved_states, *saved_windows;
    float *decays, *keys, *changes, *fed;  /* the rollback buffer */
    float *mixed;                          /* [tokens][channels] q, k, v after convolution and norms */
    float *gates;                          /* [tokens][3][value_heads] log decay, decay, beta */
} delta;

#endif
