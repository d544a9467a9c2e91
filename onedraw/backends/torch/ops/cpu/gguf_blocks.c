/* Reorders stored rows into panels once, when a model is loaded, and dequantizes rows of panels for embeddings and for products.
 * In: rows of blocks in GGUF's format. Out: the layout of gguf_blocks.h. The reference for the values is
 * onedraw/checkpoints/dequantize.py. A panel has all inputs of 16 or 32 outputs; a code is the stored integer of a weight. */

#include <stdlib.h>

#include "gguf_blocks.h"
#include "thread_pool.h"

static inline uint64_t eight(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }
#define LOW 0x0f0f0f0f0f0f0f0full

/* Stores 32 codes of 4 bits of output n. `packed` has 16 bytes: input i in the low nibble of byte i, input 16 + i in its high
 * one. */
static void put_codes(uint8_t *codes, long n, const uint8_t *packed) {
    for (long j = 0; j < 4; j++) memcpy(codes + j * 64 + n * 4, packed + j * 4, 4);
}

/* Stores one bit of each of 32 inputs of output n: bit i of `bits` belongs to input i. */
static void put_bits(uint8_t *high, long n, uint32_t bits) {
    for (int r = 0; r < 4; r++) {
        uint32_t x = bits >> r & 0x11111111u;
        x = (x | x >> 3) & 0x03030303u;
        x = (x | x >> 6) & 0x000f000fu;
        high[n * 4 + r] = (uint8_t)(x | x >> 12);
    }
}

/* Stores the codes of 32 inputs of output n. `block` is the stored block; for K types, `part` selects 32 of its 256 inputs. */
static void put_group(const int kind, const uint8_t *block, long part, uint8_t *codes, uint8_t *high, long n) {
    uint8_t made[16];
    switch (kind) {
    case Q8_0:
        for (long j = 0; j < 8; j++) memcpy(codes + j * 64 + n * 4, block + 2 + j * 4, 4);
        return;
    case Q4_0: put_codes(codes, n, block + 2); return;
    case Q4_1: put_codes(codes, n, block + 4); return;
    case Q5_0:
    case Q5_1: {
        const uint8_t *at = block + (kind == Q5_0 ? 2 : 4);
        put_codes(codes, n, at + 4);
        put_bits(high, n, at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24);
        return;
    }
    case Q4_K:
    case Q5_K: {
        const uint8_t *at = block + (kind == Q4_K ? 16 : 48) + part / 2 * 32;
        for (int i = 0; i < 2; i++) {
            uint64_t a = eight(at + i * 8), b = eight(at + 16 + i * 8);
            uint64_t both = part % 2 ? (a >> 4 & LOW) | (b & ~LOW) : (a & LOW) | (b & LOW) << 4;
            memcpy(made + i * 8, &both, 8);
        }
        put_codes(codes, n, made);
        if (kind == Q5_K) {
            uint32_t bits = 0;
            for (int i = 0; i < 32; i++) bits |= (uint32_t)(block[16 + i] >> part & 1) << i;
            put_bits(high, n, bits);
        }
        return;
    }
    case Q6_K: {
        long half = part / 4, quarter = part % 4;
        const uint8_t *low = block + half * 64 + quarter % 2 * 32, *top = block + 128 + half * 32;
        for (int i = 0; i < 2; i++) {
            uint64_t a = eight(low + i * 8), b = eight(low + 16 + i * 8);
            uint64_t both = quarter / 2 ? (a >> 4 & LOW) | (b & ~LOW) : (a & LOW) | (b & LOW) << 4;
            memcpy(made + i * 8, &both, 8);
        }
        put_codes(codes, n, made);
        for (int h = 0; h < 2; h++)
            for (int r = 0; r < 4; r++) {
                uint8_t bits = 0;
                for (int j = 0; j < 4; j++) bits |= (uint8_t)((top[16 * h + 4 * j + r] >> 2 * quarter & 3) << 2 * j);
                high[h * 64 + n * 4 + r] = bits;
            }
        return;
    }
    }
}

