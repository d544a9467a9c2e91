/* What the kernels share: vectors of 16 floats, their sum in one order, and exp as one sequence of operations. */

#ifndef ONEDRAW_VECTORS_H
#define ONEDRAW_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4)));
typedef float half __attribute__((vector_size(32), aligned(4)));
typedef float quarter __attribute__((vector_size(16), aligned(4)));

static inline vec load(const float *p) { vec v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, vec v) { memcpy(p, &v, sizeof v); }
static inline vec splat(float x) { return (vec){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

/* The sum of a vector's lanes: halves, quarters, pairs. */
static inline float lane_sum(vec v) {
    half a, b; quarter c, d;
    memcpy(&a, &v, 32); memcpy(&b, (char *)&v + 32, 32);
    a = a + b;
    memcpy(&c, &a, 16); memcpy(&d, (char *)&a + 16, 16);
    c = c + d;
    return (c[0] + c[2]) + (c[1] + c[3]);
}

/* exp, for -87 <= x <= 88 and constant beyond: 2^n times a polynomial on [-ln2/2, ln2/2], n within a float's exponent. */
static inline float exponential(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 88.0f ? 88.0f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } scale = {((int32_t)n + 127) << 23};
    return p * scale.f;
}

/* x / (1 + e^-x) */
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
