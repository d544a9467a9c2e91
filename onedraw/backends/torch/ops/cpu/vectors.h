/* Vectors of 16 floats for delta.c: load and store, the sum of one vector's floats in a fixed order, dot products; and silu. */

#ifndef ONEDRAW_VECTORS_H
#define ONEDRAW_VECTORS_H

#include "exponential.h"

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float half __attribute__((vector_size(32), aligned(4)));
typedef float quarter __attribute__((vector_size(16), aligned(4)));

static inline vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
static inline vec splat(float x) { return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* The sum of a vector's lanes, in a fixed order: halves are added first, then quarters, then pairs. */
static inline float lane_sum(vec v) {
    half a, b; quarter c, d;
    memcpy(&a, &v, 32); memcpy(&b, (char *)&v + 32, 32);
    a = a + b;
    memcpy(&c, &a, 16); memcpy(&d, (char *)&a + 16, 16);
    c = c + d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* The activation silu: x / (1 + e^-x). */
static inline float silu(float x) { return x / (1.0f + exponential(-x)); }

static float dot(const float *q, const float *k, long dim) {
    vec sum = splat(0.0f);
    long d = 0;
    for (; d + LANES <= dim; d += LANES) sum += load(q + d) * load(k + d);
    float total = lane_sum(sum);
    for (; d < dim; d++) total += q[d] * k[d];
    return total;
}

#endif
