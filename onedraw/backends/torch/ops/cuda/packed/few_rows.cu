// Products of packed weights with few rows. The rule of the arithmetic stands in spans.py.
//
// In: units of a weight and rows made ready (`Product`, work_items.cuh). Out: [rows, outputs]. Compiled at run time by nvrtc.py
// for a KIND, TILES, WARPS (of a block, at most), REGISTERS (of a thread, at most; 0: as many as there are) and INSIDE, which says how
// items are shared out:
//   INSIDE 1  a block of threads has all segments of some outputs, or, where those do not divide evenly, an equal share of all items and
//             hands on to the next block what it has of the last unit. Rows of all segments lie in shared memory, and those of the first
//             are waited for before those of the next. A warp has all segments of a unit, one behind the other, as long as there is a
//             unit for every warp; items of the units that are left are spread over all warps, and added up in the end.
//   INSIDE 0  items stand segment by segment, and every block has an equal share of them, so it needs rows of one segment or two.
//             Sums of items go to memory; whoever is the last to finish one of an output adds them.

#include "work_items.cuh"

#if REGISTERS && !MINIMA  // kinds with minima of float16 have no room for less
#define BOUNDS __maxnreg__(REGISTERS)
#else
#define BOUNDS __launch_bounds__(WARPS * 32, 1)
#endif

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
// A block's items [first, end), unit by unit: up to `rest` units that are whole in a warp, every `warps`-th its own; behind them items
// that the warps share. Where blocks share units, the `lead` last items are of one that goes on in the next block, which waits for
// their sum: they come first.
struct Run {
    int first, rest, end, lead, segments;
};

// How often a number goes into n, of which `per` is one part: for n below 2^21, which shares.py sees to
__device__ __forceinline__ int quotient(int n, float per) { return (int)(((float)n + 0.5f) * per); }

__device__ __forceinline__ int items_before(const Product &p, int block) { return (block * p.even + min(block, p.odd)) * p.granule; }

__device__ __forceinline__ Run run_of(const Product &p, int segments) {
    const int first = items_before(p, blockIdx.x), end = items_before(p, blockIdx.x + 1), warps = blockDim.x >> 5;
    if (p.granule != segments) return {first, first, end, end - quotient(end, p.per_segment) * segments, segments};
    const int height = quotient(end - first, p.per_segment);
    return {first, first + (height - height % warps) * segments, end, 0, segments};
}

__device__ __forceinline__ int number_of(const Run &run, const Item &item) { return item.tall * run.segments + item.segment; }

__device__ __forceinline__ bool leads(const Run &run, int number) { return number >= run.end - run.lead; }

// Item `spread` of those that all warps share; false where there is none
__device__ __forceinline__ bool spread_item(const Product &p, const Run &run, int spread, Item &found) {
    if (spread >= run.end - run.rest) return false;
    const int number = (spread < run.lead ? run.end : run.rest) - run.lead + spread;
    found.tall = quotient(number, p.per_segment);
    found.segment = number - found.tall * run.segments;
    place(p, found);
    return true;
}

__device__ __forceinline__ bool first_item(const Product &p, const Run &run, Item &found) {
    const int warp = threadIdx.x >> 5;
    if (run.first == run.rest) return spread_item(p, run, warp, found);
    found.tall = quotient(run.first, p.per_segment) + warp;
    found.segment = 0;
    place(p, found);
    return true;
}

// What a warp takes behind an item, or nothing
__device__ __forceinline__ bool next_item(const Product &p, const Run &run, const Item &own, Item &found) {
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, number = number_of(run, own);
    if (number >= run.rest) return spread_item(p, run, number - (leads(run, number) ? run.end : run.rest) + run.lead + warps, found);
    const bool closes = own.segment + 1 == run.segments;
    if (closes && number + 1 + (warps - 1) * run.segments >= run.rest) return spread_item(p, run, warp, found);
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

// Sums of items, in shared memory: `count` of them from `slot` on are added to `total`, one behind the other.
__device__ __forceinline__ void add_kept(float (&total)[TILES][4], const float4 *kept, int slot, int count) {
    for (int i = slot; i < slot + count; i++)
#pragma unroll
        for (int n = 0; n < TILES; n++) add_to(total[n], kept[(i * TILES + n) * 32]);
}

// Where nobody has handed a sum on: no sum has these bits. So a sum says by itself that it is there.
#define NOBODYS 0xFFFFFFFFu

// The sum of the items that lead, from the last warp that has one: to the next block
__device__ __forceinline__ void pass_on(const Product &p, const Run &run, const float4 *kept, word counter) {
    const int lane = threadIdx.x & 31;
    __syncwarp();
    const int before = lane == 0 ? counted_here(counter) : 0;
    if (__shfl_sync(0xFFFFFFFFu, before, 0) != run.lead - 1) return;
    __syncwarp();  // a shuffle does not put memory in order
    float total[TILES][4];
    clear(total);
    add_kept(total, kept, run.end - run.lead - run.rest, run.lead);
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (n * 8 + 2 * (lane & 3) < p.rows) write_now((float4 *)p.handed + (blockIdx.x * TILES + n) * 32 + lane, four(total[n]));
}

// The same, from the block before: into shared memory. That one waits for nobody before it hands its sum on, and it runs: blocks start
// in the order of their numbers, and even if they did not, a device has room for all of a product's at once.
__device__ __forceinline__ void take_over(const Product &p, float4 *to) {
    float4 *from = (float4 *)p.handed + (blockIdx.x - 1) * TILES * 32 + (threadIdx.x & 31);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        if (n * 8 + 2 * (int)(threadIdx.x & 3) >= p.rows) continue;
        uint4 found;
        do found = read_now(from + n * 32);
        while (found.x == NOBODYS || found.y == NOBODYS || found.z == NOBODYS || found.w == NOBODYS);
        *(uint4 *)(to + n * 32) = found;
        const float nobodys = __uint_as_float(NOBODYS);
        write_now(from + n * 32, make_float4(nobodys, nobodys, nobodys, nobodys));
    }
}

