/* Reorders stored rows into panels once, when a model is loaded, and dequantizes rows of panels for embeddings and for products.
 * In: rows of blocks in GGUF's format. Out: the layout of gguf_blocks.h. The reference for the values is
 * onedraw/checkpoints/dequantize.py. A panel has all inputs of 16 or 32 outputs; a code is the stored integer of a weight. */

#include <stdlib.h>
#include <sys/mman.h>

#include "gguf_blocks.h"
#include "thread_pool.h"

typedef uint8_t sixteen __attribute__((vector_size(16)));
INLINE sixteen take(const uint8_t *p) { sixteen v; memcpy(&v, p, 16); return v; }
INLINE uint32_t four(const uint8_t *p) { uint32_t v; memcpy(&v, p, 4); return v; }

/* Stores 32 codes of 4 bits of output n: input i is in the low nibble of byte i, input 16 + i in its high one. */
INLINE void put_codes(uint8_t *codes, long n, sixteen packed) {
    uint32_t rows[4];
    memcpy(rows, &packed, 16);
    for (int j = 0; j < 4; j++) memcpy(codes + j * 64 + n * 4, rows + j, 4);
}

/* Stores the low or the high nibbles of 32 bytes, whose byte i belongs to input i, as the codes of output n. */
INLINE void put_nibbles(uint8_t *codes, long n, const uint8_t *at, int high) {
    sixteen first = take(at), second = take(at + 16);
    put_codes(codes, n, high ? first >> 4 | (second & 0xf0) : (first & 15) | second << 4);
}

/* Stores one bit of each of 32 inputs of output n: bit i of `bits` belongs to input i. */
INLINE void put_bits(uint8_t *high, long n, uint32_t bits) {
    for (int r = 0; r < 4; r++) {
        uint32_t x = bits >> r & 0x11111111u;
        x = (x | x >> 3) & 0x03030303u;
        x = (x | x >> 6) & 0x000f000fu;
        high[n * 4 + r] = (uint8_t)(x | x >> 12);
    }
}

/* Stores the codes of 32 inputs of output n. `block` is the stored block; for K types, `part` selects 32 of its 256 inputs. */
INLINE void put_group(const int kind, const uint8_t *block, int part, uint8_t *codes, uint8_t *high, long n) {
    switch (kind) {
    case Q8_0:
        for (int j = 0; j < 8; j++) memcpy(codes + j * 64 + n * 4, block + 2 + j * 4, 4);
        return;
    case Q4_0: put_codes(codes, n, take(block + 2)); return;
    case Q4_1: put_codes(codes, n, take(block + 4)); return;
    case Q5_0:
    case Q5_1: {
        const uint8_t *at = block + (kind == Q5_0 ? 2 : 4);
        put_codes(codes, n, take(at + 4));
        put_bits(high, n, at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24);
        return;
    }
    case Q4_K: put_nibbles(codes, n, block + 16 + part / 2 * 32, part % 2); return;
    case Q5_K: {
        put_nibbles(codes, n, block + 48 + part / 2 * 32, part % 2);
        uint32_t bits = 0;
        for (int g = 0; g < 8; g++) bits |= (four(block + 16 + 4 * g) >> part & 0x01010101u) << g;
        memcpy(high + n * 4, &bits, 4);
        return;
    }
    case Q6_K: {
        int quarter = part % 4;
        const uint8_t *top = block + 128 + part / 4 * 32;
        put_nibbles(codes, n, block + part / 4 * 64 + quarter % 2 * 32, quarter / 2);
        for (int h = 0; h < 2; h++) {
            uint32_t bits = 0;
            for (int j = 0; j < 4; j++) bits |= (four(top + 16 * h + 4 * j) >> 2 * quarter & 0x03030303u) << 2 * j;
            memcpy(high + h * 64 + n * 4, &bits, 4);
        }
        return;
    }
    }
}

