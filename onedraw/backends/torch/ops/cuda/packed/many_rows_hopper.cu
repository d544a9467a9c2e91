// Products of many rows with dequantized weights on Hopper GPUs. activations.py defines the arithmetic, and many_rows.py computes
// the same product on other GPUs.
//
// Axes: T rows, N outputs, S spans of 256 inputs; T' and N' are T and N rounded up to whole tiles. A block of inputs is 32
// inputs.
// In: activations X [T, S * 256] float16, their factors 2^e [S, T'] float32 and their block sums [T, S, 16] float16 (the hi parts
// of eight blocks, then the lo parts); weights W [N, S * 256] float16 with scales [S * PER, N'] float32. Weights with minima have
// min_scales [S * PER, N'] float32 too: with PER 1 these scale the minima [N, S, 8] float16, with PER 8 they are the minima.
// Out: y [T, N] in bf16 or float16.
//
// A thread block computes tiles of 128 rows by 128 outputs, one after the other. Two of its three warpgroups are consumers, which
// multiply 64 rows of a tile each. The third is the producer: one of its threads copies tiles of X and W to shared memory,
// another copies the scales, minima, block sums and factors of a span. With PER 1 the two consumers alternate on the tensor
// cores, so that one multiplies while the other scales its result; with PER 8 each consumer overlaps the multiplication of a
// block of inputs with the scaling of the block before it.
//
// Compile-time constants (many_rows_hopper.py): PER, scales per span and output (1 or 8); MINIMA, whether the weights have
// minima; BF16, whether y, bias and residual are bf16 instead of float16; STAGES, buffers for tiles of X and W; SLOTS, buffers
// for the data of a span; GROUP, row tiles per band (see tile_position); CLUSTER, thread blocks per cluster, which share tiles of
// W.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

struct __align__(64) TensorMap {
    u64 words[16];
};

constexpr int TILE = 128, DEPTH = 64, SPAN = 256;  // TILE: rows or outputs; DEPTH: inputs per stage; SPAN: inputs per span
constexpr int OPERAND_BYTES = TILE * DEPTH * 2;  // one stage of X; a stage of W has the same size
constexpr int HALF_BYTES = TILE * 16;          // eight float16 for each of 128 rows or outputs
constexpr int FLOAT_BYTES = TILE * 4;          // one float for each of 128 rows or outputs
// A slot holds the data of one span: hi and lo block sums, with PER 1 the minima twice (one copy is multiplied by hi, the other
// by lo), then scales, scales of the minima, and factors 2^e. AT_* are byte offsets in a slot.
constexpr int AT_MINIMA = 2 * HALF_BYTES, AT_SCALES = AT_MINIMA + (PER == 1 ? 2 : 0) * HALF_BYTES;
constexpr int AT_MIN_SCALES = AT_SCALES + PER * FLOAT_BYTES, AT_FACTORS = AT_MIN_SCALES + PER * FLOAT_BYTES;
constexpr int SLOT_BYTES = AT_FACTORS + FLOAT_BYTES;

