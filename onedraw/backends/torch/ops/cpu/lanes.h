/* Vectors of sixteen floats, of sixteen 32-bit integers, and of sixteen times four bytes, with the same functions for every
 * instruction set. `fused` rounds once if the set has fused multiply-add (avx512, avx2), and twice if not. A lane is one
 * element of a vector. Names begin with the vector's type: f_ for floats, i_ for integers, b_ for bytes. A tile is the rows and
 * outputs computed together. */

#ifndef ONEDRAW_LANES_H
#define ONEDRAW_LANES_H

#include <stdint.h>
#include <string.h>

#include "cpu_features.h"

INLINE float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = (uint32_t)(h & 0x7fff) << 13, bits;
    if (rest >= 0x0f800000) bits = rest | 0x7f800000;  /* the number is infinite, or NaN */
    else if (rest >= 0x00800000) bits = rest + 0x38000000;
    else {  /* the number is zero, or subnormal */
        float small = (float)(h & 0x7fff) * 5.9604644775390625e-8f;
        memcpy(&bits, &small, 4);
    }
    bits |= sign;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

INLINE float bfloat_to_float(uint16_t b) {
    uint32_t bits = (uint32_t)b << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#include <immintrin.h>

#define MOST_ROWS 8   /* rows of a tile with activations as codes */
#define FLOAT_ROWS 12 /* rows of a tile with activations as floats */
#define QUERY_ROWS 6    /* rows of a piece of attention's products */
#define QUERY_VECTORS 4 /* columns of such a piece, in vectors of 16 */
/* b_lift adds 2^CODE_LIFT to signed codes, because the dot instruction takes unsigned ones; the sum is corrected for it. */
#define CODE_LIFT 7
typedef __m512 floats;
typedef __m512i ints;
typedef __m512i bytes;

INLINE floats f_zero(void) { return _mm512_setzero_ps(); }
INLINE floats f_splat(float x) { return _mm512_set1_ps(x); }
INLINE floats f_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void f_store(float *p, floats x) { _mm512_storeu_ps(p, x); }
INLINE floats f_add(floats a, floats b) { return _mm512_add_ps(a, b); }
INLINE floats f_sub(floats a, floats b) { return _mm512_sub_ps(a, b); }
INLINE floats f_mul(floats a, floats b) { return _mm512_mul_ps(a, b); }
INLINE floats fused(floats a, floats b, floats c) { return _mm512_fmadd_ps(a, b, c); }
/* The sum of the lanes, in a fixed order: halves are added first, then quarters, then pairs. */
INLINE float f_sum(floats x) {
    __m256 y = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
/* f_sums: the sums of the lanes of 16 vectors, each in the order of f_sum. f_fold is one level of it, for two vectors. */
INLINE floats f_fold(floats a, floats b, __m512i low, __m512i high) {
    return _mm512_add_ps(_mm512_permutex2var_ps(a, low, b), _mm512_permutex2var_ps(a, high, b));
}
INLINE floats f_sums(const floats *x) {
    const __m512i low8 = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
    const __m512i low4 = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    const __m512i low2 = _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29);
    const __m512i low1 = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    floats y[8];
    for (int i = 0; i < 8; i++) y[i] = f_fold(x[2 * i], x[2 * i + 1], low8, _mm512_add_epi32(low8, _mm512_set1_epi32(8)));
    for (int i = 0; i < 4; i++) y[i] = f_fold(y[2 * i], y[2 * i + 1], low4, _mm512_add_epi32(low4, _mm512_set1_epi32(4)));
    for (int i = 0; i < 2; i++) y[i] = f_fold(y[2 * i], y[2 * i + 1], low2, _mm512_add_epi32(low2, _mm512_set1_epi32(2)));
    return f_fold(y[0], y[1], low1, _mm512_add_epi32(low1, _mm512_set1_epi32(1)));
}
/* The larger number of each lane; y's if x's is NaN. */
INLINE floats f_max(floats x, floats y) { return _mm512_max_ps(x, y); }
INLINE float f_most(floats x) { return _mm512_reduce_max_ps(x); }
/* Lane j of vector i becomes lane i of vector j. */
INLINE void f_transpose(floats *x) {
    floats y[16];
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {  /* the lanes 4 * k + 2 * j, and the next ones, of four vectors */
            __m512d low = _mm512_castps_pd(y[i + j]), high = _mm512_castps_pd(y[i + j + 2]);
            x[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(low, high));
            x[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 4; i++) {
        floats a = _mm512_shuffle_f32x4(x[i], x[4 + i], 0x88), b = _mm512_shuffle_f32x4(x[i], x[4 + i], 0xdd);
        floats c = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0x88), d = _mm512_shuffle_f32x4(x[8 + i], x[12 + i], 0xdd);
        y[i] = _mm512_shuffle_f32x4(a, c, 0x88);
        y[4 + i] = _mm512_shuffle_f32x4(b, d, 0x88);
        y[8 + i] = _mm512_shuffle_f32x4(a, c, 0xdd);
        y[12 + i] = _mm512_shuffle_f32x4(b, d, 0xdd);
    }
    for (int i = 0; i < 16; i++) x[i] = y[i];
}
INLINE floats f_halves(const void *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(p)); }
INLINE floats f_bfloats(const void *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE floats f_unsigned(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(p))); }
INLINE floats f_signed(const void *p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p))); }
INLINE ints i_splat(int32_t x) { return _mm512_set1_epi32(x); }
/* sum - number * 2^bits */
INLINE ints i_less(ints sum, int32_t number, const int bits) {
    return _mm512_sub_epi32(sum, _mm512_slli_epi32(_mm512_set1_epi32(number), bits));
}
INLINE floats i_floats(ints x) { return _mm512_cvtepi32_ps(x); }
INLINE bytes b_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE bytes b_low(bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
INLINE bytes b_high(bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
INLINE bytes b_lift(bytes x) { return _mm512_xor_si512(x, _mm512_set1_epi8((char)0x80)); }
/* Byte r of every lane, as a float. */
INLINE floats b_number(bytes x, const int r) {
    return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srli_epi32(x, 8 * r), _mm512_set1_epi32(255)));
}
INLINE floats b_signed(bytes x, const int r) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24 - 8 * r), 24));
}
/* Adds high bits to codes: x | (bits << left & mask), where a negative `left` shifts to the right. */
INLINE bytes b_with(bytes x, bytes bits, const int left, const int mask) {
    bytes moved = left >= 0 ? _mm512_slli_epi16(bits, left >= 0 ? left : 0) : _mm512_srli_epi16(bits, left < 0 ? -left : 0);
    return _mm512_or_si512(x, _mm512_and_si512(moved, _mm512_set1_epi8((char)mask)));
}
/* dot adds, in every lane, the products of its four codes with the four signed bytes at `four` to `dots`, and i_collect adds
 * `dots` to a sum in 32 bits. The numbers of `dots` may have only 16 bits, enough for eight steps with codes up to 15, four with
 * codes up to 31, and two with codes up to 63. dot_lifted takes codes that b_lift returned, and adds to a sum itself. */
