// Products of packed weights with few rows. activations.py defines the arithmetic.
//
// In: units of a weight and packed activations (`ProductArguments`, work_items.cuh). Out: [rows, outputs]. A unit is sixteen
// outputs, a segment 1,024 inputs, and a work item one unit by one segment. nvrtc.py compiles this file at run time for a KIND,
// TILES, WARPS (maximum per block), REGISTERS (maximum per thread; 0: no limit) and WHOLE_K, which selects how items are split
// among thread blocks:
//   WHOLE_K 1  A thread block computes all segments of some units; if units do not divide evenly, it computes an equal share of
//              all items and passes its partial sum of the last unit to the next block. Rows of all segments are in shared
//              memory, with a barrier per segment. A warp computes all segments of a unit in order while there is a unit for
//              every warp; the items of the remaining units are distributed over all warps and their sums added at the end.
//   WHOLE_K 0  Items are ordered by segment, and every block computes an equal share of them, so it reads rows of one or two
//              segments. Sums of items go to global memory; the warp that finishes the last segment of a unit adds them.
// A span is 256 inputs. Products have tiles of eight rows; a lane has four accumulators per tile (work_items.cuh).

#include "work_items.cuh"

#if REGISTERS && !MINIMA  // types with float16 minima need more registers than this limit
#define BOUNDS __maxnreg__(REGISTERS)
#else
#define BOUNDS __launch_bounds__(WARPS * 32, 1)
#endif

// Programmatic dependent launch (PDL). A product launched with OVERLAPS_PREVIOUS does not wait at its start: it reads the same
// rows as the preceding product, and these are complete, because that product was launched with OVERLAPS_NEXT and waited for them
// before it let this one start. It waits for the preceding product at its own end instead, so that a kernel that waits for this
// one has waited for both. The rows that it reads cannot be stale in L1, because every launch starts with an empty L1.
__device__ __forceinline__ void begin_pdl(const ProductArguments &p) {
    if (p.pdl == (PDL | OVERLAPS_NEXT)) wait_previous_grid();
    if (p.pdl & PDL) launch_dependents();
    if (p.pdl == PDL) wait_previous_grid();
}

__device__ __forceinline__ void end_pdl(const ProductArguments &p) {
    if (p.pdl & OVERLAPS_PREVIOUS) wait_previous_grid();
}

// Computes the sums of an item. `unit` holds the weights of its first span, and afterwards those of the first span of `next`.
__device__ __forceinline__ void add_own_item(const ProductArguments &p, float (&sums)[TILES][4], Unit &unit, const Item &own, const Item &next, bool more,
                                             const byte *rows, const int (&row_offsets)[TILES]) {
    const word rows_at = (word)__cvta_generic_to_shared(rows);
    word own_rows[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) own_rows[n] = opaque(rows_at + row_offsets[n]);
    clear(sums);
    add_item(p, sums, unit, own.at, own.live, next.at, more, rows, own_rows);
}

#if WHOLE_K
// The items [first, end) of a block, ordered by unit. Up to `distributed_from`, warp w computes every `warps`-th whole unit; the
// items after it are distributed over all warps. If blocks share units, the last `carried` items belong to a unit that the next
// block completes; they are computed first, because the next block waits for their sum.
struct BlockItems {
    int first, distributed_from, end, carried, segments;
};

// Computes n / d, given per = 1 / d. The result is exact for n below 2^21, and work_split.py (MAX_ITEMS) ensures that n is
// smaller.
__device__ __forceinline__ int quotient(int n, float per) { return (int)(((float)n + 0.5f) * per); }

__device__ __forceinline__ int items_before(const ProductArguments &p, int block) { return (block * p.even + min(block, p.odd)) * p.granule; }

__device__ __forceinline__ BlockItems block_items(const ProductArguments &p, int segments) {
    const int first = items_before(p, blockIdx.x), end = items_before(p, blockIdx.x + 1), warps = blockDim.x >> 5;
    if (p.granule != segments) return {first, first, end, end - quotient(end, p.per_segment) * segments, segments};
    const int height = quotient(end - first, p.per_segment);
    return {first, first + (height - height % warps) * segments, end, 0, segments};
}

__device__ __forceinline__ int item_number(const BlockItems &own_items, const Item &item) { return item.unit_index * own_items.segments + item.segment; }