__device__ __forceinline__ void init_barrier(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_barrier(u32 barrier, u32 parity) {
    asm volatile(
        "{ .reg .pred p;\n"
        "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
        "@!p bra again; }" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

__device__ __forceinline__ void copy_tile(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}

// Copies a tile to the same shared-memory offset in every block of the cluster, and completes bytes on every block's own barrier.
__device__ __forceinline__ void copy_tile_multicast(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((u16)((1 << CLUSTER) - 1))
        : "memory");
}

// Arrives at the barrier of another block of the cluster (`rank`) that has the same shared-memory offset as this block's
// `barrier`.
__device__ __forceinline__ void arrive_remote(u32 barrier, int rank) {
    asm volatile(
        "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there]; }" ::"r"(barrier),
        "r"(rank)
        : "memory");
}

// Called by a consumer warp that has read a stage. With clusters the producers of all blocks wait for this, because each of them
// writes a part of W into all blocks; lane i therefore arrives at the barrier of block i.
__device__ __forceinline__ void release_stage(u32 barrier, int lane) {
    if (CLUSTER == 1) {
        if (lane == 0) arrive(barrier);
    } else if (lane < CLUSTER) {
        arrive_remote(barrier, lane);
    }
}

__device__ __forceinline__ void sync_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Copies FLOAT_BYTES contiguous bytes, which are 128 floats, by one bulk copy.
__device__ __forceinline__ void copy_floats(u32 to, const float *from, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                 "n"(FLOAT_BYTES), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ float2 load_float2(u32 at) {
    float2 found;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(found.x), "=f"(found.y) : "r"(at));
    return found;
}

__device__ __forceinline__ float load_float(u32 at) {
    float found;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(found) : "r"(at));
    return found;
}

__device__ __forceinline__ float load_half(u32 at) {
    float found;
    asm volatile("{ .reg .b16 h; ld.shared.b16 h, [%1]; cvt.f32.f16 %0, h; }" : "=f"(found) : "r"(at));
    return found;
}

// The wgmma descriptor of an operand with rows of 64 float16 (128 bytes) in the 128-byte swizzle; groups of eight rows are 1,024
// bytes apart.
__device__ __forceinline__ u64 descriptor_swizzled(u32 at) {
    return u64(1) << 62 | u64(1024 >> 4) << 32 | u64(1) << 16 | (at >> 4 & 0x3FFF);
}

// The wgmma descriptor of an operand of sixteen inputs without swizzle: an 8 x 8 matrix is 128 contiguous bytes, neighbouring
// groups of eight rows are 128 bytes apart, and inputs 8 to 15 lie HALF_BYTES after inputs 0 to 7.
__device__ __forceinline__ u64 descriptor_plain(u32 at) {
    return u64(128 >> 4) << 32 | u64(HALF_BYTES >> 4) << 16 | (at >> 4 & 0x3FFF);
}

// The two consumer warpgroups take turns at the tensor cores. Named barrier 1 + g means that it is the turn of group g: a group
// waits on its own barrier before it issues the products of a span, and then arrives at the barrier of the other group.
__device__ __forceinline__ void pingpong_wait(int group) { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
__device__ __forceinline__ void pingpong_signal(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(2 - group) : "memory"); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

// Issues d [64, 128] = a [64, 16] · b [128, 16]ᵀ, or d += a · bᵀ if `adds` is nonzero. The result is valid after wgmma_wait.
__device__ __forceinline__ void wgmma(float (&d)[64], u64 a, u64 b, int adds) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "%64, %65, p, 1, 1, 0, 0; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
          "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]),
          "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
          "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]),
          "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]),
          "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]),
          "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(adds)
        : "memory");
}

// Rounds two floats to the dtype of y and packs them into a word, the first in its lower half; widen_pair is the inverse.
__device__ __forceinline__ u32 round_pair(float low, float high) {
    u32 both;
    if (BF16)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ __forceinline__ float2 widen_pair(u32 both) {
    float2 found;
    if (BF16) {
        found.x = __uint_as_float(both << 16);
        found.y = __uint_as_float(both & 0xFFFF0000u);
    } else {
        asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
            : "=f"(found.x), "=f"(found.y)
            : "r"(both));
    }
    return found;
}

__device__ __forceinline__ u32 load_pair(const u16 *at, bool first, bool second, bool paired) {
    if (paired && second) return *reinterpret_cast<const u32 *>(at);
    return (first ? u32(at[0]) : 0u) | (second ? u32(at[1]) << 16 : 0u);
}

struct TilePosition {
    int row, column;
};

