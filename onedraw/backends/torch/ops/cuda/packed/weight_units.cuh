// Dequantizes units of packed weights, sixteen outputs by 256 inputs, in the registers of a warp.
//
// In: units in the layout of tensor_core_layout.py. KIND is the quantization type as a ggml type number. Out: float16 weights of
// a step of sixteen inputs as the A fragment of mma.m16n8k16, exact or rounded once as activations.py defines, and the scales and
// minima of a span (256 inputs) or a block (32 inputs). With g = lane / 4 and t = lane % 4, a lane holds weights of outputs g and
// g + 8. Tests run this code on a CPU with the section of PTX instructions replaced (tests/backends/torch/emulated.h).

#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define MXFP4 39
#define NVFP4 40

#define FIFTH_BIT (KIND == Q5_0 || KIND == Q5_1 || KIND == Q5_K)
#define SIX_BIT_SCALES (KIND == Q4_K || KIND == Q5_K)
#define FP4 (KIND == MXFP4 || KIND == NVFP4)  // codes are e2m1 floats: a sign bit, two exponent bits and a mantissa bit
#define SPAN_SCALE (SIX_BIT_SCALES || KIND == Q6_K || KIND == NVFP4)  // a float scale per span, integer scales within it
#define MINIMA (KIND == Q4_1 || KIND == Q5_1)  // the type has a float16 minimum per block
// Codes are used as the low mantissa bits of a subnormal float16, so weights are multiples of 2^-24 (outputs g) or 2^-20 (outputs
// g + 8).
#define SUBNORMAL (SIX_BIT_SCALES || KIND == Q6_K)

typedef unsigned int word;
typedef unsigned short halfword;
typedef unsigned char byte;

// Sizes of the sections of a unit. A load is sixteen bytes per lane for codes and high bits, and sixteen bytes per g for scales.
#define CODE_LOADS (KIND == Q8_0 ? 8 : 4)
#define HIGH_LOADS (FIFTH_BIT ? 1 : KIND == Q6_K ? 2 : 0)
#define SCALE_LOADS (SIX_BIT_SCALES || KIND == MXFP4 ? 1 : MINIMA ? 4 : 2)
#define CODE_BYTES (CODE_LOADS * 512)
#define HIGH_BYTES (HIGH_LOADS * 512)
#define SCALE_BYTES (SCALE_LOADS * 128)
#define EXTRA_BYTES (SIX_BIT_SCALES ? 128 : KIND == NVFP4 ? 64 : KIND == Q6_K ? 32 : 0)
#define UNIT_BYTES (CODE_BYTES + HIGH_BYTES + SCALE_BYTES + EXTRA_BYTES)
#define SPAN 256   // inputs of a span
#define SEGMENT 4  // spans of a segment

// ------------------------------------------------------------------ PTX instructions

// Loads without allocating in L1, for data that is read once. If `more` is false, nothing is loaded and the register is
// undefined.
__device__ __forceinline__ void load_streaming(uint4 &v, const byte *at, bool more) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %5, 0; @p ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];}"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at), "r"((int)more));
}

__device__ __forceinline__ void load_streaming(word &v, const byte *at, bool more) {
    asm volatile("{.reg .pred p; setp.ne.s32 p, %2, 0; @p ld.global.nc.L1::no_allocate.u32 %0, [%1];}"
                 : "=r"(v) : "l"(at), "r"((int)more));
}

__device__ __forceinline__ word and_or(word a, word mask, word c) {  // computes (a & mask) | c in one instruction
    word v;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(v) : "r"(a), "r"(mask), "r"(c));
    return v;
}

__device__ __forceinline__ word mul2(word a, word b) {
    word v;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

__device__ __forceinline__ word fma2(word a, word b, word c) {
    word v;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
    return v;
}

// Broadcasts one half of a word to both halves. It costs nothing: f16x2 instructions can select a half of each operand.
template <int HALF> __device__ __forceinline__ word both(word a) {
    word v;
    if (HALF) {
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high};}" : "=r"(v) : "r"(a));
    } else {
        asm("{.reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low};}" : "=r"(v) : "r"(a));
    }
    return v;
}

