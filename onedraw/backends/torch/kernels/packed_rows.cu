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
// Where the units of a block begin
__device__ __forceinline__ int units_before(const Product &p, int block) { return block * p.even + min(block, p.odd); }

// A block's units: from `first` on those that are whole in a warp, every `warps`-th its own, and `rest` behind them
struct Units {
    int first, rest_at, rest, segments;
};

// How often a number goes into n, of which `per` is one part: for n below 2^21, which no block comes near
__device__ __forceinline__ int quotient(int n, float per) { return (int)(((float)n + 0.5f) * per); }

// Item `spread` of those that all warps share, unit by unit; false where there is none
__device__ __forceinline__ bool spread_item(const Product &p, const Units &u, int spread, Item &found) {
    if (spread >= u.rest * u.segments) return false;
    const int unit = quotient(spread, p.per_segment);
    found.tall = u.rest_at + unit;
    found.segment = spread - unit * u.segments;
    place(p, found);
    return true;
}

__device__ __forceinline__ int spread_of(const Units &u, const Item &item) { return (item.tall - u.rest_at) * u.segments + item.segment; }

__device__ __forceinline__ bool first_item(const Product &p, const Units &u, Item &found) {
    const int warp = threadIdx.x >> 5;
    found.tall = u.first + warp;
    found.segment = 0;
    place(p, found);
    return u.first < u.rest_at || spread_item(p, u, warp, found);
}

// What a warp takes behind an item, or nothing
__device__ __forceinline__ bool next_item(const Product &p, const Units &u, const Item &own, Item &found) {
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    if (own.tall >= u.rest_at) return spread_item(p, u, spread_of(u, own) + warps, found);
    const bool closes = own.segment + 1 == u.segments;
    if (closes && own.tall + warps >= u.rest_at) return spread_item(p, u, warp, found);
    found.tall = own.tall + (closes ? warps : 0);
    found.segment = closes ? 0 : own.segment + 1;
    place(p, found);
    return true;
}

// Rows of all segments, a warp for each row of each, whose lanes arrive at the segment's barrier
#define ARRIVALS 32

__device__ __forceinline__ void bring_all_rows(const Product &p, word to, int bytes, int segments, word barriers) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
#pragma unroll 1
    for (int pair = threadIdx.x >> 5; pair < segments * p.rows; pair += warps) {
        const int segment = pair / p.rows, row = pair - segment * p.rows, span = segment * SEGMENT, live = min(SEGMENT, p.spans - span);
        const long long at = (long long)row * p.spans + span;
        const word own = to + segment * bytes + row * ROW_BYTES;
        const halfword *x = p.x + at * SPAN + lane * 8;
#pragma unroll
        for (int i = 0; i < SEGMENT; i++)
            if (i < live) copy_sixteen(own + (i * SPAN + lane * 8) * 2, x + i * SPAN);
        if (lane < live * 2) copy_sixteen(own + SUMS_AT + lane * 16, p.sums + at * 16 + lane * 8);
        if (lane == 31) copy_four(to + segment * bytes + powers_at(p) + row * 4, p.factors + at);
        arrive_with_copies(barriers + segment * 8);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) rows_product(const __grid_constant__ Product p) {
    extern __shared__ __align__(16) byte rows[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const int first = units_before(p, blockIdx.x), height = units_before(p, blockIdx.x + 1) - first, rest = height % warps;
    const Units units = {first, first + height - rest, rest, segments};
    float4 *kept = (float4 *)(rows + segments * bytes) + lane;  // of a warp its own unit, then its items of the rest
    const word barriers = (word)__cvta_generic_to_shared(rows) + p.barriers;
    int row_of[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) row_of[n] = kept_apart(row_at(p, n));
    Item own;
    bool live = first_item(p, units, own);
    // Weights hang on nothing that runs before this kernel: the first are on their way before it waits.
    Unit unit;
    load_unit(unit, own.at, lane, live);
    clear_rows(p, rows, bytes, segments);
    if (threadIdx.x < segments) make_barrier(barriers + threadIdx.x * 8, ARRIVALS * p.rows);
    __syncthreads();
    begin_turn(p);
    bring_all_rows(p, (word)__cvta_generic_to_shared(rows), bytes, segments, barriers);
#pragma unroll 1
    while (live) {
        Item next = own;
        const bool more = next_item(p, units, own, next), whole = own.tall < units.rest_at;
        float sums[TILES][4];
        await_copies(barriers + own.segment * 8);
        add_own_item(p, sums, unit, own, next, more, rows + own.segment * bytes, row_of);
        float4 *place = kept + (whole ? warp : spread_of(units, own)) * TILES * 32;
        if (whole) add_before(sums, own.segment > 0 ? place : nullptr);
        if (whole && own.segment == segments - 1) {
            finish(p, sums, own.tall);
        } else {
#pragma unroll
            for (int n = 0; n < TILES; n++) place[n * 32] = four(sums[n]);
        }
        own = next;
        live = more;
    }
    if (units.rest) {
        __syncthreads();
        add_inside(p, kept, segments, units.rest_at, units.rest);
    }
    end_turn(p);
}
#else
// Where the share of a block begins, of so many
__device__ __forceinline__ int share_of(int all, int block) { return (int)((long long)all * block / gridDim.x); }

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