// The first row and output of tile number `tile`. Tiles are numbered within bands of GROUP row tiles, so that tiles computed at
// about the same time share rows or weights in the L2 cache. The blocks of a cluster compute vertically adjacent tiles, which use
// the same weights.
__device__ __forceinline__ TilePosition tile_position(int tile, int high, int wide, int rank) {
    const int band = tile / (GROUP * wide), within = tile % (GROUP * wide), height = min(high - band * GROUP, GROUP);
    return {((band * GROUP + within % height) * CLUSTER + rank) * TILE, within / height * TILE};
}

struct ManyRowsArguments {
    TensorMap x, weights, sums, minima;
    const float *factors, *scales, *min_scales;
    const u16 *bias, *residual;
    u16 *y;
    int rows, n, spans,                 // the sizes T, N and S
        scale_stride, factor_stride,    // N' and T': elements between rows of scales and min_scales, and of factors
        residual_stride, y_stride,      // elements between rows of the residual and of y
        paired;                         // whether y and the residual are 4-byte aligned with even strides, for access by words
};

// sum += part · scale · factor for a thread's accumulators of a 64 x 128 tile, which has wgmma's register layout: two rows (with
// factors f0 and f1) by sixteen pairs of neighbouring outputs. `scales`: shared-memory address of the scale of the first output.
__device__ __forceinline__ void add_scaled(float (&sum)[64], const float (&part)[64], u32 scales, float f0, float f1) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 d = load_float2(scales + 32 * j);
        sum[4 * j] = __fmaf_rn(part[4 * j], d.x * f0, sum[4 * j]);
        sum[4 * j + 1] = __fmaf_rn(part[4 * j + 1], d.y * f0, sum[4 * j + 1]);
        sum[4 * j + 2] = __fmaf_rn(part[4 * j + 2], d.x * f1, sum[4 * j + 2]);
        sum[4 * j + 3] = __fmaf_rn(part[4 * j + 3], d.y * f1, sum[4 * j + 3]);
    }
}

// sum += block sum · minimum · factor, for weights with a minimum per block of inputs. s0 and s1: the block sums of the thread's
// two rows.
__device__ __forceinline__ void add_minima(float (&sum)[64], float s0, float s1, u32 min_scales, float f0, float f1) {
#pragma unroll
    for (int j = 0; j < 16; j++) {
        const float2 m = load_float2(min_scales + 32 * j);
        sum[4 * j] = __fmaf_rn(s0, m.x * f0, sum[4 * j]);
        sum[4 * j + 1] = __fmaf_rn(s0, m.y * f0, sum[4 * j + 1]);
        sum[4 * j + 2] = __fmaf_rn(s1, m.x * f1, sum[4 * j + 2]);
        sum[4 * j + 3] = __fmaf_rn(s1, m.y * f1, sum[4 * j + 3]);
    }
}

// Rounds a thread's results to the dtype of y, adds bias and residual, rounding after each addition as all packed products do,
// and stores them. first_row, first_column: position of the thread's first result in y.
__device__ __forceinline__ void write_outputs(const ManyRowsArguments &args, const float (&total)[64], int first_row, int first_column) {
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const int row = first_row + 8 * side;
        if (row >= args.rows) continue;
#pragma unroll
        for (int j = 0; j < 16; j++) {
            const int column = first_column + 8 * j;
            const bool first = column < args.n, second = column + 1 < args.n;
            u32 out = round_pair(total[4 * j + 2 * side], total[4 * j + 2 * side + 1]);
            if (args.bias) {
                const float2 made = widen_pair(out), more = widen_pair(load_pair(args.bias + column, first, second, false));
                out = round_pair(made.x + more.x, made.y + more.y);
            }
            if (args.residual) {
                const u16 *from = args.residual + u64(row) * args.residual_stride + column;
                const float2 made = widen_pair(out), more = widen_pair(load_pair(from, first, second, args.paired));
                out = round_pair(made.x + more.x, made.y + more.y);
            }
            u16 *to = args.y + u64(row) * args.y_stride + column;
            if (args.paired && second) {
                *reinterpret_cast<u32 *>(to) = out;
            } else {
                if (first) to[0] = u16(out);
                if (second) to[1] = u16(out >> 16);
            }
        }
    }
}

