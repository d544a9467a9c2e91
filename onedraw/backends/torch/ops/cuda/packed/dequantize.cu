// Dequantizes packed weights: to float16 with separate scales, for products of many rows, or to the stored values, for row
// lookup.
//
// In: units in the layout of tensor_core_layout.py, of the quantization type KIND. Out: `DequantizedWeight` of activations.py, or
// rows of values. In the layout, lane 4 g + t of a warp holds outputs g and g + 8 (h = 0, 1) of a unit; a step is sixteen inputs.

#include "weight_units.cuh"

// ------------------------------------------------------------------ float16 weights and scales

struct DequantizeArguments {
    const byte *units;
    halfword *weights;   // [count, spans * 256] float16: W of activations.py
    float *scales;       // [spans, stride], or [spans * 8, stride]: output index innermost
    halfword *minima;    // [count, spans, 8] float16, for K types with minima
    float *min_scales;   // scales of the minima [spans, stride], or minima [spans * 8, stride]
    // first: unit of the first output; count: outputs; stride: elements between rows of `scales`
    int first, count, spans, stride;
};

#define DEQUANTIZE_WARPS 4
#define DEQUANTIZE_ROW (SPAN + 8)

extern "C" __global__ void __launch_bounds__(DEQUANTIZE_WARPS * 32) dequantize(const __grid_constant__ DequantizeArguments p) {
    __shared__ __align__(16) halfword tile[DEQUANTIZE_WARPS][16 * DEQUANTIZE_ROW];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    const long long which = (long long)blockIdx.x * DEQUANTIZE_WARPS + warp;
    const int unit_index = (int)(which / p.spans), span = (int)(which - (long long)unit_index * p.spans);
    if (unit_index * 16 >= p.count) return;
    Unit unit;
    load_unit(unit, p.units + ((long long)(p.first + unit_index) * p.spans + span) * UNIT_BYTES, lane, true);
    Scales scales;
    unpack_scales(scales, unit);
    word *own = (word *)tile[warp];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        word a[4];
        select_scales(scales, i);
        dequantize_step(a, unit, scales, i);
#pragma unroll
        for (int j = 0; j < 4; j++) own[(g + 8 * (j & 1)) * (DEQUANTIZE_ROW / 2) + i * 8 + (j >> 1) * 4 + t] = a[j];
    }
    __syncwarp();
    for (int row = 0; row < 16; row++) {
        const long long output = (long long)unit_index * 16 + row;
        if (output < p.count)
            ((uint4 *)(p.weights + (output * p.spans + span) * SPAN))[lane] = ((const uint4 *)(tile[warp] + row * DEQUANTIZE_ROW))[lane];
    }
    const word factors = SIX_BIT_SCALES ? minima_scales(unit, lane) : 0;
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const long long output = (long long)unit_index * 16 + g + 8 * h;
        if (output >= p.count) continue;
        const long long at = output * p.spans + span;
        if (SPAN_SCALE) {
            const long long beside = (long long)span * p.stride + output;
            if (t == 0) p.scales[beside] = __fmul_rn(span_scale(unit, h), subnormal_inverse(h));
            if (SIX_BIT_SCALES) {
                ((word *)(p.minima + at * 8))[t] = minima_pair(unit, h);
                if (t == 0) p.min_scales[beside] = __fmul_rn(half_to_float(h ? factors >> 16 : factors & 0xFFFFu), subnormal_inverse(h));
            }
        } else {
#pragma unroll
            for (int block = 0; block < 8; block++)
                if (t == (block & 3)) {
                    const long long beside = ((long long)span * 8 + block) * p.stride + output;
                    p.scales[beside] = block_scale(unit, block, h);
                    if (MINIMA) p.min_scales[beside] = block_minimum(unit, block, h);
                }
        }
    }
}

// ------------------------------------------------------------------ rows of a weight as stored values

struct DequantizeRowsArguments {
    const byte *units;
    const long long *wanted;  // row numbers to read, or null for all rows in order
    void *out;                // [count, width]: the values of the wanted rows
    int count, spans, width, dtype;  // dtype of `out`: 0 float16, 1 bfloat16, 2 float32
};

#define ROW_WARPS 4

