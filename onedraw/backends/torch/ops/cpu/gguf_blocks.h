/* Weights as they are stored, in panels: the layout that gguf_blocks.c makes and packed_linear.c reads.
 *
 * A panel is 16 outputs (32 for plain numbers) and all of their inputs. Plain numbers lie as [in][32]. Packed ones keep
 * their bytes, put in another order: codes of all blocks, then high bits of all blocks, then scales of all blocks.
 *   codes   of 32 inputs: [4][16][4] bytes. Byte r of output n in row j: the low nibble belongs to input 4j + r, the high one
 *           to input 16 + 4j + r. Eight-bit codes: [8][16][4], row j holds inputs 4j … 4j + 3.
 *   high    fifth bits [16][4] bytes, bit g for input 4g + r; sixth and fifth bits [2][16][4], bits 2j of half h for input
 *           16h + 4j + r.
 *   scales  per 32 inputs a half per output, and a second half where a kind has minima. Per 256 inputs, for the K kinds: halves
 *           of scale and negated minimum, then [8][16] scales and [8][16] minima of 6 bits (Q6_K: a half, [16][16] scales).
 */

#ifndef ONEDRAW_GGUF_BLOCKS_H
#define ONEDRAW_GGUF_BLOCKS_H

#include "lanes.h"

enum { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30, KINDS = 31 };

#define GROUP 32 /* inputs that share a scale of the activations */
#define LANE 16  /* outputs of a packed panel */
#define WIDE 32  /* outputs of a plain panel, and of two packed ones: what a member claims */

INLINE int is_plain(const int kind) { return kind == F32 || kind == F16 || kind == BF16; }
INLINE int is_super(const int kind) { return kind == Q4_K || kind == Q5_K || kind == Q6_K; }
INLINE int has_min(const int kind) { return kind == Q4_1 || kind == Q5_1 || kind == Q4_K || kind == Q5_K; }
INLINE int centre(const int kind) { return kind == Q4_0 ? 8 : kind == Q5_0 ? 16 : kind == Q6_K ? 32 : 0; }
INLINE long code_bytes(const int kind) { return kind == Q8_0 ? 512 : 256; }
INLINE long high_bytes(const int kind) {
    return kind == Q5_0 || kind == Q5_1 || kind == Q5_K ? 64 : kind == Q6_K ? 128 : 0;
}
INLINE long scale_bytes(const int kind) { /* per 32 inputs, or per 256 of a K kind */
    return is_super(kind) ? (kind == Q6_K ? 288 : 320) : has_min(kind) ? 64 : 32;
}
INLINE long plain_bytes(const int kind) { return kind == F32 ? 4 : 2; }

INLINE long panel_bytes(const int kind, long in) {
    if (is_plain(kind)) return in * WIDE * plain_bytes(kind);
    long blocks = in / GROUP, scales = is_super(kind) ? blocks / 8 : blocks;
    return (blocks * (code_bytes(kind) + high_bytes(kind)) + scales * scale_bytes(kind) + 63) / 64 * 64;
}

/* Where the parts of a packed panel begin. */
typedef struct {
    const uint8_t *codes, *high, *scales;
} sections;

INLINE sections sections_of(const int kind, const uint8_t *panel, long in) {
    long blocks = in / GROUP;
    const uint8_t *high = panel + blocks * code_bytes(kind);
    return (sections){panel, high, high + blocks * high_bytes(kind)};
}

/* What 32 inputs of a panel share. Q6_K has a scale per 16: `scale` for the first half, `second` for the other. */
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

/* Codes of inputs 4g … 4g + 3 of block b, g < 8, as they are stored (from zero up, but for Q8_0). */
INLINE bytes codes_of(const int kind, sections s, long b, const int g) {
    if (kind == Q8_0) return b_load(s.codes + b * 512 + g * 64);
    bytes both = b_load(s.codes + b * 256 + g % 4 * 64), code = g < 4 ? b_low(both) : b_high(both);
    if (high_bytes(kind) == 64) return b_with(code, b_load(s.high + b * 64), 4 - g, 16);
    if (kind == Q6_K) return b_with(code, b_load(s.high + b * 128 + g / 4 * 64), 4 - g % 4 * 2, 48);
    return code;
}

#endif
