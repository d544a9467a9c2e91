// A GPU's blocks of threads on a CPU: every thread is a fiber, and they meet where threads of a warp or of a block do.
//
// In: a CUDA source whose single instructions (those in PTX) were taken out; this stands in their place. Out: kernels that are
// called one block after the other. What the matrix unit adds up is added in float64 and rounded once per step of sixteen inputs:
// not a GPU's bits, but the same for the same numbers, so two kernels that follow one rule agree here as they do there.

#include <cmath>
#include <csetjmp>
#include <cstdio>
#include <cstdlib>
#include <cstdint>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __constant__ static
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__

struct uint4 { unsigned x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Place { unsigned x, y; };
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ------------------------------------------------------------------ threads

static Place threadIdx, blockIdx, blockDim, gridDim;
alignas(16) unsigned char rows[232448];  // the shared memory of a block

struct Meeting { int size = 0, arrived = 0; long turn = 0; };
struct Lane { ucontext_t begin; jmp_buf here; std::vector<char> stack; bool begun, done; };

static std::vector<Lane> lanes;
static std::vector<Meeting> warps;
static Meeting block;
static uint32_t draw = 1;
static jmp_buf outside;
static int current;
static std::function<void()> body;

static void next_lane() { if (!_setjmp(lanes[current].here)) _longjmp(outside, 1); }  // `swapcontext` would ask the kernel each time

static void meet(Meeting &meeting) {
    const long turn = meeting.turn;
    if (++meeting.arrived == meeting.size) {
        meeting.arrived = 0;
        meeting.turn++;
    } else {
        while (meeting.turn == turn) next_lane();
    }
}

static void one_lane() {
    body();
    lanes[current].done = true;
    _longjmp(outside, 1);
}

static void visit(Lane &lane) {  // until it waits, or is done
    if (_setjmp(outside)) return;
    if (lane.begun) _longjmp(lane.here, 1);
    lane.begun = true;
    setcontext(&lane.begin);
}

static uint32_t drawn() { return (draw = draw * 1664525u + 1013904223u) >> 8; }

static void run_block(int threads) {
    lanes.resize(threads);
    warps.assign(threads / 32, Meeting{32});
    block = Meeting{threads};
    for (Lane &lane : lanes) {
        lane.begun = lane.done = false;
        lane.stack.resize(256 << 10);
        getcontext(&lane.begin);
        lane.begin.uc_stack.ss_sp = lane.stack.data();
        lane.begin.uc_stack.ss_size = lane.stack.size();
        lane.begin.uc_link = nullptr;
        makecontext(&lane.begin, one_lane, 0);
    }
    // Any warp may be far ahead of the others: one goes on for a while, then another one, as drawn.
    for (int left = threads; left;) {
        const int first = drawn() % (threads / 32) * 32;
        for (int turns = 1 + drawn() % 100; turns > 0; turns--)
            for (current = first; current < first + 32; current++)
                if (!lanes[current].done) {
                    threadIdx.x = current;
                    visit(lanes[current]);
                    left -= lanes[current].done;
                }
    }
}

static Meeting &warp_of() { return warps[threadIdx.x >> 5]; }
static void __syncthreads() { meet(block); }
static void __syncwarp() { meet(warp_of()); }
static void __threadfence() {}

// What a lane shows to the others of its warp
struct Shown { uint32_t words[8]; };
static Shown shown[64][32];

static Shown (&show(const Shown &mine))[32] {
    shown[threadIdx.x >> 5][threadIdx.x & 31] = mine;
    meet(warp_of());
    return shown[threadIdx.x >> 5];
}

static uint32_t __shfl_sync(uint32_t, uint32_t value, int from) {
    const uint32_t found = show({{value}})[from & 31].words[0];
    meet(warp_of());
    return found;
}
static uint32_t __shfl_xor_sync(uint32_t all, uint32_t value, int other) { return __shfl_sync(all, value, (threadIdx.x & 31) ^ other); }
static uint32_t __ballot_sync(uint32_t, int value) {
    Shown(&all)[32] = show({{(uint32_t)(value != 0)}});
    uint32_t found = 0;
    for (int i = 0; i < 32; i++) found |= all[i].words[0] << i;
    meet(warp_of());
    return found;
}
static int __ffs(uint32_t v) { return __builtin_ffs(v); }
static int atomic_increment(int *at) { return (*at)++; }
template <class T> static T __ldcg(const T *at) { return *at; }
template <class T> static void __stcg(T *at, const T &value) { *at = value; }
static uint64_t __cvta_generic_to_shared(const void *at) { return (const unsigned char *)at - rows; }

// ------------------------------------------------------------------ numbers

static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static float __uint_as_float(uint32_t v) { float f; memcpy(&f, &v, 4); return f; }
static uint32_t as_bits(float v) { uint32_t b; memcpy(&b, &v, 4); return b; }
static double half_value(uint32_t bits) { const uint16_t h = (uint16_t)bits; _Float16 v; memcpy(&v, &h, 2); return (double)v; }
static uint32_t half_bits(double v) { const _Float16 h = (_Float16)v; uint16_t b; memcpy(&b, &h, 2); return b; }
static uint32_t bfloat_bits(float v) {
    const uint32_t b = as_bits(v);
    return v != v ? 0x7FFF : (b + 0x7FFF + (b >> 16 & 1)) >> 16;
}

// ------------------------------------------------------------------ the single instructions

// What is not read is no number: nobody may use it.
template <class T> static void load_streaming(T &v, const byte *at, bool more) { more ? memcpy(&v, at, sizeof v) : memset(&v, 0xFF, sizeof v); }
inline word and_or(word a, word mask, word c) { return (a & mask) | c; }
template <class F> static word by_halves(F f) { return half_bits(f(0)) | half_bits(f(16)) << 16; }
inline word mul2(word a, word b) { return by_halves([=](int s) { return half_value(a >> s) * half_value(b >> s); }); }
inline word fma2(word a, word b, word c) { return by_halves([=](int s) { return half_value(a >> s) * half_value(b >> s) + half_value(c >> s); }); }
template <int HALF> static word both(word a) { return (a >> 16 * HALF & 0xFFFF) * 0x10001u; }
inline word add2(word a, word b) { return by_halves([=](int s) { return half_value(a >> s) + half_value(b >> s); }); }
inline word permute(word a, word b, word selector) {
    const uint64_t both = (uint64_t)b << 32 | a;
    word found = 0;
    for (int i = 0; i < 4; i++) found |= (word)(both >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return found;
}
inline float half_to_float(word bits) { return (float)half_value(bits); }
inline float rounded_to(float value, int bf16) { return bf16 ? __uint_as_float(bfloat_bits(value) << 16) : half_to_float(half_bits(value)); }
inline float read_number(const halfword *at, int bf16) { return bf16 ? __uint_as_float((word)*at << 16) : half_to_float(*at); }
inline void write_number(halfword *at, float value, int bf16) { *at = (halfword)(bf16 ? bfloat_bits(value) : half_bits(value)); }

inline void mma(float (&sums)[4], const word (&a)[4], word b0, word b1) {
    Shown(&all)[32] = show({{a[0], a[1], a[2], a[3], b0, b1}});
    const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
    for (int c = 0; c < 4; c++) {
        double found = sums[c];
        for (int k = 0; k < 16; k++) {
            const int u = k >> 3, lane = (k & 7) >> 1, shift = 16 * (k & 1);
            const word left = all[4 * g + lane].words[2 * u + (c >> 1)], right = all[4 * (2 * t + (c & 1)) + lane].words[4 + u];
            found += half_value(left >> shift) * half_value(right >> shift);
        }
        sums[c] = (float)found;
    }
    meet(warp_of());
}

template <int COUNT> static void ldmatrix(word *v, word at) {
    Shown(&all)[32] = show({{at}});
    const int lane = threadIdx.x & 31;
    for (int i = 0; i < COUNT; i++) memcpy(v + i, rows + all[8 * i + (lane >> 2)].words[0] + (lane & 3) * 4, 4);
    meet(warp_of());
}
inline void ldmatrix_x4(word (&v)[4], word at) { ldmatrix<4>(v, at); }
inline void ldmatrix_x2(word &v0, word &v1, word at) {
    word both[2];
    ldmatrix<2>(both, at);
    v0 = both[0], v1 = both[1];
}
inline word opaque(word v) { return v; }
inline void copy_async_16(word to, const void *from) { memcpy(rows + to, from, 16); }
inline void copy_async_4(word to, const void *from) { memcpy(rows + to, from, 4); }
inline void wait_previous_grid() {}
inline void launch_dependents() {}
inline void init_barrier(word at, int count) { ((int *)(rows + at))[0] = count; }
inline void arrive_after_copies(word at) {  // others may be far ahead before it brings more
    ((int *)(rows + at))[0]--;
    for (int turns = drawn() % 200; turns > 0; turns--) next_lane();
}
inline void wait_barrier(word at) { while (((int *)(rows + at))[0]) next_lane(); }
inline int atomic_increment_shared(word at) { return ((int *)(rows + at))[0]++; }
inline uint4 load_relaxed(const float4 *at) {  // the block before this one has ended: what is not there never comes
    uint4 v;
    memcpy(&v, at, sizeof v);
    if (v.x == 0xFFFFFFFFu) fprintf(stderr, "no block has handed this on\n"), abort();
    return v;
}
inline void store_relaxed(float4 *at, float4 v) { *at = v; }
inline word &component(uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
inline word component(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
