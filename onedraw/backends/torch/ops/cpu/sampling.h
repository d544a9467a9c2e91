/* The sampling parameters of each row, and where the results are written. `ops.py` has the same fields for numpy and ctypes. */

#ifndef ONEDRAW_SAMPLING_H
#define ONEDRAW_SAMPLING_H

#include <stdint.h>

#include "cpu_features.h"
#include "thread_pool.h"

typedef struct {
    double top_p;            /* top-p; 1 if the row does not use it */
    int64_t top_k;           /* top-k; 0 if the row does not use it */
    /* divisor: the temperature; limit: the largest deficit, (best - score) / temperature, that min-p keeps */
    float divisor, limit;
    uint32_t key[2];         /* key of the Gumbel noise at this position */
    int32_t greedy, padding; /* greedy: sample without noise; padding: unused */
} row_parameters;

typedef struct {
    const float *scores, *raw; /* [rows, vocab]; raw: the logits before they were adjusted, or null if they were not */
    int64_t stride, raw_stride, vocab, width;
    const row_parameters *parameters;
    /* Results. deficits: [rows, width], infinite past the vocabulary; limits: [rows], the largest deficit that is kept. */
    float *deficits, *limits;
    int64_t *tokens;          /* result: [rows], -1 for a row without a valid distribution */
    int64_t *masses;          /* [threads, width]: scratch memory for the probability masses of a row */
} sampling_arguments;

void INTERNAL(onedraw_sample)(const sampling_arguments *arguments, long rows, thread_pool *t);

#endif