__device__ __forceinline__ bool is_carried(const BlockItems &own_items, int number) { return number >= own_items.end - own_items.carried; }

// Finds item number `spread` of the items distributed over all warps; returns false if there is none.
__device__ __forceinline__ bool distributed_item(const ProductArguments &p, const BlockItems &own_items, int spread, Item &found) {
    if (spread >= own_items.end - own_items.distributed_from) return false;
    const int number = (spread < own_items.carried ? own_items.end : own_items.distributed_from) - own_items.carried + spread;
    found.unit_index = quotient(number, p.per_segment);
    found.segment = number - found.unit_index * own_items.segments;
    locate(p, found);
    return true;
}

__device__ __forceinline__ bool first_item(const ProductArguments &p, const BlockItems &own_items, Item &found) {
    const int warp = threadIdx.x >> 5;
    if (own_items.first == own_items.distributed_from) return distributed_item(p, own_items, warp, found);
    found.unit_index = quotient(own_items.first, p.per_segment) + warp;
    found.segment = 0;
    locate(p, found);
    return true;
}

// Finds the item that this warp computes after `own`; returns false if there is none.
__device__ __forceinline__ bool next_item(const ProductArguments &p, const BlockItems &own_items, const Item &own, Item &found) {
    const int warp = threadIdx.x >> 5, warps = blockDim.x >> 5, number = item_number(own_items, own);
    if (number >= own_items.distributed_from) return distributed_item(p, own_items, number - (is_carried(own_items, number) ? own_items.end : own_items.distributed_from) + own_items.carried + warps, found);
    const bool closes = own.segment + 1 == own_items.segments;
    if (closes && number + 1 + (warps - 1) * own_items.segments >= own_items.distributed_from) return distributed_item(p, own_items, warp, found);
    found.unit_index = own.unit_index + (closes ? warps : 0);
    found.segment = closes ? 0 : own.segment + 1;
    locate(p, found);
    return true;
}

// Copies the rows of all segments to shared memory. One warp copies one row of one segment, and its lanes arrive at the segment's
// barrier.
#define ARRIVALS 32

__device__ __forceinline__ void copy_all_rows(const ProductArguments &p, word to, int bytes, int segments, word barriers) {
    const int lane = threadIdx.x & 31, warps = blockDim.x >> 5;
#pragma unroll 1
    for (int pair = threadIdx.x >> 5; pair < segments * p.rows; pair += warps) {
        const int segment = pair / p.rows, row = pair - segment * p.rows, span = segment * SEGMENT, live = min(SEGMENT, p.spans - span);
        const long long at = (long long)row * p.spans + span;
        const word own = to + segment * bytes + row * ROW_BYTES;
        const halfword *x = p.x + at * SPAN + lane * 8;
#pragma unroll
        for (int i = 0; i < SEGMENT; i++)
            if (i < live) copy_async_16(own + (i * SPAN + lane * 8) * 2, x + i * SPAN);
        if (lane < live * 2) copy_async_16(own + SUMS_AT + lane * 16, p.sums + at * 16 + lane * 8);
        if (lane == 31) copy_async_4(to + segment * bytes + factors_at(p) + row * 4, p.factors + at);
        arrive_after_copies(barriers + segment * 8);
    }
}

// Adds `count` sums of items in shared memory, starting with number `slot`, to `total` in order.
__device__ __forceinline__ void add_stored(float (&total)[TILES][4], const float4 *stored, int slot, int count) {
    for (int i = slot; i < slot + count; i++)
#pragma unroll
        for (int n = 0; n < TILES; n++) add_to(total[n], stored[(i * TILES + n) * 32]);
}

// The bits of a carry entry that has not been sent. They are a NaN that no sum produces, so no separate flag is needed.
#define CARRY_EMPTY 0xFFFFFFFFu

