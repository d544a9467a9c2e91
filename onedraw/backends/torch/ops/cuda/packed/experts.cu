// Products of packed experts with the rows routed to them. activations.py defines the arithmetic of all packed products.
//
// In: a stack of experts, packed activations, and row tiles that routing computed on the device (`ExpertsArguments`). Out:
// [pairs, outputs], where a pair is a row and one of its experts. A thread block computes some outputs of one expert for one row
// tile. `split_k` warps share a unit of sixteen outputs: each computes different segments of 1,024 inputs, and one of them adds
// the sums in order.
// Compile-time constants: KIND, TILES (of eight rows), WARPS (per block), BLOCKS (minimum blocks per multiprocessor).

#define ROUTED
#include "work_items.cuh"

struct ExpertsArguments {
    ProductArguments product;  // the product of one expert; the kernel sets `units`, `rows` and `pairs` for its tile
    const int *order;       // pair numbers, sorted by expert
    const int *tiles;       // [gridDim.x, 3]: expert, index of the tile's first pair in `order`, number of pairs (may be 0)
    long long expert_bytes; // bytes of one expert in `units`
    int split_k;            // warps per sixteen outputs, each computing one segment at a time
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) experts_product(const __grid_constant__ ExpertsArguments g) {
    extern __shared__ __align__(16) byte rows[];
    __shared__ int pairs[TILES * 8];
    if (g.product.pdl) {
        launch_dependents();
        wait_previous_grid();
    }
    const int *tile = g.tiles + blockIdx.x * 3;
    if (tile[2] == 0) return;
    ProductArguments p = g.product;
    p.units += tile[0] * g.expert_bytes;
    p.rows = tile[2];
    p.pairs = pairs;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, k_part = warp % g.split_k;
    const int units = (blockDim.x >> 5) / g.split_k, unit_index = blockIdx.y * units + warp / g.split_k;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const word rows_at = (word)__cvta_generic_to_shared(rows);
    const byte *weights = p.units + (long long)unit_index * p.spans * UNIT_BYTES;
    bool live = unit_index < p.unit_count && k_part < segments;
    Unit unit;
    load_unit(unit, weights + k_part * SEGMENT * UNIT_BYTES, lane, live);
    for (int i = threadIdx.x; i < p.rows; i += blockDim.x) pairs[i] = g.order[tile[1] + i];
    clear_rows(p, rows, bytes, g.split_k);
    word own_rows[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) own_rows[n] = opaque(rows_at + k_part * bytes + row_offset(p, n));
    // Sums of the warps that do not add, which are those with k_part > 0: [units, split_k - 1, TILES, 32 lanes].
    float4 *stored = (float4 *)(rows + g.split_k * bytes) + lane;
    float total[TILES][4];
    clear(total);
#pragma unroll 1
    for (int first = 0; first < segments; first += g.split_k) {
        const int here = min(g.split_k, segments - first);
        __syncthreads();  // `pairs` is written, and no warp reads the previous rows any longer
        for (int i = 0; i < here; i++) copy_rows(p, rows_at + i * bytes, (first + i) * SEGMENT);
        asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        float sums[TILES][4];
        clear(sums);
        if (live) {
            const int segment = first + k_part, spans = min(SEGMENT, p.spans - segment * SEGMENT);
            const bool more = segment + g.split_k < segments;
            const byte *at = weights + segment * SEGMENT * UNIT_BYTES, *next = at + (more ? g.split_k * SEGMENT * UNIT_BYTES : 0);
            add_item(p, sums, unit, at, spans, next, more, rows + k_part * bytes, own_rows);
            live = more;
        }
        if (k_part > 0) {
#pragma unroll
            for (int n = 0; n < TILES; n++)
                stored[((warp / g.split_k * (g.split_k - 1) + k_part - 1) * TILES + n) * 32] = four(sums[n]);
        }
        if (g.split_k > 1) __syncthreads();
        if (k_part > 0) continue;
        for (int i = 0; i < here; i++)
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float4 v = i == 0 ? four(sums[n])
                                        : stored[((warp / g.split_k * (g.split_k - 1) + i - 1) * TILES + n) * 32];
                add_to(total[n], v);
            }
    }
    if (k_part == 0 && unit_index < p.unit_count) write_outputs(p, total, unit_index);
}