// One warp dequantizes one span of one row, and each lane eight inputs. The order of operations is that of the type's definition,
// so the values have the same bits as those of a reference implementation.
extern "C" __global__ void __launch_bounds__(ROW_WARPS * 32) dequantize_rows(const __grid_constant__ DequantizeRowsArguments p) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const long long which = (long long)blockIdx.x * ROW_WARPS + warp;
    const int place = (int)(which / p.spans), span = (int)(which - (long long)place * p.spans);
    if (place >= p.count) return;
    const long long row = p.wanted ? p.wanted[place] : place;
    const int h = (int)(row >> 3) & 1, g = (int)row & 7;
    const byte *unit = p.units + ((row >> 4) * p.spans + span) * UNIT_BYTES;
    const byte *high = unit + CODE_BYTES, *scales = high + HIGH_BYTES, *extra = scales + SCALE_BYTES;
    const int i = lane >> 1, u = lane & 1, block = lane >> 2;
    const byte *own = scales + g * (16 * SCALE_LOADS) + h * (8 * SCALE_LOADS);
    float scale, min_scales = 0.0f;
    if (SIX_BIT_SCALES) {
        const byte *of_pair = scales + g * 16, *of_lane = extra + 16 * g + 4 * (block >> 1);
        const word low = of_pair[4 * h + (block & 3)];
        const word small = block < 4 ? low & 63 : (low >> 6 << 4) | ((of_pair[8 + (block & 3)] >> (4 * h)) & 15);
        scale = __fmul_rn(half_to_float(*(const halfword *)(of_pair + 12 + 2 * h)), (float)small);
        const word minimum = (*(const halfword *)(of_lane + 2 * (block & 1)) >> (6 * h)) & 63;
        word factor = 0;
        for (int b = 0; b < 2; b++) {
            const byte *part = extra + 16 * g + 4 * (2 * h + b);
            factor |= (word)((part[1] >> 4) | (part[3] & 0xF0)) << (8 * b);
        }
        min_scales = __fmul_rn(half_to_float(factor), (float)minimum);
    } else if (KIND == Q6_K) {
        scale = __fmul_rn(half_to_float(*(const halfword *)(extra + 4 * g + 2 * h)), (float)(signed char)own[i]);
    } else if (KIND == NVFP4) {
        scale = __fmul_rn(half_to_float((word)own[i] << 7), 128.0f);
    } else if (KIND == MXFP4) {
        scale = power_of_two(own[block]);
    } else if (MINIMA) {
        scale = half_to_float(((const halfword *)own)[2 * block]);
        min_scales = half_to_float(((const halfword *)own)[2 * block + 1]);
    } else {
        scale = half_to_float(((const halfword *)own)[block]);
    }
    for (int t = 0; t < 4; t++)
        for (int e = 0; e < 2; e++) {
            const int of_lane = 4 * g + t;
            float value;
            if (KIND == Q8_0) {
                value = (float)(signed char)unit[(i >> 1) * 512 + of_lane * 16 + (i & 1) * 8 + u * 4 + e + 2 * h];
            } else {
                const word half = *(const halfword *)(unit + (i >> 2) * 512 + of_lane * 16 + (i & 3) * 4 + 2 * e);
                if (FP4) {
                    const int j = 2 * u + h;
                    const int sign = (half >> (j == 0 ? 13 : j == 1 ? 14 : j == 2 ? 12 : 15)) & 1;
                    const int size = (half >> (3 * j)) & 7;
                    const int twice = size < 4 ? size : size == 4 ? 4 : size == 5 ? 6 : size == 6 ? 8 : 12;
                    value = sign ? -(float)twice : (float)twice;
                } else {
                    word code = (half >> (8 * u + 4 * h)) & 15;
                    if (FIFTH_BIT) {
                        const byte bits = high[of_lane * 16 + (i >> 2) * 4 + 2 * e + ((i & 3) >> 1)];
                        code |= ((bits >> (2 * (i & 1) + u + 4 * h)) & 1) << 4;
                    }
                    if (KIND == Q6_K) {
                        const byte bits = high[(i >> 3) * 512 + of_lane * 16 + ((i >> 1) & 3) * 4 + 2 * e + (i & 1)];
                        code |= ((bits >> (2 * u + 4 * h)) & 3) << 4;
                    }
                    value = (float)((int)code - (KIND == Q4_0 ? 8 : KIND == Q5_0 ? 16 : KIND == Q6_K ? 32 : 0));
                }
            }
            value = __fmul_rn(value, scale);
            if (KIND == NVFP4) value = __fmul_rn(value, *(const float *)(extra + 8 * g + 4 * h));
            if (SIX_BIT_SCALES) value = __fsub_rn(value, min_scales);
            if (MINIMA) value = __fadd_rn(value, min_scales);
            const int input = span * SPAN + i * 16 + u * 8 + 2 * t + e;
            if (input < p.width) {
                const long long to = (long long)place * p.width + input;
                if (p.dtype == 2) {
                    ((float *)p.out)[to] = value;
                } else {
                    write_number((halfword *)p.out + to, value, p.dtype);
                }
            }
        }
}
