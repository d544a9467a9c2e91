/* A product as members of a team compute it: see packed_linear.c. */

#ifndef ONEDRAW_PACKED_LINEAR_H
#define ONEDRAW_PACKED_LINEAR_H

#include "gguf_blocks.h"
#include "thread_pool.h"

typedef struct {
    long kind, rows, column; /* rows of the weight; the column of the output where they begin */
    const uint8_t *panels;
} part;

/* Several weights with the same inputs, side by side in one output. */
typedef struct {
    long in, out, count;
    long coded; /* packed parts take the activations as codes of 8 bits; else as they are */
    const float *bias;
    const part *parts;
} packed_linear;

/* 32 activations as codes: x = scale * code. */
typedef struct {
    float scale, sum; /* sum: of scale * code */
    int32_t first, second; /* sums of the codes of the two halves */
} group;

/* Rows as codes: [rows][in] and [rows][in / 32]. */
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
/* y[r] = x[r] times the weights, plus bias, plus add[r] where given. x: rows `stride` apart; c: the same rows as codes. */
void INTERNAL(onedraw_multiply)(worker *m, const packed_linear *p, const float *x, long stride, coded c, float *y, const float *add,
                                long rows);

#endif
