// Products of packed weights with few rows. The rule of the arithmetic stands in spans.py.
//
// In: units of a weight and rows made ready (`Product`, packed_items.cuh). Out: [rows, outputs]. Compiled at run time by nvrtc.py
// for a KIND, TILES, WARPS (of a block, at most) and INSIDE, which says how items are shared out:
//   INSIDE 1  a block of threads has all segments of some outputs. Rows of all segments lie in shared memory, and so do the sums of
//             items, which the block adds up in the end.
//   INSIDE 0  items stand segment by segment, and every block has an equal share of them, so it needs rows of one segment or two.
//             Sums of items go to memory; whoever is the last to finish one of an output adds them.

#include "packed_items.cuh"

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) rows_product(const __grid_constant__ Product p) {
    extern __shared__ __align__(16) byte rows[];
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, warps = blockDim.x >> 5;
    const int segments = (p.spans + SEGMENT - 1) / SEGMENT, buffers = INSIDE ? segments : p.buffers, bytes = buffer_bytes(p);
    // Where INSIDE, `begin` and `end` are units of outputs, and items count from `begin`. Else they are items.
    const int end = INSIDE ? min((int)(blockIdx.x + 1) * p.height, p.tall) : (int)((long long)segments * p.tall * (blockIdx.x + 1) / gridDim.x);
    int begin = INSIDE ? blockIdx.x * p.height : (int)((long long)segments * p.tall * blockIdx.x / gridDim.x);
    const word rows_at = (word)__cvta_generic_to_shared(rows);
    float4 *kept = INSIDE ? (float4 *)(rows + buffers * bytes) + lane : (float4 *)p.parts + lane;
    int row_of[TILES];
#pragma unroll
    for (int n = 0; n < TILES; n++) row_of[n] = kept_apart(row_at(p, n));
    clear_rows(p, rows, bytes, buffers);
    bool waits = p.pdl, starts = true;
    while (begin < end) {  // once, but where there is no room for all sums, or for rows of all segments
        const int count = INSIDE ? min(p.step, end - begin) : p.tall, first = INSIDE ? begin : 0;
        const int segment = INSIDE ? 0 : begin / count, stop = INSIDE ? segments * count : min(end, (segment + buffers) * count);
        // Blocks that have other segments of the same outputs begin elsewhere among them: so each is the last to finish some of them,
        // and none has to add up all.
        const int from = INSIDE ? 0 : begin, items = stop - from, turn = INSIDE ? 0 : (int)((long long)items * segment / segments);
        const int most_unsettled = segments > FEW_SEGMENTS || items < MANY_ITEMS * warps ? 1 : MOST_UNSETTLED;
        int item = warp, unsettled = 0, mine = 0;
        Item own = place_of(p, from + turned(min(item, items - 1), turn, items), first, count);
        // Weights hang on nothing that runs before this kernel: the first are on their way before it waits.
        Unit unit;
        load_unit(unit, own.at, lane, item < items);
        __syncthreads();
        if (!INSIDE || starts) {
#if __CUDA_ARCH__ >= 900
            if (waits) asm volatile("griddepcontrol.launch_dependents; griddepcontrol.wait;" ::: "memory");
#endif
            waits = starts = false;
            for (int i = segment; i * count < stop; i++) bring_rows(p, rows_at + (i - segment) * bytes, i * SEGMENT);
            asm volatile("cp.async.commit_group; cp.async.wait_group 0;" ::: "memory");
            __syncthreads();
        }
#pragma unroll 1
        for (; item < items; item += warps) {
            const bool more = item + warps < items;
            const Item next = place_of(p, from + turned(more ? item + warps : item, turn, items), first, count);
            const int buffer = (own.segment - segment) * bytes;
            word own_rows[TILES];
            float sums[TILES][4];
            clear(sums);
#pragma unroll
            for (int n = 0; n < TILES; n++) own_rows[n] = kept_apart(rows_at + buffer + row_of[n]);
            add_item(p, sums, unit, own.at, own.live, next.at, more, rows + buffer, own_rows);
            if (INSIDE) {
#pragma unroll
                for (int n = 0; n < TILES; n++) kept[(item * TILES + n) * 32] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
            } else {
                keep(p, kept + ((long long)own.tall * segments + own.segment) * TILES * 32, sums);
                if (lane == unsettled) mine = own.tall;
                if (++unsettled == most_unsettled || !more) {
                    settle(p, mine, unsettled, segments);
                    unsettled = 0;
                }
            }
            own = next;
        }
        if (INSIDE) {
            __syncthreads();
            add_inside(p, kept, segments, first, count);
        }
        begin = INSIDE ? begin + count : stop;
    }
}
