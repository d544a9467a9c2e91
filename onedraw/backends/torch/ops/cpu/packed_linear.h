/* Types and functions of products with weights in panels (all inputs of 16 or 32 outputs each), for jobs of a thread pool; see
 * packed_linear.c. */

#ifndef ONEDRAW_PACKED_LINEAR_H
#define ONEDRAW_PACKED_LINEAR_H

#include "gguf_blocks.h"
#include "thread_pool.h"

typedef struct {
    long kind, rows, column; /* kind: ggml type; rows: outputs of this weight; column: of the product's first such output */
    const uint8_t *panels;
} part;

/* Several weights with the same inputs, whose outputs are concatenated. */
typedef struct {
    long in, out, count;
    long coded; /* whether quantized parts take the activations as 8-bit codes instead of floats */
    const float *bias;
    const part *parts;
} packed_linear;

/* The scale and sums of 32 activations x that are quantized to 8-bit codes: x = scale * code. */
typedef struct {
    float scale, sum;      /* sum: the sum of scale * code */
    int32_t first, second; /* sums of the codes of the first and of the last 16 activations */
} group;

/* Rows quantized to codes: [rows][in], and their scales and sums [rows][in / 32]. */
typedef struct {
    int8_t *codes;
    group *groups;
} coded;

static inline int wants_codes(const packed_linear *p) {
    for (long i = 0; p->coded && i < p->count; i++)
        if (!is_plain((int)p->parts[i].kind)) return 1;
    return 0;
}
static inline long coded_bytes(long rows, long in) { return rows * (in + in / GROUP * (long)sizeof(group)); }
static inline coded coded_at(void *memory, long rows, long in) {
    return (coded){(int8_t *)memory + rows * (in / GROUP) * (long)sizeof(group), memory};
}

void INTERNAL(onedraw_code_row)(const float *x, coded c, long row, long in);
/* Computes y[r] = x[r] times the weights, plus bias, plus add[r] if `add` is not null. Rows of x are `stride` floats apart; c
 * has the same rows as codes. */
void INTERNAL(onedraw_multiply)(worker *m, const packed_linear *p, const float *x, long stride, coded c, float *y, const float *add,
                                long rows);

#endif
