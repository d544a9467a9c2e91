/* Conversion of keys and values to and from the formats of KV pages: float32, bf16, f16, or codes with a scale per token and
 * head. Heads are converted one at a time. A code is a number of 8 or 4 bits that is multiplied by the scale. Before heads are
 * quantized to 4 bits, they are transformed (transform_head). The reference in plain torch is ../../state/kv_pages.py. */

#ifndef ONEDRAW_KV_QUANT_H
#define ONEDRAW_KV_QUANT_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "lanes.h"

enum { KV_F32, KV_BF16, KV_F16, KV_FP8, KV_INT8, KV_INT4 }; /* in the order of KV_DTYPES in fused_layers.py */

INLINE long kv_bits(long kind) { return kind == KV_F32 ? 32 : kind == KV_BF16 || kind == KV_F16 ? 16 : kind == KV_INT4 ? 4 : 8; }

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

/* The Walsh-Hadamard transform of a head in blocks of the largest power of two that divides dim, in place. `kept` is 1 for keys
 * and values, and 0 for queries and outputs of attention. The results are multiplied by a power of two. The product of that for
 * kept = 1 and that for kept = 0 is 1 / block, so a query times a key stays the same, and the transform of the output undoes that
 * of the values. */
INLINE void transform_head(float *x, long dim, int kept) {
    long block = dim & -dim, exponent = __builtin_ctzl((unsigned long)dim);
    for (long half = 1; half < block; half *= 2)
        for (long start = 0; start < dim; start += 2 * half)
            for (long d = start; d < start + half; d++) {
                float first = x[d], second = x[d + half];
                x[d] = first + second;
                x[d + half] = first - second;
            }
    float factor = 1.0f / (float)(1L << (exponent + kept) / 2);
    for (long d = 0; d < dim; d++) x[d] *= factor;
}

INLINE int head_is_finite(const float *x, long dim) {
    int finite = 1;
    for (long d = 0; d < dim; d++) finite &= (bits_of(x[d]) & 0x7fffffff) < 0x7f800000;
    return finite;
}

/* The 4-bit code of x / scale, limited to -15 ... 15: codes 0 ... 15 stand for the odd numbers -15 ... 15. */
INLINE uint8_t four_bits(float x, float scale) {
    float ratio = scale > 0.0f ? x / scale : 0.0f;
    ratio = ratio > 15.0f ? 15.0f : ratio < -15.0f ? -15.0f : ratio;
    return (uint8_t)rintf((ratio + 15.0f) * 0.5f);
}

/* Quantizes one head x to codes at offset `place` of the store; returns the scale. With 4 bits the largest ratio is 16.5, which
 * is limited to 15: that makes the errors of the other numbers smaller. */
INLINE float put_codes(const float *x, void *store, long kind, long place, long dim) {
    float largest = 0.0f, most = kind == KV_INT8 ? 127.0f : 448.0f;
    for (long d = 0; d < dim; d++) largest = fabsf(x[d]) > largest ? fabsf(x[d]) : largest;
    if (kind == KV_INT4) {
        float scale = largest / 16.5f;
        uint8_t *pairs = (uint8_t *)store + place / 2;
        for (long d = 0; d < dim; d += 2) pairs[d / 2] = (uint8_t)(four_bits(x[d], scale) | four_bits(x[d + 1], scale) << 4);
        return scale;
    }
    float scale = largest / most;
    for (long d = 0; d < dim; d++) {
        float ratio = scale > 0.0f ? x[d] / scale : 0.0f;
        ratio = ratio > most ? most : ratio < -most ? -most : ratio;
        if (kind == KV_INT8) ((int8_t *)store)[place + d] = (int8_t)rintf(ratio);
        else ((uint8_t *)store)[place + d] = float_to_fp8(ratio);
    }
    return scale;
}

/* Reads sixteen numbers, or one, at offset `at` of a store as floats; codes are not multiplied by their scale. */
INLINE floats get_numbers(const void *store, const long kind, long at) {
    switch (kind) {
        case KV_F32: return f_load((const float *)store + at);
        case KV_BF16: return f_bfloats((const uint16_t *)store + at);
        case KV_F16: return f_halves((const uint16_t *)store + at);
        case KV_INT8: return f_signed((const int8_t *)store + at);
    }
    if (kind == KV_INT4) {
        const uint8_t *pairs = (const uint8_t *)store + at / 2;
        int8_t codes[16];
        for (int i = 0; i < 8; i++) codes[2 * i] = (int8_t)(2 * (pairs[i] & 15) - 15);
        for (int i = 0; i < 8; i++) codes[2 * i + 1] = (int8_t)(2 * (pairs[i] >> 4) - 15);
        return f_signed(codes);
    }
    float x[16];
    for (int i = 0; i < 16; i++) x[i] = fp8_to_float(((const uint8_t *)store)[at + i]);
    return f_load(x);
}

INLINE float get_number(const void *store, const long kind, long at) {
    switch (kind) {
        case KV_F32: return ((const float *)store)[at];
        case KV_BF16: return bfloat_to_float(((const uint16_t *)store)[at]);
        case KV_F16: return half_to_float(((const uint16_t *)store)[at]);
        case KV_INT8: return ((const int8_t *)store)[at];
        case KV_INT4: return (float)(2 * (((const uint8_t *)store)[at / 2] >> 4 * (at % 2) & 15) - 15);
    }
    return fp8_to_float(((const uint8_t *)store)[at]);
}

/* Writes one head x at offset `place` of a store of floats, of 32 or 16 bits. Returns whether all of them are finite as stored. */
INLINE int put_numbers(const float *x, void *store, long kind, long place, long dim) {
    if (kind == KV_F32) {
        memcpy((float *)store + place, x, dim * sizeof(float));
        return head_is_finite(x, dim);
    }
    uint16_t *to = (uint16_t *)store + place;
    int infinite = kind == KV_F16 ? 0x7c00 : 0x7f80, finite = 1;
    for (long d = 0; d < dim; d++) to[d] = kind == KV_F16 ? float_to_half(x[d]) : float_to_bfloat(x[d]);
    for (long d = 0; d < dim; d++) finite &= (to[d] & infinite) != infinite;
    return finite;
}

#endif
