// Products of packed weights with few rows. The rule of the arithmetic stands in spans.py.
//
// In: units of a weight and rows made ready (`Product`, packed_items.cuh). Out: [rows, outputs]. Compiled at run time by nvrtc.py
// for a KIND, TILES, WARPS (of a block, at most) and INSIDE, which says how items are shared out:
//   INSIDE 1  a block of threads has all segments of some outputs. Rows of all segments lie in shared memory, and those of the first
//             are waited for before those of the next. A warp has all segments of a unit, one behind the other, as long as there is a
//             unit for every warp; items of the units that are left are spread over all warps, and added up in the end.
//   INSIDE 0  items stand segment by segment, and every block has an equal share of them, so it needs rows of one segment or two.
//             Sums of items go to memory; whoever is the last to finish one of an output adds them.

#include "packed_items.cuh"

// What runs behind this kernel may come, and what runs before it is done. A product that JOINS the one before it reads the same rows,
// and they are there: the one before it is JOINED, and has waited for them before it let anybody come. It waits in the end, so that
// whoever waits for it has waited for both. What a kernel finds in its first cache is no older than the kernel itself, as for any launch.
__device__ __forceinline__ void begin_turn(const Product &p) {
    if (p.pdl == (PDL | JOINED)) await_grid();
    if (p.pdl & PDL) let_next_come();
    if (p.pdl == PDL) await_grid();
}

__device__ __forceinline__ void end_turn(const Product &p) {
    if (p.pdl & JOINS) await_grid();
}

// Where the share of a block begins, of so many
__device__ __forceinline__ int share_of(int all, int block) { return (int)((long long)all * block / gridDim.x); }

// An item's sums. `unit` has its first weights, and then those of the first span of what comes next.
__device__ __forceinline__ void add_own_item(const Product &p, float (&sums)[TILES][4], Unit &unit, const Item &own, const Item &next, bool more,
                                             const byte *rows, const int (&row_of)[TILES]) {
    const word rows_at = (word)__cvta_generic_to_shared(rows);
    word own_rows[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) own_rows[n] = kept_apart(rows_at + row_of[n]);
    clear(sums);
    add_item(p, sums, unit, own.at, own.live, next.at, more, rows, own_rows);
}

#if INSIDE
// A block's units: `whole` of every warp's own, and the rest
struct Units {
    int first, whole, rest, segments;
};

// Item i of this warp
__device__ __forceinline__ Item item_of(const Product &p, const Units &u, int i) {
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, before = u.whole * u.segments;
    Item found;
    if (i < before) {
        found.tall = u.first + i / u.segments * warps + warp;
        found.segment = i % u.segments;
    } else {
        const int spread = (i - before) * warps + warp;
        found.segment = spread / max(u.rest, 1);
        found.tall = u.first + u.whole * warps + spread - found.segment * u.rest;
    }
    place(p, found);
    return found;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) rows_product(const __grid_constant__ Product p) {
    extern __shared__ __align__(16) byte rows[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const int first = share_of(p.tall, blockIdx.x), height = share_of(p.tall, blockIdx.x + 1) - first;
    const Units units = {first, height / warps, height % warps, segments};
    const int owned = units.whole * segments, items = owned + max(0, (units.rest * segments - warp + warps - 1) / warps);
    float4 *kept = (float4 *)(rows + segments * bytes) + lane;  // of a warp its own unit, then its items of the rest: [i][warp]
    const word barriers = (word)__cvta_generic_to_shared(rows) + p.barriers;
    int row_of[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) row_of[n] = kept_apart(row_at(p, n));
    Item own = item_of(p, units, 0);
    // Weights hang on nothing that runs before this kernel: the first are on their way before it waits.
    Unit unit;
    load_unit(unit, own.at, lane, items > 0);
    clear_rows(p, rows, bytes, segments);
    if (threadIdx.x < segments) make_barrier(barriers + threadIdx.x * 8, blockDim.x);
    __syncthreads();
    begin_turn(p);
    for (int i = 0; i < segments; i++) {
        bring_rows(p, (word)__cvta_generic_to_shared(rows) + i * bytes, i * SEGMENT);
        arrive_with_copies(barriers + i * 8);
    }
#pragma unroll 1
    for (int i = 0; i < items; i++) {
        const bool more = i + 1 < items;
        const Item next = item_of(p, units, more ? i + 1 : i);
        float sums[TILES][4];
        await_copies(barriers + own.segment * 8);
        add_own_item(p, sums, unit, own, next, more, rows + own.segment * bytes, row_of);
        float4 *place = kept + (i < owned ? warp : (i - owned) * warps + warp) * TILES * 32;
        if (i < owned) add_before(sums, own.segment > 0 ? place : nullptr);
        if (i < owned && own.segment == segments - 1) {
            finish(p, sums, own.tall);
        } else {
#pragma unroll
            for (int n = 0; n < TILES; n++) place[n * 32] = four(sums[n]);
        }
        own = next;
    }
    if (units.rest) {
        __syncthreads();
        add_inside(p, kept, segments, units.first + units.whole * warps, units.rest);
    }
    end_turn(p);
}
#else
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) rows_product(const __grid_constant__ Product p) {
    extern __shared__ __align__(16) byte rows[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const int end = share_of(segments * p.tall, blockIdx.x + 1);
    int begin = share_of(segments * p.tall, blockIdx.x);
    int row_of[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) row_of[n] = kept_apart(row_at(p, n));
    clear_rows(p, rows, bytes, p.buffers);
    bool starts = true;
    while (begin < end) {  // once, but where there is no room for rows of all segments
        const int segment = begin / p.tall, stop = min(end, (segment + p.buffers) * p.tall);
        // Blocks that have other segments of the same outputs begin elsewhere among them: so each is the last to finish some of them,
        // and none has to add up all.
        const int items = stop - begin, turn = (int)((long long)items * segment / segments);
        const int most_unsettled = segments > FEW_SEGMENTS || items < MANY_ITEMS * warps ? 1 : MOST_UNSETTLED;
        int item = warp, unsettled = 0, mine = 0;
        Item own = place_of(p, begin + turned(min(item, items - 1), turn, items));
        Unit unit;
        load_unit(unit, own.at, lane, item < items);
        __syncthreads();
        if (starts) begin_turn(p);
        starts = false;
        for (int i = segment; i * p.tall < stop; i++) bring_rows(p, (word)__cvta_generic_to_shared(rows) + (i - segment) * bytes, i * SEGMENT);
        asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
#pragma unroll 1
        for (; item < items; item += warps) {
            const bool more = item + warps < items;
            const Item next = place_of(p, begin + turned(more ? item + warps : item, turn, items));
            float sums[TILES][4];
            add_own_item(p, sums, unit, own, next, more, rows + (own.segment - segment) * bytes, row_of);
            keep(p, (float4 *)p.parts + ((long long)own.tall * segments + own.segment) * TILES * 32 + lane, sums);
            if (lane == unsettled) mine = own.tall;
            if (++unsettled == most_unsettled || !more) {
                settle(p, mine, unsettled, segments);
                unsettled = 0;
            }
            own = next;
        }
        begin = stop;
        if (begin == end) end_turn(p);  // behind the loop the compiler would keep less in registers
    }
}
#endif