__device__ __forceinline__ word add2(word a, word b) {
    word v;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
}

__device__ __forceinline__ word permute(word a, word b, word selector) {
    word v;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
    return v;
}

__device__ __forceinline__ float half_to_float(word bits) {
    float v;
    asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "r"(bits));
    return v;
}

__device__ __forceinline__ float rounded_to(float value, int bf16) {  // rounds to the output dtype and widens to float again
    float v;
    if (bf16) {
        asm("{.reg .b16 h; .reg .b32 w; cvt.rn.bf16.f32 h, %1; mov.b32 w, {0, h}; mov.b32 %0, w;}" : "=f"(v) : "f"(value));
    } else {
        asm("{.reg .b16 h; cvt.rn.f16.f32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(v) : "f"(value));
    }
    return v;
}

__device__ __forceinline__ float read_number(const halfword *at, int bf16) {  // bypasses L1, which may hold stale data
    const word bits = __ldcg(at);
    return bf16 ? __uint_as_float(bits << 16) : half_to_float(bits);
}

__device__ __forceinline__ void write_number(halfword *at, float value, int bf16) {
    halfword v;
    if (bf16) {
        asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(value));
    } else {
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(value));
    }
    *at = v;
}

// Tensor-core product of one step: sums [16 outputs, 8 rows] += a [16, 16 inputs] * b [16 inputs, 8].
__device__ __forceinline__ void mma(float (&sums)[4], const word (&a)[4], word b0, word b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void ldmatrix_x4(word (&v)[4], word at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at));
}

__device__ __forceinline__ void ldmatrix_x2(word &v0, word &v1, word at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(v0), "=r"(v1) : "r"(at));
}

// Returns the same value, opaque to the compiler, so that it stays in a register and constants added to it become immediate
// address offsets.
__device__ __forceinline__ word opaque(word v) {
    asm volatile("mov.b32 %0, %0;" : "+r"(v));
    return v;
}

__device__ __forceinline__ void copy_async_16(word to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from));
}

__device__ __forceinline__ void copy_async_4(word to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}

// An mbarrier in shared memory that completes when `count` threads have arrived; a thread arrives when its asynchronous copies
// finish.
__device__ __forceinline__ void init_barrier(word at, int count) { asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory"); }

__device__ __forceinline__ void arrive_after_copies(word at) { asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at) : "memory"); }

__device__ __forceinline__ void wait_barrier(word at) {
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared.b64 p, [%0], 0; @!p bra again; }" ::"r"(at) : "memory");
#else
    asm volatile("{ .reg .pred p; again: mbarrier.test_wait.parity.shared.b64 p, [%0], 0; @!p bra again; }" ::"r"(at) : "memory");
#endif
}

// Programmatic dependent launch. wait_previous_grid waits until the preceding grid has finished and its writes are visible;
// launch_dependents lets the next grid start.
__device__ __forceinline__ void wait_previous_grid() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Increments a counter in global memory with acquire and release semantics: writes before it are visible to threads that
// increment the counter later. Returns the old value.
__device__ __forceinline__ int atomic_increment(int *counter) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(__cvta_generic_to_global(counter)) : "memory");
    return before;
}

// Increments a counter in shared memory with acquire and release semantics among the threads of a block. Returns the old value.
__device__ __forceinline__ int atomic_increment_shared(word counter) {
    int before;
    asm volatile("atom.acq_rel.cta.shared.add.s32 %0, [%1], 1;" : "=r"(before) : "r"(counter) : "memory");
    return before;
}

// Relaxed loads and stores at device scope, for polling data that another block writes.
__device__ __forceinline__ uint4 load_relaxed(const float4 *at) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(__cvta_generic_to_global(at)) : "memory");
    return v;
}

__device__ __forceinline__ void store_relaxed(float4 *at, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(at)), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}

