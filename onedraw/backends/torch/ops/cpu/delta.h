/* The arguments of delta.c: the spans of a step, and the weights and stores of a layer. ops.py has the same structures for
 * ctypes. */

#ifndef ONEDRAW_DELTA_H
#define ONEDRAW_DELTA_H

#include <stdint.h>

typedef struct {
    /* The tokens of one row. first: index of the first token; fresh: whether the state starts at zero; prompt: tokens in chunked
     * form; known: known tokens, those of `prompt` included; drafts: number of drafts; held: slot of the first draft in the
     * rollback buffer; save_first: index of the first checkpoint to save in save_counts; saves: number of checkpoints. */
    long first, lane, fresh, prompt, known, drafts, held, save_first, saves;
} run;

typedef struct {
    long key_heads, value_heads, key_dim, value_dim, conv, channels;
    long tokens, runs, width; /* width: floats of a row of projections [qkv | z | a | b] */
    float eps;
    const float *conv_weight, *decay_weight, *bias, *norm;
    /* Sources of convolution windows: rows of the step's tokens, followed by conv - 1 window rows per lane; negative: zeros.
     * taps: [tokens][conv], the inputs of each token's convolution; closings: the window after the known tokens of each run;
     * kept: the window that each checkpoint saves. */
    const int64_t *taps, *closings, *kept;
    const int64_t *parents;                /* [tokens]: for a draft, the index of its parent among the drafts of its
                                            * row, or -1 if it follows the last known token; -1 for known tokens */
    const int64_t *save_counts, *save_slots; /* for each checkpoint to save: prompt tokens before it, and its slot */
    const run *run;
    float *states, *windows, *saved_states, *saved_windows;
    float *decays, *keys, *changes, *fed;  /* the rollback buffer; fed: the convolution inputs of drafts */
    float *mixed;                          /* [tokens][channels]: q, k, v after convolution and norms */
    float *gates;                          /* [tokens][3][value_heads]: log decay, decay, beta */
} delta;

#endif
