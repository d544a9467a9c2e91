/* Norms, rotary embedding and activations of one row. Each is one fixed sequence of operations, so a row has the same bits in
 * every batch. */

#ifndef ONEDRAW_ROWWISE_H
#define ONEDRAW_ROWWISE_H

#include "exponential.h"
#include "lanes.h"

INLINE float dot_product(const float *a, const float *b, long width) {
    floats sum = f_zero();
    long i = 0;
    for (; i + 16 <= width; i += 16) sum = fused(f_load(a + i), f_load(b + i), sum);
    float total = f_sum(sum);
    for (; i < width; i++) total += a[i] * b[i];
    return total;
}

/* RMSNorm of a row: y = x / rms(x) * weight, or x / rms(x) if `weight` is null. */
INLINE void norm_row(const float *x, const float *weight, float *y, long width, float eps) {
    float scale = 1.0f / sqrtf(dot_product(x, x, width) / (float)width + eps);
    if (weight)
        for (long i = 0; i < width; i++) y[i] = x[i] * scale * weight[i];
    else
        for (long i = 0; i < width; i++) y[i] = x[i] * scale;
}

/* Gated activation of a row [gate | up] of 2 * width floats: y = silu(gate) * up. */
INLINE void silu_gated_row(const float *x, float *y, long width) {
    const float *gate = x, *up = x + width;
    for (long i = 0; i < width; i++) y[i] = gate[i] / (1.0f + exponential(-gate[i])) * up[i];
}

INLINE void rotate_head(float *x, const float *cos_sin, long half_width) {
    const float *c = cos_sin, *s = cos_sin + half_width;
    for (long i = 0; i < half_width; i++) {
        float a = x[i], b = x[i + half_width];
        x[i] = a * c[i] - b * s[i];
        x[i + half_width] = b * c[i] + a * s[i];
    }
}

#endif