__device__ __forceinline__ word &component(uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

__device__ __forceinline__ word component(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// ------------------------------------------------------------------ a unit in the registers of a warp

// Integers are converted to float16 without conversion instructions. MAGIC is 1024 and TOP_MAGIC 64 in both halves of a word. An
// integer placed in the low mantissa bits of float16 1024, or from bit 4 on in float16 64, is thereby added to that number;
// adding -1024 or -64 gives the integer as float16.
#define MAGIC 0x64006400u
#define TOP_MAGIC 0x54005400u
#define MINUS_1024 0xE400E400u
#define MINUS_1152 0xE480E480u  // also subtracts the 128 that XOR with 0x80 adds to a signed byte
#define MINUS_64 0xD400D400u
#define SUBNORMAL_MINUS_32 0x82008020u  // -32 · 2^-24 in the lower half, -32 · 2^-20 in the upper half

// The high byte of float16 1024, four times. It is in constant memory so that the compiler does not know its value: if it did, it
// would choose permute instructions whose selectors take registers.
__constant__ word sixty_fours = 0x64646464u;

struct Unit {
    uint4 codes[CODE_LOADS];
    uint4 high[HIGH_LOADS > 0 ? HIGH_LOADS : 1];
    uint4 scales[SCALE_LOADS];
    word extra;
#if KIND == NVFP4
    word second;
#endif
};

__device__ __forceinline__ void load_codes(Unit &unit, const byte *at, int lane, int which, bool more) {
    load_streaming(unit.codes[which], at + which * 512 + lane * 16, more);
}

__device__ __forceinline__ void load_high(Unit &unit, const byte *at, int lane, int which, bool more) {
    load_streaming(unit.high[which], at + CODE_BYTES + which * 512 + lane * 16, more);
}

__device__ __forceinline__ void load_scales(Unit &unit, const byte *at, int lane, bool more) {
    const byte *scales = at + CODE_BYTES + HIGH_BYTES;
#pragma unroll
    for (int i = 0; i < SCALE_LOADS; i++) load_streaming(unit.scales[i], scales + (lane >> 2) * (16 * SCALE_LOADS) + i * 16, more);
    if (SIX_BIT_SCALES) load_streaming(unit.extra, scales + SCALE_BYTES + lane * 4, more);
    if (KIND == Q6_K) load_streaming(unit.extra, scales + SCALE_BYTES + (lane >> 2) * 4, more);
#if KIND == NVFP4
    load_streaming(unit.extra, scales + SCALE_BYTES + (lane >> 2) * 8, more);
    load_streaming(unit.second, scales + SCALE_BYTES + (lane >> 2) * 8 + 4, more);
#endif
}

__device__ __forceinline__ void load_unit(Unit &unit, const byte *at, int lane, bool more) {
#pragma unroll
    for (int i = 0; i < CODE_LOADS; i++) load_codes(unit, at, lane, i, more);
#pragma unroll
    for (int i = 0; i < HIGH_LOADS; i++) load_high(unit, at, lane, i, more);
    load_scales(unit, at, lane, more);
}

// The integer scales of outputs g (lower half of a word) and g + 8 (upper half), prepared for multiplication with codes.
struct Scales {
    word magic;
    word pairs[8];  // K types and NVFP4: bytes of outputs g and g + 8 interleaved, two of each in a word
    word factor, zero;  // factor: scales of the current step as float16; zero: value of code 0 (Q6_K)
};

__device__ __forceinline__ void pair_up(word (&pairs)[8], int i, word first, word second) {
    pairs[2 * i] = permute(first, second, 0x5140u);
    pairs[2 * i + 1] = permute(first, second, 0x7362u);
}

__device__ __forceinline__ void unpack_scales(Scales &scales, const Unit &unit) {
    scales.magic = sixty_fours;
    if (SIX_BIT_SCALES) {
        const uint4 s = unit.scales[0];
        pair_up(scales.pairs, 0, s.x & 0x3F3F3F3Fu, s.y & 0x3F3F3F3Fu);
        const word first = and_or(s.z, 0x0F0F0F0Fu, (s.x >> 2) & 0x30303030u);
        pair_up(scales.pairs, 1, first, and_or(s.z >> 4, 0x0F0F0F0Fu, (s.y >> 2) & 0x30303030u));
    }
    if (KIND == Q6_K || KIND == NVFP4) {
        const word sign = KIND == Q6_K ? 0x80808080u : 0;
#pragma unroll
        for (int i = 0; i < 4; i++)
            pair_up(scales.pairs, i, component(unit.scales[0], i) ^ sign, component(unit.scales[1 % SCALE_LOADS], i) ^ sign);
    }
}

// Integer scale `which` of both outputs as float16. The byte is inserted into float16 1024, and `off` is added to remove that
// offset.
__device__ __forceinline__ word integer_scales(const Scales &scales, int which, word off) {
    return add2(permute(scales.pairs[which >> 1], scales.magic, which & 1 ? 0x4342u : 0x4140u), off);
}

// Selects the integer scales of step i, for types that have them.
__device__ __forceinline__ void select_scales(Scales &scales, int i) {
    if (SIX_BIT_SCALES && i % 2 == 0) scales.factor = integer_scales(scales, i / 2, MINUS_1024);
    if (KIND == Q6_K) {
        scales.factor = integer_scales(scales, i, MINUS_1152);
        scales.zero = mul2(scales.factor, SUBNORMAL_MINUS_32);
    }
    if (KIND == NVFP4) {  // shifts e4m3 into the bits of float16 and corrects the exponent bias, times 1/2 for the doubled codes
        const word times = 0x58005800u;
        scales.factor = mul2(permute(scales.pairs[i >> 1], 0, i & 1 ? 0x3424u : 0x1404u) >> 1, times);
    }
}

// Constants added to 1024 + code and to 64 + code, which remove that offset and the zero point of the type, for types without
// integer scales
#define OFF_1024 (KIND == Q4_0 ? 0xE408E408u : KIND == Q5_0 ? 0xE410E410u : MINUS_1024)
#define OFF_64 (KIND == Q4_0 ? 0xD480D480u : KIND == Q5_0 ? 0xD500D500u : MINUS_64)

// The float16 weights of step i of sixteen inputs: a[0] and a[2] of output g, a[1] and a[3] of output g + 8
__device__ __forceinline__ void dequantize_step(word (&a)[4], const Unit &unit, const Scales &scales, int i) {
    if (KIND == Q8_0) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const word w = component(unit.codes[i / 2], 2 * (i & 1) + u) ^ 0x80808080u;
            a[2 * u] = add2(permute(w, scales.magic, 0x4140u), MINUS_1152);
            a[2 * u + 1] = add2(permute(w, scales.magic, 0x4342u), MINUS_1152);
        }
        return;
    }
    const word w = component(unit.codes[i / 4], i & 3);
    if (FP4) {  // shifts e2m1 into the bits of float16 and corrects the exponent bias, times 2 as in ggml, which halves scales
        const word times = 0x78007800u;
        a[0] = mul2(and_or(w << 9, 0x0E000E00u, (w << 2) & 0x80008000u), times);
        a[1] = mul2(and_or(w << 6, 0x0E000E00u, (w << 1) & 0x80008000u), times);
        a[2] = mul2((w << 3) & 0x8E008E00u, times);
        a[3] = mul2(w & 0x8E008E00u, times);
        if (KIND == NVFP4) {
#pragma unroll
            for (int u = 0; u < 2; u++) {
                a[2 * u] = mul2(a[2 * u], both<0>(scales.factor));
                a[2 * u + 1] = mul2(a[2 * u + 1], both<1>(scales.factor));
            }
        }
        return;
    }
#pragma unroll
    for (int u = 0; u < 2; u++) {
        const word own = u ? w >> 8 : w;
        word low = and_or(own, 0x000F000Fu, SUBNORMAL ? 0 : MAGIC);  // code · 2^-24, or 1024 + code
        word top = and_or(own, 0x00F000F0u, SUBNORMAL ? 0 : TOP_MAGIC);  // code · 2^-20, or 64 + code
        if (FIFTH_BIT) {
            const word high = component(unit.high[0], i / 4);
            const int place = 2 * (i & 3) + u;
            const word moved = place < 4 ? high << (4 - place) : high >> place;
            low = and_or(moved, 0x00100010u, low);
            top = and_or(moved, 0x01000100u, top);
        }
        if (KIND == Q6_K) {
            const word high = component(unit.high[i / 8], (i / 2) & 3);
            const int place = 2 * (i & 1) + u;
            const word moved = place == 0 ? high << 4 : place == 1 ? high << 2 : place == 2 ? high >> 4 : high >> 6;
            low = and_or(moved, 0x00300030u, low);
            top = and_or(moved, 0x03000300u, top);
        }
        if (SIX_BIT_SCALES) {
            a[2 * u] = mul2(low, both<0>(scales.factor));
            a[2 * u + 1] = mul2(top, both<1>(scales.factor));
        } else if (KIND == Q6_K) {
            a[2 * u] = fma2(low, both<0>(scales.factor), both<0>(scales.zero));
            a[2 * u + 1] = fma2(top, both<1>(scales.factor), both<1>(scales.zero));
        } else {
            a[2 * u] = add2(low, OFF_1024);
            a[2 * u + 1] = add2(top, OFF_64);
        }
    }
}

