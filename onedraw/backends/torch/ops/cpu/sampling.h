/* What rows ask for when a token is chosen, and where the answers go. `choosing.py` has the same fields. */

#ifndef ONEDRAW_SAMPLING_H
#define ONEDRAW_SAMPLING_H

#include <stdint.h>

#include "cpu_features.h"
#include "thread_pool.h"

typedef struct {
    double top_p;            /* 1: not asked for */
    int64_t top_k;           /* 0: not asked for */
    float divisor, limit;    /* the temperature; the largest deficit that min-p leaves */
    uint32_t key[2];         /* of the noise at this position */
    int32_t greedy, padding;
} row_parameters;

typedef struct {
    const float *scores, *raw; /* raw: the logits before they were adjusted, or nothing where they were not */
    int64_t stride, raw_stride, vocab, width;
    const row_parameters *parameters;
    float *deficits, *limits; /* [rows, width], infinite past the vocabulary; [rows] */
    int64_t *tokens;          /* [rows] */
    int64_t *masses;          /* [threads, width]: room to work */
} sampling_arguments;

void INTERNAL(onedraw_sample)(const sampling_arguments *what, long rows, thread_pool *t);

#endif