// What is added to sums of a unit, as this lane has them: it is there before the sums are
__device__ __forceinline__ void read_residual(const Product &p, float (&residual)[TILES][4], int tall) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int output = tall * 16 + (lane >> 2) + 8 * (c >> 1), row = n * 8 + 2 * (lane & 3) + (c & 1);
            const bool there = p.residual && output < p.outputs && row < p.rows;
            residual[n][c] = there ? residual_at(p, row, output) : 0.0f;
        }
}

// Sums of the units whose items the warps have shared, but for those that lead
__device__ __forceinline__ void add_inside(const Product &p, const Run &run, const float4 *kept, int taken) {
    const int begin = quotient(run.rest, p.per_segment), end = quotient(run.end - run.lead, p.per_segment);
    int tall = begin + (threadIdx.x >> 5);
    float residual[TILES][4];
    if (tall < end) read_residual(p, residual, tall);
    __syncthreads();
    for (; tall < end; tall += blockDim.x >> 5) {
        const int missing = max(run.rest - tall * run.segments, 0);  // that the block before has
        float total[TILES][4];
        clear(total);
        if (missing) add_kept(total, kept, taken, 1);
        add_kept(total, kept, tall * run.segments + missing - run.rest, run.segments - missing);
        finish(p, total, tall, [&](int n, int c, int, int) { return residual[n][c]; });
        if (tall + (blockDim.x >> 5) < end) read_residual(p, residual, tall + (blockDim.x >> 5));
    }
}

extern "C" __global__ void BOUNDS rows_product(const __grid_constant__ Product p) {
    extern __shared__ __align__(16) byte rows[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const Run run = run_of(p, segments);
    float4 *kept = (float4 *)(rows + segments * bytes) + lane;  // of a warp its own unit, then items that are shared, and what is taken over
    const word barriers = (word)__cvta_generic_to_shared(rows) + p.barriers, counter = barriers + segments * 8;
    int row_of[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) row_of[n] = kept_apart(row_at(p, n));
    Item own;
    bool live = first_item(p, run, own);
    // Weights hang on nothing that runs before this kernel: the first are on their way before it waits.
    Unit unit;
    load_unit(unit, own.at, lane, live);
    clear_rows(p, rows, bytes, segments);
    if (threadIdx.x < segments) make_barrier(barriers + threadIdx.x * 8, ARRIVALS * p.rows);
    if (threadIdx.x == 0) *(int *)(rows + p.barriers + segments * 8) = 0;
    __syncthreads();
    begin_turn(p);
    bring_all_rows(p, (word)__cvta_generic_to_shared(rows), bytes, segments, barriers);
#pragma unroll 1
    while (live) {
        Item next = own;
        const int number = number_of(run, own);
        const bool more = next_item(p, run, own, next), whole = number < run.rest;
        float sums[TILES][4];
        await_copies(barriers + own.segment * 8);
        add_own_item(p, sums, unit, own, next, more, rows + own.segment * bytes, row_of);
        float4 *place = kept + (whole ? warp : number - run.rest) * TILES * 32;
        if (whole) add_before(sums, own.segment > 0 ? place : nullptr);
        if (whole && own.segment == segments - 1) {
            finish(p, sums, own.tall);
        } else {
#pragma unroll
            for (int n = 0; n < TILES; n++) place[n * 32] = four(sums[n]);
            if (leads(run, number)) pass_on(p, run, kept, counter);
        }
        own = next;
        live = more;
    }
    if (run.rest < run.end) {
        const int taken = run.end - run.rest;
        if (p.granule != segments && quotient(run.first, p.per_segment) * segments != run.first && warp == warps - 1)
            take_over(p, kept + taken * TILES * 32);
        add_inside(p, run, kept, taken);
    }
    end_turn(p);
}
#else
// Where the share of a block begins, of so many
__device__ __forceinline__ int share_of(int all, int block) { return (int)((long long)all * block / gridDim.x); }

extern "C" __global__ void BOUNDS rows_product(const __grid_constant__ Product p) {
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