/* Stores the scales of one stored block of output n, which has 32 inputs, or 256 for K types. */
static void put_scales(const int kind, const uint8_t *block, uint8_t *scales, long n) {
    switch (kind) {
    case Q4_1:
    case Q5_1:
        memcpy(scales + 32 + n * 2, block + 2, 2); /* fall through */
    case Q4_0:
    case Q5_0:
    case Q8_0: memcpy(scales + n * 2, block, 2); return;
    case Q6_K:
        memcpy(scales + n * 2, block + 208, 2);
        for (int i = 0; i < 16; i++) scales[32 + i * 16 + n] = block[192 + i];
        return;
    default:
        memcpy(scales + n * 2, block, 2);
        memcpy(scales + 32 + n * 2, block + 2, 2);
        scales[32 + n * 2 + 1] ^= 0x80;  /* products add the minimum, while the format subtracts it */
        for (int i = 0; i < 8; i++) {
            const uint8_t *six = block + 4;
            scales[64 + i * 16 + n] = i < 4 ? six[i] & 63 : (six[i + 4] & 15) | six[i - 4] >> 6 << 4;
            scales[192 + i * 16 + n] = i < 4 ? six[i + 4] & 63 : six[i + 4] >> 4 | six[i] >> 6 << 4;
        }
    }
}

static long block_bytes(const int kind) {
    switch (kind) {
    case Q4_0: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q8_0: return 34;
    case Q4_K: return 144;
    case Q5_K: return 176;
    case Q6_K: return 210;
    default: return plain_bytes(kind);
    }
}

typedef struct {
    const uint8_t *stored;
    uint8_t *panels;
    long kind, rows, in;  /* kind: the ggml type; rows: stored rows; in: inputs of a row */
    long height;  /* rows of all panels together; rows that are not stored are zero */
} packing;

static void put_panel(const packing *p, const int kind, long first, uint8_t *panel) {
    sections s = sections_of(kind, panel, p->in);
    uint8_t *codes = (uint8_t *)s.codes, *high = (uint8_t *)s.high, *scales = (uint8_t *)s.scales;
    long per = is_super(kind) ? 256 : GROUP, width = p->in / per * block_bytes(kind), parts = per / GROUP;
    for (long n = 0; n < LANE && first + n < p->rows; n++)
        for (long i = 0; i < p->in / per; i++) {
            const uint8_t *block = p->stored + (first + n) * width + i * block_bytes(kind);
            put_scales(kind, block, scales + i * scale_bytes(kind), n);
            for (long part = 0; part < parts; part++) {
                long b = i * parts + part;
                put_group(kind, block, part, codes + b * code_bytes(kind), high + b * high_bytes(kind), n);
            }
        }
}

static void put_plain(const packing *p, long first, uint8_t *panel) {
    long size = plain_bytes((int)p->kind);
    for (long k = 0; k < p->in; k++)
        for (long n = 0; n < WIDE && first + n < p->rows; n++)
            memcpy(panel + (k * WIDE + n) * size, p->stored + ((first + n) * p->in + k) * size, size);
}

static void pack(const void *arguments, worker *m) {
    const packing *p = arguments;
    long size = panel_bytes((int)p->kind, p->in), units = (p->height + WIDE - 1) / WIDE;
    int plain = is_plain((int)p->kind);
    PARALLEL_FOR(m, units, 1, u, {
        uint8_t *at = p->panels + u * (plain ? 1 : 2) * size;
        memset(at, 0, (plain ? 1 : 2) * size);
        if (plain) put_plain(p, u * WIDE, at);
        else
            for (long half = 0; half < 2; half++) put_panel(p, (int)p->kind, u * WIDE + half * LANE, at + half * size);
    });
}

