/* The layout of weights in panels, which gguf_blocks.c writes and packed_linear.c reads.
 *
 * A panel has all inputs of 16 outputs, or of 32 outputs for float types (F32, F16, BF16), which are stored as [in][32].
 * Panels of quantized types have the stored bits in another order: the codes of all blocks, then the high bits of all blocks,
 * then the scales of all blocks. A block is 32 inputs here, also for K types, whose stored blocks have 256.
 *   codes   of a block: [4][16][4] bytes. Byte r of output n in row j has input 4j + r in its low nibble and input 16 + 4j + r in
 *           its high nibble. Eight-bit codes: [8][16][4] bytes, row j has inputs 4j … 4j + 3.
 *   high    of a block: fifth bits [16][4] bytes, where bit g of byte r belongs to input 4g + r; for Q6_K the two upper bits
 *           [2][16][4] bytes, where bits 2j of byte r in half h belong to input 16h + 4j + r.
 *   scales  per 32 inputs a float16 per output, and then a float16 minimum per output if the type has minima. K types, per 256
 *           inputs: float16 scales and negated float16 scales of minima, then [8][16] scales and [8][16] minima of 6 bits in a
 *           byte each. Q6_K, per 256 inputs: float16 scales, then [16][16] 8-bit scales.
 */

#ifndef ONEDRAW_GGUF_BLOCKS_H
#define ONEDRAW_GGUF_BLOCKS_H

#include "lanes.h"

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30, KINDS = 31 };

#define GROUP 32 /* inputs of a block, and activations that share a scale */
#define LANE 16  /* outputs of a panel of a quantized type */
#define WIDE 32  /* outputs of a panel of a float type, and of two quantized panels: the unit of work of a thread */

INLINE int is_plain(const int kind) { return kind == F32 || kind == F16 || kind == BF16; }
INLINE int is_super(const int kind) { return kind == Q4_K || kind == Q5_K || kind == Q6_K; }
INLINE int has_min(const int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K; }
INLINE int centre(const int kind) { return kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == Q6_K ? 32 : 0; }
INLINE long code_bytes(const int kind) { return kind == Q8_0 ? 512 : 256; }
INLINE long high_bytes(const int kind) {
    return kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 64 : kind == Q6_K ? 128 : 0;
}
INLINE long scale_bytes(const int kind) {  /* bytes of scales per 32 inputs, or per 256 inputs of a K type */
    return is_super(kind) ? (kind == Q6_K ? 288 : 320) : has_min(kind) ? 64 : 32;
}
/* Bytes of a quantized panel per block of 32 inputs, rounded up. */
INLINE long block_share(const int kind) {
    return code_bytes(kind) + high_bytes(kind) + (is_super(kind) ? (scale_bytes(kind) + 7) / 8 : scale_bytes(kind));
}
INLINE long plain_bytes(const int kind) { return kind == F32 ? 4 : 2; }

INLINE long panel_bytes(const int kind, long in) {
    if (is_plain(kind)) return in * WIDE * plain_bytes(kind);
    long blocks = in / GROUP, scales = is_super(kind) ? blocks / 8 : blocks;
    return (blocks * (code_bytes(kind) + high_bytes(kind)) + scales * scale_bytes(kind) + 63) / 64 * 64;
}

/* The start of each section of a quantized panel. */
typedef struct {
    const uint8_t *codes, *high, *scales;
} sections;

INLINE sections sections_of(const int kind, const uint8_t *panel, long in) {
    long blocks = in / GROUP;
    const uint8_t *high = panel + blocks * code_bytes(kind);
    return (sections){panel, high, high + blocks * high_bytes(kind)};
}

/* Scales and minima of 32 inputs of a panel, for 16 outputs. Q6_K has a scale per 16 inputs: `second` is that of the latter
 * 16. */
typedef struct {
    floats scale, second, min;
} shared;

INLINE shared shared_of(const int kind, sections s, long b) {
    shared out = {f_zero(), f_zero(), f_zero()};
    if (!is_super(kind)) {
        const uint8_t *at = s.scales + b * scale_bytes(kind);
        out.scale = f_halves(at);
        if (has_min(kind)) out.min = f_halves(at + 32);
        return out;
    }
    const uint8_t *at = s.scales + b / 8 * scale_bytes(kind);
    floats whole = f_halves(at);
    if (kind == Q6_K) {
        out.scale = f_mul(whole, f_signed(at + 32 + b % 8 * 32));
        out.second = f_mul(whole, f_signed(at + 48 + b % 8 * 32));
        return out;
    }
    out.scale = f_mul(whole, f_unsigned(at + 64 + b % 8 * 16));
    out.min = f_mul(f_halves(at + 32), f_unsigned(at + 192 + b % 8 * 16));
    return out;
}

/* Codes of inputs 4g … 4g + 3 of block b, g < 8, as stored: unsigned, except for Q8_0. */
INLINE bytes codes_of(const int kind, sections s, long b, const int g) {
    if (kind == Q8_0) return b_load(s.codes + b * 512 + g * 64);
    bytes both = b_load(s.codes + b * 256 + g % 4 * 64), code = g < 4 ? b_low(both) : b_high(both);
    if (high_bytes(kind) == 64) return b_with(code, b_load(s.high + b * 64), 4 - g, 16);
    if (kind == Q6_K) return b_with(code, b_load(s.high + b * 128 + g / 4 * 64), 4 - g % 4 * 2, 48);
    return code;
}

#endif
