// Products of packed experts with the rows that go to them, by the rule of all packed products (spans.py).
//
// In: experts one behind the other, rows made ready, and tiles of pairs that were made on the device (`Grouped`). Out: [pairs,
// outputs]. A block of threads has a tile of the rows of one expert, and some of its outputs. A few warps share sixteen outputs, a
// segment each, and one of them adds up: there is nothing to share out. Compiled for a KIND, TILES, WARPS and BLOCKS (of a
// multiprocessor, at least).

#define GROUPED
#include "work_items.cuh"

struct Grouped {
    Product all;            // of one expert, but for its weights and its rows
    const int *order;       // pairs, those of one expert one behind the other
    const int *tiles;       // [gridDim.x, 3]: an expert, its first pair of this tile in `order`, pairs of the tile, which may be none
    long long expert_bytes;
    int sides;              // warps that share sixteen outputs, a segment each at a time
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS) grouped_product(const __grid_constant__ Grouped g) {
    extern __shared__ __align__(16) byte rows[];
    __shared__ int pairs[TILES * 8];
    if (g.all.pdl) {
        let_next_come();
        await_grid();
    }
    const int *tile = g.tiles + blockIdx.x * 3;
    if (tile[2] == 0) return;
    Product p = g.all;
    p.units += tile[0] * g.expert_bytes;
    p.rows = tile[2];
    p.pairs = pairs;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = warp % g.sides;
    const int units = (blockDim.x >> 5) / g.sides, tall = blockIdx.y * units + warp / g.sides;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const word rows_at = (word)__cvta_generic_to_shared(rows);
    const byte *weights = p.units + (long long)tall * p.spans * UNIT_BYTES;
    bool live = tall < p.tall && side < segments;
    Unit unit;
    load_unit(unit, weights + side * SEGMENT * UNIT_BYTES, lane, live);
    for (int i = threadIdx.x; i < p.rows; i += blockDim.x) pairs[i] = g.order[tile[1] + i];
    clear_rows(p, rows, bytes, g.sides);
    word own_rows[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) own_rows[n] = kept_apart(rows_at + side * bytes + row_at(p, n));
    float4 *kept = (float4 *)(rows + g.sides * bytes) + lane;  // sums of the other sides: [units, sides - 1, TILES, 32 lanes]
    float total[TILES][4];
    clear(total);
#pragma unroll 1
    for (int first = 0; first < segments; first += g.sides) {
        const int here = min(g.sides, segments - first);
        __syncthreads();  // the pairs are there, and nobody reads what was there before
        for (int i = 0; i < here; i++) bring_rows(p, rows_at + i * bytes, (first + i) * SEGMENT);
        asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
        float sums[TILES][4];
        clear(sums);
        if (live) {
            const int segment = first + side, spans = min(SEGMENT, p.spans - segment * SEGMENT);
            const bool more = segment + g.sides < segments;
            const byte *at = weights + segment * SEGMENT * UNIT_BYTES, *next = at + (more ? g.sides * SEGMENT * UNIT_BYTES : 0);
            add_item(p, sums, unit, at, spans, next, more, rows + side * bytes, own_rows);
            live = more;
        }
        if (side > 0) {
#pragma unroll
            for (int n = 0; n < TILES; n++)
                kept[((warp / g.sides * (g.sides - 1) + side - 1) * TILES + n) * 32] = four(sums[n]);
        }
        if (g.sides > 1) __syncthreads();
        if (side > 0) continue;
        for (int i = 0; i < here; i++)
#pragma unroll
            for (int n = 0; n < TILES; n++) {
                const float4 v = i == 0 ? four(sums[n])
                                        : kept[((warp / g.sides * (g.sides - 1) + i - 1) * TILES + n) * 32];
                add_to(total[n], v);
            }
    }
    if (side == 0 && tall < p.tall) finish(p, total, tall);
}