// Sends the sum of the carried items to the next block. Every warp that finishes a carried item calls this, and the last one
// sends.
__device__ __forceinline__ void send_carry(const ProductArguments &p, const BlockItems &own_items, const float4 *stored, word counter) {
    const int lane = threadIdx.x & 31;
    __syncwarp();
    const int before = lane == 0 ? atomic_increment_shared(counter) : 0;
    if (__shfl_sync(0xFFFFFFFFu, before, 0) != own_items.carried - 1) return;
    // Other warps stored their sums before they incremented the counter. This barrier orders those stores before the loads below,
    // which the shuffle above does not, because it exchanges registers without ordering memory.
    __syncwarp();
    float total[TILES][4];
    clear(total);
    add_stored(total, stored, own_items.end - own_items.carried - own_items.distributed_from, own_items.carried);
#pragma unroll
    for (int n = 0; n < TILES; n++)
        if (n * 8 + 2 * (lane & 3) < p.rows) store_relaxed((float4 *)p.carry + (blockIdx.x * TILES + n) * 32 + lane, four(total[n]));
}

// Receives the carry of the preceding block into shared memory. That block sends its carry without waiting for another block, and
// it is running: blocks start in order of their index, and all blocks of a product fit on the device at once.
__device__ __forceinline__ void receive_carry(const ProductArguments &p, float4 *to) {
    float4 *from = (float4 *)p.carry + (blockIdx.x - 1) * TILES * 32 + (threadIdx.x & 31);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        if (n * 8 + 2 * (int)(threadIdx.x & 3) >= p.rows) continue;
        uint4 found;
        do found = load_relaxed(from + n * 32);
        while (found.x == CARRY_EMPTY || found.y == CARRY_EMPTY || found.z == CARRY_EMPTY || found.w == CARRY_EMPTY);
        *(uint4 *)(to + n * 32) = found;
        const float empty = __uint_as_float(CARRY_EMPTY);
        store_relaxed(from + n * 32, make_float4(empty, empty, empty, empty));
    }
}

// Loads this lane's residuals of a unit. They are loaded before the unit's sums are complete, which hides the latency of memory.
__device__ __forceinline__ void read_residual(const ProductArguments &p, float (&residual)[TILES][4], int unit_index) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int output = unit_index * 16 + (lane >> 2) + 8 * (c >> 1), row = n * 8 + 2 * (lane & 3) + (c & 1);
            const bool there = p.residual && output < p.outputs && row < p.rows;
            residual[n][c] = there ? residual_at(p, row, output) : 0.0f;
        }
}

// Adds the sums of distributed items and writes their units, except for the carried items. `taken`: slot of the received carry.
__device__ __forceinline__ void finish_distributed(const ProductArguments &p, const BlockItems &own_items, const float4 *stored, int taken) {
    const int begin = quotient(own_items.distributed_from, p.per_segment), end = quotient(own_items.end - own_items.carried, p.per_segment);
    int unit_index = begin + (threadIdx.x >> 5);
    float residual[TILES][4];
    if (unit_index < end) read_residual(p, residual, unit_index);
    __syncthreads();
    for (; unit_index < end; unit_index += blockDim.x >> 5) {
        // Segments of this unit that the preceding block computed.
        const int missing = max(own_items.distributed_from - unit_index * own_items.segments, 0);
        float total[TILES][4];
        clear(total);
        if (missing) add_stored(total, stored, taken, 1);
        add_stored(total, stored, unit_index * own_items.segments + missing - own_items.distributed_from, own_items.segments - missing);
        write_outputs(p, total, unit_index, [&](int n, int c, int, int) { return residual[n][c]; });
        if (unit_index + (blockDim.x >> 5) < end) read_residual(p, residual, unit_index + (blockDim.x >> 5));
    }
}