#if PER > 1
// Issues the product of one block of 32 inputs, which overwrites `part`; the caller waits for it with wgmma_wait.
__device__ __forceinline__ void wgmma_block(float (&part)[64], u32 rows, u32 weights) {
    const u64 a = descriptor_swizzled(rows), b = descriptor_swizzled(weights);
    wgmma_fence();
    wgmma(part, a, b, 0);
    wgmma(part, a + 2, b + 2, 1);
    wgmma_commit();
}

__device__ __forceinline__ void add_block(float (&sum)[64], const float (&part)[64], u32 slot, int block, int r, int c, float f0,
                                          float f1) {
    add_scaled(sum, part, slot + AT_SCALES + block * FLOAT_BYTES + 4 * c, f0, f1);
    if (MINIMA) {
        const u32 hi = slot + 16 * r + 2 * block, lo = hi + HALF_BYTES;
        const float s0 = load_half(hi) + load_half(lo), s1 = load_half(hi + 128) + load_half(lo + 128);
        add_minima(sum, s0, s1, slot + AT_MIN_SCALES + block * FLOAT_BYTES + 4 * c, f0, f1);
    }
    // The empty asm uses every sum, which stops the compiler from moving these additions past the next product: moved additions
    // would need copies of `part`, which that product overwrites.
#pragma unroll
    for (int i = 0; i < 64; i++) asm volatile("" : "+f"(sum[i]));
}
#endif

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_DIMS
#endif

