/* exp as one fixed sequence of operations, so that a number has the same bits in every position of a vector and with any vector
 * width. */

#ifndef ONEDRAW_EXPONENTIAL_H
#define ONEDRAW_EXPONENTIAL_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "cpu_features.h"

/* exp(x) for -87 <= x <= 88, constant beyond: 2^n times a polynomial on [-ln2/2, ln2/2]. n stays within a float's exponent. */
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
    int32_t whole = n == n ? (int32_t)n : 0;  /* a NaN has n = NaN, which must not be converted; p carries the NaN */
    int32_t bits = (int32_t)((uint32_t)(whole + 127) << 23);
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

#endif