// The factor that undoes the subnormal scaling of output g + 8 h: 2^24 or 2^20, or 1 for types without this scaling.
__device__ __forceinline__ float subnormal_inverse(int h) { return SUBNORMAL ? (h ? 1048576.0f : 16777216.0f) : 1.0f; }

// The float scale of a span for output g + 8 h.
__device__ __forceinline__ float span_scale(const Unit &unit, int h) {
#if KIND == NVFP4
    return __uint_as_float(h ? unit.second : unit.extra);
#endif
    const word pair = SIX_BIT_SCALES ? unit.scales[0].w : unit.extra;
    return half_to_float(h ? pair >> 16 : pair & 0xFFFFu);
}

// The scales of the minima of outputs g (lower half) and g + 8, as float16. All four lanes with the same g must call this
// together.
__device__ __forceinline__ word minima_scales(const Unit &unit, int lane) {
    word mine = ((unit.extra >> 12) & 15u) | ((unit.extra >> 24) & 0xF0u);
    mine <<= 8 * (lane & 3);
    mine |= __shfl_xor_sync(0xFFFFFFFFu, mine, 1);
    return mine | __shfl_xor_sync(0xFFFFFFFFu, mine, 2);
}

// Minima of blocks 2 t and 2 t + 1 of output g + 8 h, as float16 with the same subnormal scaling as the weights
__device__ __forceinline__ word minima_pair(const Unit &unit, int h) { return h ? (unit.extra >> 2) & 0x03F003F0u : unit.extra & 0x003F003Fu; }

__device__ __forceinline__ float power_of_two(word exponent) {  // returns 2^(exponent - 128)
    return __uint_as_float(exponent > 1 ? (exponent - 1) << 23 : 0x00200000u << exponent);
}

// Returns the scale of a block of 32 inputs for output g + 8 h. The next function returns the block's minimum.
__device__ __forceinline__ float block_scale(const Unit &unit, int block, int h) {
    if (MINIMA) return half_to_float(component(unit.scales[SCALE_LOADS / 2 * h + block / 4], block & 3) & 0xFFFFu);
    if (KIND == MXFP4) return power_of_two((component(unit.scales[0], 2 * h + block / 4) >> (8 * (block & 3))) & 255u);
    const word pair = component(unit.scales[SCALE_LOADS > 1 ? h : 0], block / 2);
    return half_to_float(block & 1 ? pair >> 16 : pair & 0xFFFFu);
}

__device__ __forceinline__ float block_minimum(const Unit &unit, int block, int h) {
    return half_to_float(component(unit.scales[(SCALE_LOADS / 2 * h + block / 4) % SCALE_LOADS], block & 3) >> 16);
}
