/* Norms, rope and activations of one row, each one fixed sequence of operations. */

#ifndef ONEDRAW_ROWWISE_H
#define ONEDRAW_ROWWISE_H

#include <math.h>

#include "lanes.h"

/* exp, for -87 <= x <= 88 and constant beyond: 2^n times a polynomial on [-ln2/2, ln2/2], n within a float's exponent. */
INLINE float exponential(float x) {
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
    int32_t whole = n == n ? (int32_t)n : 0; /* what is no number stays none through p */
    int32_t bits = (int32_t)((uint32_t)(whole + 127) << 23);
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

INLINE float dot_product(const float *a, const float *b, long width) {
    floats sum = f_zero();
    long i = 0;
    for (; i + 16 <= width; i += 16) sum = fused(f_load(a + i), f_load(b + i), sum);
    float total = f_sum(sum);
    for (; i < width; i++) total += a[i] * b[i];
    return total;
}

/* y = x / rms(x) * weight; without a weight, x / rms(x). */
INLINE void norm_row(const float *x, const float *weight, float *y, long width, float eps) {
    float scale = 1.0f / sqrtf(dot_product(x, x, width) / (float)width + eps);
    if (weight)
        for (long i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
    else
        for (long i = 0; i < width; i++) y[i] = x[i] * scale;
}

/* y = silu(gate) * up for a row [gate | up] of 2 * width. */
INLINE void silu_gated_row(const float *x, float *y, long width) {
    const float *gate = x, *up = x + width;
    for (long i = 0; i < width; i++) y[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

INLINE void turn_head(float *x, const float *cos_sin, long half_width) {
    const float *c = cos_sin, *s = cos_sin + half_width;
    for (long i = 0; i < half_width; i++) {
        float a = x[i], b = x[i + half_width];
        x[i] = a * c[i] - b * s[i];
        x[i + half_width] = b * c[i] + a * s[i];
    }
}

#endif