extern "C" __global__ void BOUNDS few_rows_product(const __grid_constant__ ProductArguments p) {
    extern __shared__ __align__(16) byte rows[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const BlockItems own_items = block_items(p, segments);
    // Slots for sums in shared memory. While a warp computes whole units, it keeps the sum of its current unit in slot `warp`;
    // later the same slots hold the sums of the distributed items. The slot after these holds the received carry.
    float4 *stored = (float4 *)(rows + segments * bytes) + lane;
    const word barriers = (word)__cvta_generic_to_shared(rows) + p.barriers, counter = barriers + segments * 8;
    int row_offsets[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) row_offsets[n] = opaque(row_offset(p, n));
    Item own;
    bool live = first_item(p, own_items, own);
    // Weights do not depend on the preceding kernel: their first loads are issued before waiting for it.
    Unit unit;
    load_unit(unit, own.at, lane, live);
    clear_rows(p, rows, bytes, segments);
    if (threadIdx.x < segments) init_barrier(barriers + threadIdx.x * 8, ARRIVALS * p.rows);
    if (threadIdx.x == 0) *(int *)(rows + p.barriers + segments * 8) = 0;
    __syncthreads();
    begin_pdl(p);
    copy_all_rows(p, (word)__cvta_generic_to_shared(rows), bytes, segments, barriers);
#pragma unroll 1
    while (live) {
        Item next = own;
        const int number = item_number(own_items, own);
        const bool more = next_item(p, own_items, own, next), whole = number < own_items.distributed_from;
        float sums[TILES][4];
        wait_barrier(barriers + own.segment * 8);
        add_own_item(p, sums, unit, own, next, more, rows + own.segment * bytes, row_offsets);
        float4 *place = stored + (whole ? warp : number - own_items.distributed_from) * TILES * 32;
        if (whole) add_previous(sums, own.segment > 0 ? place : nullptr);
        if (whole && own.segment == segments - 1) {
            write_outputs(p, sums, own.unit_index);
        } else {
#pragma unroll
            for (int n = 0; n < TILES; n++) place[n * 32] = four(sums[n]);
            if (is_carried(own_items, number)) send_carry(p, own_items, stored, counter);
        }
        own = next;
        live = more;
    }
    if (own_items.distributed_from < own_items.end) {
        const int taken = own_items.end - own_items.distributed_from;
        if (p.granule != segments && quotient(own_items.first, p.per_segment) * segments != own_items.first && warp == warps - 1)
            receive_carry(p, stored + taken * TILES * 32);
        finish_distributed(p, own_items, stored, taken);
    }
    end_pdl(p);
}
#else
// The first item of a block, where `all` items are divided equally among the blocks.
__device__ __forceinline__ int first_item_of(int all, int block) { return (int)((long long)all * block / gridDim.x); }

extern "C" __global__ void BOUNDS few_rows_product(const __grid_constant__ ProductArguments p) {
    extern __shared__ __align__(16) byte rows[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, bytes = buffer_bytes(p);
    const int end = first_item_of(segments * p.unit_count, blockIdx.x + 1);
    int begin = first_item_of(segments * p.unit_count, blockIdx.x);
    int row_offsets[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) row_offsets[n] = opaque(row_offset(p, n));
    clear_rows(p, rows, bytes, p.buffers);
    bool starts = true;
    while (begin < end) {  // more than one iteration only if the block's segments do not fit into shared memory at once
        const int segment = begin / p.unit_count, stop = min(end, (segment + p.buffers) * p.unit_count);
        // Blocks with different segments of the same units start at different units, so that the final additions, which the last
        // block to reach a unit makes, are spread over all blocks.
        const int items = stop - begin, turn = (int)((long long)items * segment / segments);
        const int max_uncounted = segments > FEW_SEGMENTS || items < MANY_ITEMS * warps ? 1 : MAX_UNCOUNTED;
        int item = warp, uncounted = 0, mine = 0;
        Item own = locate_item(p, begin + rotated(min(item, items - 1), turn, items));
        Unit unit;
        load_unit(unit, own.at, lane, item < items);
        __syncthreads();
        if (starts) begin_pdl(p);
        starts = false;
        for (int i = segment; i * p.unit_count < stop; i++) copy_rows(p, (word)__cvta_generic_to_shared(rows) + (i - segment) * bytes, i * SEGMENT);
        asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
        __syncthreads();
#pragma unroll 1
        for (; item < items; item += warps) {
            const bool more = item + warps < items;
            const Item next = locate_item(p, begin + rotated(more ? item + warps : item, turn, items));
            float sums[TILES][4];
            add_own_item(p, sums, unit, own, next, more, rows + (own.segment - segment) * bytes, row_offsets);
            store_partial_sums(p, (float4 *)p.partial_sums + ((long long)own.unit_index * segments + own.segment) * TILES * 32 + lane, sums);
            if (lane == uncounted) mine = own.unit_index;
            if (++uncounted == max_uncounted || !more) {
                finish_counted(p, mine, uncounted, segments);
                uncounted = 0;
            }
            own = next;
        }
        begin = stop;
        if (begin == end) end_pdl(p);  // inside the loop, because after it the compiler would spill registers
    }
}
#endif
