/* Conversion of keys and values to and from the formats of KV pages: float32, bf16, f16, or 8-bit codes with a scale per token
 * and head. Heads are converted one at a time. A code is an 8-bit number that is multiplied by the scale. The reference in
 * plain torch is ../../state/kv_pages.py. */

#ifndef ONEDRAW_KV_QUANT_H
#define ONEDRAW_KV_QUANT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

enum { KV_F32, KV_BF16, KV_F16, KV_FP8, KV_INT8 }; /* in the order of KV_DTYPES in fused_layers.py */

INLINE uint32_t bits_of(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE uint16_t float_to_bfloat(float x) {
    uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t float_to_half(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) return 0x7e00;
    if (rest >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    /* The result is a subnormal, which is a multiple of 2^-24. */
    if (rest < 0x38800000) return (uint16_t)(sign | (uint32_t)rintf(fabsf(x) * 16777216.0f));
    return (uint16_t)(sign | ((rest + 0xfff + (rest >> 13 & 1) - 0x38000000) >> 13));
}

/* Rounds x, |x| <= 448, to e4m3, with ties to the even code. */
INLINE uint8_t float_to_fp8(float x) {
    uint32_t bits = bits_of(x), sign = bits >> 24 & 0x80, rest = bits & 0x7fffffff;
    /* The result is a subnormal, which is a multiple of 2^-9. */
    if (rest < 0x3c800000) return (uint8_t)(sign | (uint32_t)rintf(fabsf(x) * 512.0f));
    return (uint8_t)(sign | ((rest + 0x7ffff + (rest >> 20 & 1) - 0x3c000000) >> 20));
}

/* The code's exponent and mantissa are shifted to where float32 has them; multiplying by 2^120 corrects the exponent bias. */
INLINE float fp8_to_float(uint8_t code) {
    uint32_t bits = (uint32_t)(code & 0x7f) << 20 | (uint32_t)(code & 0x80) << 24;
    float x;
    memcpy(&x, &bits, 4);
    return x * 0x1p120f;
}

INLINE int head_is_finite(const float *x, long dim) {
    int finite = 1;
    for (long d = 0; d < dim; d++) finite &= (bits_of(x[d]) & 0x7fffffff) < 0x7f800000;
    return finite;
}

/* Quantizes one head x to codes at offset `place` of the store; returns the scale. */
INLINE float put_codes(const float *x, void *store, long kind, long place, long dim) {
    float largest = 0.0f, most = kind == KV_INT8 ? 127.0f : 448.0f;
    for (long d = 0; d < dim; d++) largest = fabsf(x[d]) > largest ? fabsf(x[d]) : largest;
    float scale = largest / most;
    for (long d = 0; d < dim; d++) {
        float ratio = scale > 0.0f ? x[d] / scale : 0.0f;
        ratio = ratio > most ? most : ratio < -most ? -most : ratio;
        if (kind == KV_INT8) ((int8_t *)store)[place + d] = (int8_t)rintf(ratio);
        else ((uint8_t *)store)[place + d] = float_to_fp8(ratio);
    }
    return scale;
}

/* Reads one head of a page as floats; codes are not multiplied by their scale. */
INLINE void get_head(float *out, const void *store, long kind, long place, long dim) {
    long d = 0;
    if (kind == KV_INT8) {
        const int8_t *codes = (const int8_t *)store + place;
        for (; d + 16 <= dim; d += 16) f_store(out + d, f_signed(codes + d));
        for (; d < dim; d++) out[d] = (float)codes[d];
    } else if (kind == KV_FP8) {
        const uint8_t *codes = (const uint8_t *)store + place;
        for (; d < dim; d++) out[d] = fp8_to_float(codes[d]);
    } else {
        const uint16_t *numbers = (const uint16_t *)store + place;
        for (; d + 16 <= dim; d += 16) f_store(out + d, kind == KV_F16 ? f_halves(numbers + d) : f_bfloats(numbers + d));
        for (; d < dim; d++) out[d] = kind == KV_F16 ? half_to_float(numbers[d]) : bfloat_to_float(numbers[d]);
    }
}

#endif