INLINE ints dot(ints dots, bytes codes, const int8_t *four) {
    int32_t x;
    memcpy(&x, four, 4);
    return _mm512_dpbusd_epi32(dots, codes, _mm512_set1_epi32(x));
}
INLINE ints i_collect(ints sum, ints dots) { return _mm512_add_epi32(sum, dots); }
INLINE ints dot_lifted(ints sum, bytes codes, const int8_t *four) { return dot(sum, codes, four); }

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include <immintrin.h>

#define MOST_ROWS 4
#define FLOAT_ROWS 3
#define QUERY_ROWS 6
#define QUERY_VECTORS 1
#define CODE_LIFT 0
typedef struct { __m256 a, b; } floats;
typedef struct { __m256i a, b; } ints;
typedef struct { __m256i a, b; } bytes;
#define BOTH(type, one) ((type){one(x.a), one(x.b)})

INLINE floats f_splat(float x) { __m256 v = _mm256_set1_ps(x); return (floats){v, v}; }
INLINE floats f_zero(void) { return f_splat(0.0f); }
INLINE floats f_load(const float *p) { return (floats){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
INLINE void f_store(float *p, floats x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
INLINE floats f_add(floats x, floats y) { return (floats){_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE floats f_sub(floats x, floats y) { return (floats){_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE floats f_mul(floats x, floats y) { return (floats){_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE floats fused(floats x, floats y, floats z) {
    return (floats){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE float f_sum(floats x) {
    __m256 y = _mm256_add_ps(x.a, x.b);
    __m128 z = _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1));
    z = _mm_add_ps(z, _mm_movehl_ps(z, z));
    return _mm_cvtss_f32(_mm_add_ss(z, _mm_movehdup_ps(z)));
}
INLINE floats f_max(floats x, floats y) { return (floats){_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE void f_transpose8(__m256 *x) {
    __m256 y[8];
    for (int i = 0; i < 8; i += 2) {
        y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
        y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            __m256d low = _mm256_castps_pd(y[i + j]), high = _mm256_castps_pd(y[i + j + 2]);
            x[i + 2 * j] = _mm256_castpd_ps(_mm256_unpacklo_pd(low, high));
            x[i + 2 * j + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(low, high));
        }
    for (int i = 0; i < 4; i++) {
        y[i] = _mm256_permute2f128_ps(x[i], x[4 + i], 0x20);
        y[4 + i] = _mm256_permute2f128_ps(x[i], x[4 + i], 0x31);
    }
    for (int i = 0; i < 8; i++) x[i] = y[i];
}
INLINE void f_transpose(floats *x) {
    __m256 parts[4][8];  /* the rows 0 to 7, then 8 to 15; of each, the lanes 0 to 7, then 8 to 15 */
    for (int i = 0; i < 16; i++) parts[i / 8 * 2][i % 8] = x[i].a, parts[i / 8 * 2 + 1][i % 8] = x[i].b;
    for (int i = 0; i < 4; i++) f_transpose8(parts[i]);
    for (int i = 0; i < 16; i++) x[i] = (floats){parts[i / 8][i % 8], parts[2 + i / 8][i % 8]};
}
INLINE floats f_halves(const void *p) {
    const char *c = p;
    return (floats){_mm256_cvtph_ps(_mm_loadu_si128((const void *)c)), _mm256_cvtph_ps(_mm_loadu_si128((const void *)(c + 16)))};
}
INLINE floats f_bfloats(const void *p) {
    const char *c = p;
    __m256i a = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)c)), b = _mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)(c + 16)));
    return (floats){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
}
INLINE floats f_unsigned(const void *p) {
    __m128i v = _mm_loadu_si128(p);
    __m256i a = _mm256_cvtepu8_epi32(v), b = _mm256_cvtepu8_epi32(_mm_srli_si128(v, 8));
    return (floats){_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
}
INLINE floats f_signed(const void *p) {
    __m128i v = _mm_loadu_si128(p);
    __m256i a = _mm256_cvtepi8_epi32(v), b = _mm256_cvtepi8_epi32(_mm_srli_si128(v, 8));
    return (floats){_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
}
INLINE ints i_splat(int32_t x) { __m256i v = _mm256_set1_epi32(x); return (ints){v, v}; }
INLINE ints i_less(ints sum, int32_t number, const int bits) {
    __m256i v = _mm256_slli_epi32(_mm256_set1_epi32(number), bits);
    return (ints){_mm256_sub_epi32(sum.a, v), _mm256_sub_epi32(sum.b, v)};
}
INLINE floats i_floats(ints x) { return BOTH(floats, _mm256_cvtepi32_ps); }
INLINE bytes b_load(const void *p) {
    const char *c = p;
    return (bytes){_mm256_loadu_si256((const void *)c), _mm256_loadu_si256((const void *)(c + 32))};
}
INLINE __m256i b_mask(__m256i x, int mask) { return _mm256_and_si256(x, _mm256_set1_epi8((char)mask)); }
INLINE bytes b_low(bytes x) { return (bytes){b_mask(x.a, 15), b_mask(x.b, 15)}; }
INLINE bytes b_high(bytes x) {
    return (bytes){b_mask(_mm256_srli_epi16(x.a, 4), 15), b_mask(_mm256_srli_epi16(x.b, 4), 15)};
}
INLINE bytes b_lift(bytes x) { return x; }
INLINE __m256 b_number1(__m256i x, const int r) {
    return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srli_epi32(x, 8 * r), _mm256_set1_epi32(255)));
}
INLINE __m256 b_signed1(__m256i x, const int r) { return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, 24 - 8 * r), 24)); }
INLINE floats b_number(bytes x, const int r) { return (floats){b_number1(x.a, r), b_number1(x.b, r)}; }
INLINE floats b_signed(bytes x, const int r) { return (floats){b_signed1(x.a, r), b_signed1(x.b, r)}; }
INLINE __m256i b_moved(__m256i bits, const int left) {
    return left >= 0 ? _mm256_slli_epi16(bits, left >= 0 ? left : 0) : _mm256_srli_epi16(bits, left < 0 ? -left : 0);
}
INLINE bytes b_with(bytes x, bytes bits, const int left, const int mask) {
    return (bytes){_mm256_or_si256(x.a, b_mask(b_moved(bits.a, left), mask)),
                   _mm256_or_si256(x.b, b_mask(b_moved(bits.b, left), mask))};
}
/* maddubs adds two products in 16 bits, and `dots` are such sums. dot_lifted takes signed codes: it multiplies their magnitudes
 * with the bytes at `four`, negated where the code is negative. */
INLINE ints dot(ints dots, bytes codes, const int8_t *four) {
    int32_t x;
    memcpy(&x, four, 4);
    __m256i v = _mm256_set1_epi32(x);
    return (ints){_mm256_add_epi16(dots.a, _mm256_maddubs_epi16(codes.a, v)),
                  _mm256_add_epi16(dots.b, _mm256_maddubs_epi16(codes.b, v))};
}
INLINE ints i_collect(ints sum, ints dots) {
    __m256i one = _mm256_set1_epi16(1);
    return (ints){_mm256_add_epi32(sum.a, _mm256_madd_epi16(dots.a, one)),
                  _mm256_add_epi32(sum.b, _mm256_madd_epi16(dots.b, one))};
}
INLINE __m256i sized(__m256i codes, __m256i v) { return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(v, codes)); }
INLINE ints dot_lifted(ints sum, bytes codes, const int8_t *four) {
    int32_t x;
    memcpy(&x, four, 4);
    __m256i v = _mm256_set1_epi32(x), one = _mm256_set1_epi16(1);
    return (ints){_mm256_add_epi32(sum.a, _mm256_madd_epi16(sized(codes.a, v), one)),
                  _mm256_add_epi32(sum.b, _mm256_madd_epi16(sized(codes.b, v), one))};
}

#else

#define MOST_ROWS 2
#define FLOAT_ROWS 3
#define QUERY_ROWS 3
#define QUERY_VECTORS 1
#define CODE_LIFT 0
typedef float floats __attribute__((vector_size(64)));
typedef int32_t ints __attribute__((vector_size(64)));
typedef int16_t shorts __attribute__((vector_size(64)));
typedef uint16_t words __attribute__((vector_size(64)));
typedef uint8_t bytes __attribute__((vector_size(64)));
typedef uint16_t words16 __attribute__((vector_size(32)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));
typedef int8_t signed16 __attribute__((vector_size(16)));
#define LOADED(type, p) type v; memcpy(&v, p, sizeof v)

INLINE floats f_zero(void) { return (floats){0}; }
INLINE floats f_splat(float x) { return x - f_zero(); }  /* a subtraction, because adding 0 would turn -0 into 0 */
INLINE ints i_splat(int32_t x) { return x - (ints){0}; }
INLINE ints i_less(ints sum, int32_t number, const int bits) { return sum - i_splat(number * (1 << bits)); }
INLINE ints i_collect(ints sum, ints dots) { return sum + dots; }
INLINE floats f_load(const float *p) { LOADED(floats, p); return v; }
INLINE void f_store(float *p, floats x) { memcpy(p, &x, 64); }
INLINE floats f_add(floats x, floats y) { return x + y; }
INLINE floats f_sub(floats x, floats y) { return x - y; }
INLINE floats f_mul(floats x, floats y) { return x * y; }
#ifdef __FP_FAST_FMAF
INLINE floats fused(floats x, floats y, floats z) {
    for (int i = 0; i < 16; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
    return z;
}
#else
INLINE floats fused(floats x, floats y, floats z) { return x * y + z; }
#endif
INLINE float f_sum(floats x) {
    float v[16];
    memcpy(v, &x, 64);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}
INLINE floats f_max(floats x, floats y) {
    ints above = x > y;
    return (floats)(((ints)x & above) | ((ints)y & ~above));
}
typedef float floats4 __attribute__((vector_size(16)));
INLINE void f_transpose(floats *x) {
    floats4 from[16][4], to[16][4];
    memcpy(from, x, sizeof from);
    for (int i = 0; i < 16; i += 4)  /* four vectors by four lanes at a time */
        for (int j = 0; j < 4; j++) {
            floats4 a = __builtin_shufflevector(from[i][j], from[i + 1][j], 0, 4, 1, 5);
            floats4 b = __builtin_shufflevector(from[i + 2][j], from[i + 3][j], 0, 4, 1, 5);
            floats4 c = __builtin_shufflevector(from[i][j], from[i + 1][j], 2, 6, 3, 7);
            floats4 d = __builtin_shufflevector(from[i + 2][j], from[i + 3][j], 2, 6, 3, 7);
            to[4 * j][i / 4] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
            to[4 * j + 1][i / 4] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
            to[4 * j + 2][i / 4] = __builtin_shufflevector(c, d, 0, 1, 4, 5);
            to[4 * j + 3][i / 4] = __builtin_shufflevector(c, d, 2, 3, 6, 7);
        }
    memcpy(x, to, sizeof to);
}
INLINE floats i_floats(ints x) { return __builtin_convertvector(x, floats); }
/* The same conversion as half_to_float. It is not inlined, because compilers vectorize its loops only then. */
static __attribute__((noinline, unused)) void halves_to_floats(const void *p, float *out) {
    uint16_t h[16];
    uint32_t bits[16];
    memcpy(h, p, 32);
    for (int i = 0; i < 16; i++) bits[i] = (uint32_t)(h[i] & 0x7fff) << 13;
    memcpy(out, bits, 64);
    for (int i = 0; i < 16; i++) out[i] *= 0x1p112f;
    memcpy(bits, out, 64);
    for (int i = 0; i < 16; i++) bits[i] |= ((h[i] & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u) | (uint32_t)(h[i] & 0x8000) << 16;
    memcpy(out, bits, 64);
}
INLINE floats f_halves(const void *p) {
    float out[16];
    halves_to_floats(p, out);
    return f_load(out);
}
INLINE floats f_bfloats(const void *p) { LOADED(words16, p); return (floats)(__builtin_convertvector(v, ints) << 16); }
INLINE floats f_unsigned(const void *p) { LOADED(bytes16, p); return __builtin_convertvector(v, floats); }
INLINE floats f_signed(const void *p) { LOADED(signed16, p); return __builtin_convertvector(v, floats); }
INLINE bytes b_load(const void *p) { LOADED(bytes, p); return v; }
INLINE bytes b_low(bytes x) { return x & 15; }
INLINE bytes b_high(bytes x) { return x >> 4; }
INLINE bytes b_lift(bytes x) { return x; }
INLINE floats b_number(bytes x, const int r) { return i_floats((ints)x >> 8 * r & 255); }
INLINE floats b_signed(bytes x, const int r) { return i_floats((ints)x << (24 - 8 * r) >> 24); }
INLINE bytes b_with(bytes x, bytes bits, const int left, const int mask) {
    bytes moved = left >= 0 ? bits << (left >= 0 ? left : 0) : bits >> (left < 0 ? -left : 0);
    return x | (moved & (uint8_t)mask);
}
/* Adds, in every lane, the products of its four codes with the four signed bytes at `x` to the sum. `even` has codes 0 and 2
 * of the lane as 16-bit numbers, `odd` has codes 1 and 3; the sum of two products fits into 16 bits. */
INLINE ints dot_pairs(ints sum, shorts even, shorts odd, const int8_t *x) {
    int32_t a = (uint16_t)x[0] | (int32_t)x[2] * 65536, b = (uint16_t)x[1] | (int32_t)x[3] * 65536;
    ints both = (ints)(even * (shorts)i_splat(a) + odd * (shorts)i_splat(b));
    return sum + (both << 16 >> 16) + (both >> 16);
}
INLINE ints dot(ints sum, bytes c, const int8_t *x) { return dot_pairs(sum, (shorts)c & 255, (shorts)((words)c >> 8), x); }
INLINE ints dot_lifted(ints sum, bytes c, const int8_t *x) { return dot_pairs(sum, (shorts)c << 8 >> 8, (shorts)c >> 8, x); }

#endif

#ifndef __AVX512VNNI__
INLINE float f_most(floats x) {
    float v[16], most;
    f_store(v, x);
    most = v[0];
    for (int i = 1; i < 16; i++) most = v[i] > most ? v[i] : most;
    return most;
}
INLINE floats f_sums(const floats *x) {
    float out[16];
    for (int i = 0; i < 16; i++) out[i] = f_sum(x[i]);
    return f_load(out);
}
#endif
#endif