extern "C" __global__ void CLUSTER_DIMS __launch_bounds__(384, 1) many_rows_product(const __grid_constant__ ManyRowsArguments args) {
    const int rows = args.rows, n = args.n, spans = args.spans;
    extern __shared__ unsigned char memory[];
    u32 base;
    asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(base) : "l"(memory));
    base = (base + 1023) & ~1023u;
    const u32 slots = base + STAGES * 2 * OPERAND_BYTES, barriers = slots + SLOTS * SLOT_BYTES;
    const u32 full = barriers, empty = full + 8 * STAGES, slot_full = empty + 8 * STAGES, slot_empty = slot_full + 8 * SLOTS;
    const int thread = threadIdx.x, rank = blockIdx.x % CLUSTER, first = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;
    const int high = (rows + TILE * CLUSTER - 1) / (TILE * CLUSTER), across = (n + TILE - 1) / TILE, tiles = high * across;
    if (thread == 0) {
        for (int i = 0; i < STAGES; i++) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, 8 * CLUSTER);
        for (int i = 0; i < SLOTS; i++) init_barrier(slot_full + 8 * i, 1), init_barrier(slot_empty + 8 * i, 8);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
    if (CLUSTER > 1) sync_cluster();  // remote arrivals need initialized barriers in every block of the cluster

    if (thread >= 256) {  // the producer warpgroup
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        const int mine = thread - 256;
        if (mine == 0) {
            int stage = 0;
            u32 phase = 1;
            for (int tile = first; tile < tiles; tile += stride) {
                const TilePosition place = tile_position(tile, high, across, rank);
                for (int step = 0; step < spans * (SPAN / DEPTH); step++) {
                    wait_barrier(empty + 8 * stage, phase);
                    arrive_expect_bytes(full + 8 * stage, 2 * OPERAND_BYTES);
                    copy_tile(base + stage * 2 * OPERAND_BYTES, &args.x, step * DEPTH, place.row, full + 8 * stage);
                    const u32 to = base + stage * 2 * OPERAND_BYTES + OPERAND_BYTES + rank * (OPERAND_BYTES / CLUSTER);
                    const int column = place.column + rank * (TILE / CLUSTER);
                    if (CLUSTER > 1)
                        copy_tile_multicast(to, &args.weights, step * DEPTH, column, full + 8 * stage);
                    else
                        copy_tile(to, &args.weights, step * DEPTH, column, full + 8 * stage);
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
            }
        } else if (mine == 32) {
            int slot = 0;
            u32 phase = 1;
            for (int tile = first; tile < tiles; tile += stride) {
                const TilePosition place = tile_position(tile, high, across, rank);
                for (int span = 0; span < spans; span++) {
                    const u32 at = slots + slot * SLOT_BYTES, barrier = slot_full + 8 * slot;
                    wait_barrier(slot_empty + 8 * slot, phase);
                    arrive_expect_bytes(barrier, (PER * (1 + MINIMA) + 1) * FLOAT_BYTES + (MINIMA ? AT_SCALES : 0));
                    if (MINIMA) {
                        copy_tile(at, &args.sums, span * 16, place.row, barrier);
                        copy_tile(at + HALF_BYTES, &args.sums, span * 16 + 8, place.row, barrier);
                        if (PER == 1) {
                            copy_tile(at + AT_MINIMA, &args.minima, span * 8, place.column, barrier);
                            copy_tile(at + AT_MINIMA + HALF_BYTES, &args.minima, span * 8, place.column, barrier);
                        }
                    }
                    copy_floats(at + AT_FACTORS, args.factors + u64(span) * args.factor_stride + place.row, barrier);
                    for (int b = 0; b < PER; b++) {
                        const u64 from = u64(span * PER + b) * args.scale_stride + place.column;
                        copy_floats(at + AT_SCALES + b * FLOAT_BYTES, args.scales + from, barrier);
                        if (MINIMA) copy_floats(at + AT_MIN_SCALES + b * FLOAT_BYTES, args.min_scales + from, barrier);
                    }
                    if (++slot == SLOTS) slot = 0, phase ^= 1;
                }
            }
        }
    } else {  // the two consumer warpgroups
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        const int group = thread / 128, lane = thread % 32, r = thread / 32 * 16 + lane / 4, c = lane % 4 * 2;
        const u32 own = base + group * 64 * DEPTH * 2;
        float sum[64];
        int stage = 0, slot = 0;
        u32 phase = 0, slot_phase = 0;
#if PER == 1
        float part[64], total[64];
#pragma unroll
        for (int i = 0; i < 64; i++) part[i] = 0.0f;
        if (group == 1) pingpong_signal(group);
        for (int tile = first; tile < tiles; tile += stride) {
#pragma unroll
            for (int i = 0; i < 64; i++) sum[i] = total[i] = 0.0f;
            for (int span = 0; span < spans; span++) {
                const u32 at = slots + slot * SLOT_BYTES;
                u32 before = 0;
                pingpong_wait(group);
#pragma unroll
                for (int step = 0; step < SPAN / DEPTH; step++) {
                    const u64 a = descriptor_swizzled(own + stage * 2 * OPERAND_BYTES), b = descriptor_swizzled(base + stage * 2 * OPERAND_BYTES + OPERAND_BYTES);
                    wait_barrier(full + 8 * stage, phase);
                    wgmma_fence();
#pragma unroll
                    for (int k = 0; k < DEPTH / 16; k++) wgmma(part, a + 2 * k, b + 2 * k, step + k > 0);
                    wgmma_commit();
                    if (step == SPAN / DEPTH - 1) pingpong_signal(group);
                    if (step > 0) {
                        wgmma_wait<1>();
                        release_stage(before, lane);
                    }
                    before = empty + 8 * stage;
                    if (++stage == STAGES) stage = 0, phase ^= 1;
                }
                wgmma_wait<0>();
                release_stage(before, lane);
                wait_barrier(slot_full + 8 * slot, slot_phase);
                const float f0 = load_float(at + AT_FACTORS + 4 * r), f1 = load_float(at + AT_FACTORS + 4 * r + 32);
                add_scaled(sum, part, at + AT_SCALES + 4 * c, f0, f1);
                if (MINIMA) {
                    wgmma_fence();
                    wgmma(part, descriptor_plain(at + group * 64 * 16), descriptor_plain(at + AT_MINIMA), 0);
                    wgmma_commit();
                    wgmma_wait<0>();
                    add_scaled(sum, part, at + AT_MIN_SCALES + 4 * c, -f0, -f1);
                }
                __syncwarp();  // lane 0 releases the slot for the warp, so all lanes must have read it
                if (lane == 0) arrive(slot_empty + 8 * slot);
                if (++slot == SLOTS) slot = 0, slot_phase ^= 1;
                if (span % 4 == 3 || span == spans - 1) {
#pragma unroll
                    for (int i = 0; i < 64; i++) total[i] += sum[i], sum[i] = 0.0f;
                }
            }
            const TilePosition place = tile_position(tile, high, across, rank);
            write_outputs(args, total, place.row + r, place.column + c);
        }
#else
        // Products of two blocks of inputs alternate: one is multiplied while the other is scaled. Running totals over segments
        // are kept in shared memory, [64 accumulators][256 threads], because three accumulator arrays already fill the registers.
        float even[64], odd[64];
        const u32 totals = barriers + 256 + 4 * thread;
        const int pairs = spans * 4;
#pragma unroll
        for (int i = 0; i < 64; i++) even[i] = odd[i] = 0.0f;
        for (int tile = first; tile < tiles; tile += stride) {
            float f0 = 0.0f, f1 = 0.0f;
#pragma unroll
            for (int i = 0; i < 64; i++) sum[i] = 0.0f;
            wait_barrier(full + 8 * stage, phase);
            wgmma_block(even, own + stage * 2 * OPERAND_BYTES, base + stage * 2 * OPERAND_BYTES + OPERAND_BYTES);
            wgmma_wait<0>();
            for (int pair = 0; pair < pairs; pair++) {
                const u32 at = slots + slot * SLOT_BYTES, before = empty + 8 * stage;
                const int block = pair % 4 * 2;
                if (block == 0) {
                    wait_barrier(slot_full + 8 * slot, slot_phase);
                    f0 = load_float(at + AT_FACTORS + 4 * r), f1 = load_float(at + AT_FACTORS + 4 * r + 32);
                }
                wgmma_block(odd, own + stage * 2 * OPERAND_BYTES + 64, base + stage * 2 * OPERAND_BYTES + OPERAND_BYTES + 64);
                add_block(sum, even, at, block, r, c, f0, f1);
                wgmma_wait<0>();
                release_stage(before, lane);
                if (++stage == STAGES) stage = 0, phase ^= 1;
                if (pair + 1 < pairs) {
                    wait_barrier(full + 8 * stage, phase);
                    wgmma_block(even, own + stage * 2 * OPERAND_BYTES, base + stage * 2 * OPERAND_BYTES + OPERAND_BYTES);
                }
                add_block(sum, odd, at, block + 1, r, c, f0, f1);
                wgmma_wait<0>();
                if (block == 6) {
                    __syncwarp();  // lane 0 releases the slot for the warp, so all lanes must have read it
                    if (lane == 0) arrive(slot_empty + 8 * slot);
                    if (++slot == SLOTS) slot = 0, slot_phase ^= 1;
                }
                if (pair % 16 == 15 || pair + 1 == pairs) {
#pragma unroll
                    for (int i = 0; i < 64; i++) {
                        sum[i] = (pair < 16 ? 0.0f : load_float(totals + 1024 * i)) + sum[i];
                        if (pair + 1 < pairs) {
                            asm volatile("st.shared.f32 [%0], %1;" ::"r"(totals + 1024 * i), "f"(sum[i]) : "memory");
                            sum[i] = 0.0f;
                        }
                    }
                }
            }
            const TilePosition place = tile_position(tile, high, across, rank);
            write_outputs(args, sum, place.row + r, place.column + c);
        }
#endif
    }
    if (CLUSTER > 1) sync_cluster();  // a block must not exit while others may still write to its shared memory or barriers
}