/* Bytes of the panels of `rows` outputs with `in` inputs. */
long EXPORT(onedraw_packed_bytes)(long kind, long rows, long in) {
    return (rows + WIDE - 1) / WIDE * panel_bytes((int)kind, in) * (is_plain((int)kind) ? 1 : 2);
}

/* Reorders stored rows [rows][in] into panels with `height` rows in all, aligned to 64 bytes. */
void EXPORT(onedraw_pack)(const uint8_t *stored, uint8_t *panels, long kind, long rows, long in, long height, thread_pool *t) {
    packing p = {stored, panels, kind, rows, in, height};
    onedraw_pool_run(t, pack, &p, 0);
}

/* ------------------------------------------------------------------ rows */

/* Block b of a packed panel as floats [32 inputs][16 outputs], rounded as checkpoints/dequantize.py rounds. */
INLINE void dequantize_block(const int kind, sections s, long b, float *out) {
    shared common = shared_of(kind, s, b);
    floats middle = f_splat((float)centre(kind));
    for (int g = 0; g < 8; g++) {
        bytes codes = codes_of(kind, s, b, g);
        floats scale = kind == Q6_K && g >= 4 ? common.second : common.scale;
#define ONE(r)                                                                                                      \
    {                                                                                                               \
        floats w = kind == Q8_0 ? b_signed(codes, r) : f_sub(b_number(codes, r), middle);                            \
        w = f_mul(w, scale);                                                                                        \
        f_store(out + (4 * g + r) * LANE, has_min(kind) ? f_add(w, common.min) : w);                                 \
    }
        ONE(0) ONE(1) ONE(2) ONE(3)
#undef ONE
    }
}

#define NUMBERS(kind)                                                                                               \
    case kind: dequantize_block(kind, sections_of(kind, panel, in), b, out); return;

/* The floats of 32 inputs of a packed panel; products with float activations call this as well. */
void INTERNAL(onedraw_dequantize)(long kind, const uint8_t *panel, long in, long b, float *out) {
    switch (kind) {
        NUMBERS(Q4_0) NUMBERS(Q4_1) NUMBERS(Q5_0) NUMBERS(Q5_1) NUMBERS(Q8_0) NUMBERS(Q4_K) NUMBERS(Q5_K) NUMBERS(Q6_K)
    }
}

typedef struct {
    const uint8_t *panels;
    const int64_t *wanted;
    float *out;
    long kind, in, count;
} lookup;

static void look_up(const void *arguments, worker *m) {
    const lookup *l = arguments;
    int kind = (int)l->kind;
    long size = panel_bytes(kind, l->in);
    PARALLEL_FOR(m, l->count, 4, i, {
        long row = l->wanted[i];
        float *out = l->out + i * l->in;
        if (is_plain(kind)) {
            const uint8_t *at = l->panels + row / WIDE * size + row % WIDE * plain_bytes(kind);
            for (long k = 0; k < l->in; k++) {
                const uint8_t *one = at + k * WIDE * plain_bytes(kind);
                uint16_t narrow;
                if (kind == F32) { memcpy(out + k, one, 4); continue; }
                memcpy(&narrow, one, 2);
                out[k] = kind == F16 ? half_to_float(narrow) : bfloat_to_float(narrow);
            }
        } else {
            float block[GROUP * LANE];
            for (long b = 0; b < l->in / GROUP; b++) {
                INTERNAL(onedraw_dequantize)(kind, l->panels + row / LANE * size, l->in, b, block);
                for (long k = 0; k < GROUP; k++) out[b * GROUP + k] = block[k * LANE + row % LANE];
            }
        }
    });
}

/* Dequantizes the rows numbered in `wanted` from panels, for embeddings: out [count][in]. */
void EXPORT(onedraw_rows)(const uint8_t *panels, long kind, long in, const int64_t *wanted, long count, float *out, thread_pool *t) {
    lookup l = {panels, wanted, out, kind, in, count};
    onedraw_pool_run(t, look_up, &l, count < 16);
}
