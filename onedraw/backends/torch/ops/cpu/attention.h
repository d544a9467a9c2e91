/* The arguments of attention over KV pages, and its function for jobs of a thread pool; see attention.c. */

#ifndef ONEDRAW_ATTENTION_H
#define ONEDRAW_ATTENTION_H

#include "cpu_features.h"
#include "thread_pool.h"

#include <stdint.h>

/* Token t attends to positions [firsts[t], ends[t]], both included. Position p is in slot p of its row, or, from tails[t] on,
 * in slot tails[t] + paths[t][p - tails[t]]: the nodes of a draft tree have slots of their own, and each attends to its own
 * path. */
typedef struct {
    long heads, kv_heads, dim, rotary, page_size, table_width, path_width;
    long width;                             /* floats of a row of qkv, which may have more columns than q, k and v */
    /* Flags. writes: keys and values are stored; keys_as_values: keys, before norm and rotation, are the values too; norm_values:
     * values are normalized. */
    long writes, keys_as_values, norm_values;
    float scale, eps;
    const float *q_norm, *k_norm;  /* norm weights [dim], or null */
    const float *rope_table;           /* [positions][2][rotary / 2] cos and sin */
    /* table: [row][table_width], the pages of each row; the others: [token]. */
    const int64_t *positions, *slots, *firsts, *ends, *rows, *table;
    const int64_t *tails, *paths;  /* null if no token is a node of a draft tree */
    float *keys, *values;  /* [page][kv_head][slot][dim], of the type that kv_dtype says; codes of 4 bits share bytes */
    float *key_scales, *value_scales;  /* of codes: [page][kv_head][slot]; otherwise null */
    long kv_dtype;  /* type of keys and values, an enum of kv_quant.h */
    /* Scratch memory for `room` floats. When threads share a long context, it holds their partial results until
     * they are merged. The output has the same bits for every `room`. */
    float *waiting;
    long room;
} attention;

/* Computes attention: qkv [tokens][width], which begins with the heads of q, k and v → out [tokens][heads][dim]. All keys and
 * values are written before any is read. Queries and keys are normalized and rotated in place. */
void INTERNAL(onedraw_attend)(worker *m, float *qkv, float *out, const attention *a, long tokens);

#endif