/* Stores the scales of one stored block of output n, which has 32 inputs, or 256 for K types. */
INLINE void put_scales(const int kind, const uint8_t *block, uint8_t *scales, long n) {
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
    default: {
        memcpy(scales + n * 2, block, 2);
        memcpy(scales + 32 + n * 2, block + 2, 2);
        scales[32 + n * 2 + 1] ^= 0x80;  /* products add the minimum, while the format subtracts it */
        /* Twelve bytes have eight scales and eight minima of 6 bits: the first four of each as they are; of the last four, the
         * lower bits in the last four bytes and the upper two bits above the first four of each. */
        uint32_t a = four(block + 4), b = four(block + 8), c = four(block + 12);
        uint32_t six[4] = {a & 0x3f3f3f3fu, (c & 0x0f0f0f0fu) | (a >> 6 & 0x03030303u) << 4,
                           b & 0x3f3f3f3fu, (c >> 4 & 0x0f0f0f0fu) | (b >> 6 & 0x03030303u) << 4};
        uint8_t each[16];
        memcpy(each, six, 16);
        for (int i = 0; i < 16; i++) scales[64 + i * 16 + n] = each[i];
    }
    }
}

INLINE long block_bytes(const int kind) {
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

/* Reorders 16 stored rows into a panel, block by block. */
INLINE void put_panel(const packing *p, const int kind, long first, uint8_t *panel) {
    sections s = sections_of(kind, panel, p->in);
    uint8_t *codes = (uint8_t *)s.codes, *high = (uint8_t *)s.high, *scales = (uint8_t *)s.scales;
    const int parts = is_super(kind) ? 8 : 1;
    long count = p->in / GROUP / parts, size = block_bytes(kind), rows = p->rows - first < LANE ? p->rows - first : LANE;
    for (long i = 0; i < count; i++)
        for (long n = 0; n < rows; n++) {
            const uint8_t *block = p->stored + ((first + n) * count + i) * size;
            put_scales(kind, block, scales + i * scale_bytes(kind), n);
            for (int part = 0; part < parts; part++) {
                long b = i * parts + part;
                put_group(kind, block, part, codes + b * code_bytes(kind), high + b * high_bytes(kind), n);
            }
        }
}

#define PANEL(kind) \
    case kind: put_panel(p, kind, first, panel); return;
static void put_rows(const packing *p, long first, uint8_t *panel) {
    switch (p->kind) { PANEL(Q4_0) PANEL(Q4_1) PANEL(Q5_0) PANEL(Q5_1) PANEL(Q8_0) PANEL(Q4_K) PANEL(Q5_K) PANEL(Q6_K) }
}

static void put_plain(const packing *p, long first, uint8_t *panel) {
    long size = plain_bytes((int)p->kind);
    for (long k = 0; k < p->in; k++)
        for (long n = 0; n < WIDE && first + n < p->rows; n++)
            memcpy(panel + (k * WIDE + n) * size, p->stored + ((first + n) * p->in + k) * size, size);
}

#define MAPPED_BYTES (1 << 20) /* bytes of stored rows that are mapped at once */

/* Stored rows are mostly in a mapped file. Mapping many of its pages in one call takes a fraction of the time of a page fault for
 * every few of them. A system that cannot do it maps them as they are read. */
static void map_rows(const packing *p, long first, long rows) {
#ifdef MADV_POPULATE_READ
    long row = p->in / (is_plain((int)p->kind) ? 1 : GROUP * (is_super((int)p->kind) ? 8 : 1)) * block_bytes((int)p->kind);
    long last = first + rows < p->rows ? first + rows : p->rows;
    uintptr_t start = (uintptr_t)(p->stored + first * row) & ~(uintptr_t)4095, end = (uintptr_t)(p->stored + last * row);
    if (first < last) (void)madvise((void *)start, end - start, MADV_POPULATE_READ);
#else
    (void)p, (void)first, (void)rows;
#endif
}

static void pack(const void *arguments, worker *m) {
    const packing *p = arguments;
    long size = panel_bytes((int)p->kind, p->in), units = (p->height + WIDE - 1) / WIDE;
    int plain = is_plain((int)p->kind);
    long piece = MAPPED_BYTES / (size * (plain ? 1 : 2)), most = units / (m->count * 4L);
    piece = piece > most ? most : piece;
    piece = piece < 1 ? 1 : piece;
    PARALLEL_FOR(m, units, piece, u, {
        if (u % piece == 0) map_rows(p, u * WIDE, piece * WIDE);
        uint8_t *at = p->panels + u * (plain ? 1 : 2) * size;
        if (p->rows < (u + 1) * WIDE) memset(at, 0, (plain ? 1 : 2) * size);
        if (plain) put_plain(p, u * WIDE, at);
        else
            for (long half = 0; half < 2; half++) put_rows(p, u * WIDE + half * LANE, at + half * size);
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
