/* Attention over pages, as members of a team compute it: see attention.c. */

#ifndef ONEDRAW_ATTENTION_H
#define ONEDRAW_ATTENTION_H

#include "cpu_features.h"
#include "thread_pool.h"

#include <stdint.h>

/* Token t sees positions [firsts[t], ends[t]]. Position p lies in slot p of its row, or, from tails[t] on, in slot
 * tails[t] + paths[t][p - tails[t]]: the nodes of a tree stand in slots of their own and each reads its own path. */
typedef struct {
    long heads, kv_heads, dim, rotary, page_size, table_width, path_width;
    long width;                             /* of a row of qkv, where more may stand behind it */
    long writes, keys_as_values, norm_values; /* flags: a layer may read another's keys, or have no values of its own */
    float scale, eps;
    const float *q_norm, *k_norm; /* [dim] or null */
    const float *rope_table;           /* [positions][2][rotary / 2] cos and sin */
    const int64_t *positions, *slots, *firsts, *ends, *rows, *table;
    const int64_t *tails, *paths; /* null where no token has a path */
    float *keys, *values;         /* [page][kv_head][slot][dim], of another type where `kept` says so */
    float *key_scales, *value_scales; /* of codes: [page][kv_head][slot]; else null */
    long kv_dtype;                    /* what keys and values are: kv_quant.h */
} attention;

/* qkv [tokens][width], first the heads of q, k and v → out [tokens][heads][dim]. Every token's key is written before any
 * is read. */
void INTERNAL(onedraw_attend)(worker *m, float *qkv, float *out, const attention *a, long tokens);

#endif
