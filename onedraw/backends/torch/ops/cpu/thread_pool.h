/* A pool of threads that lives as long as its owner. A job is run by the caller and by those threads that wake up in time.
 *
 * A job is a sequence of parallel loops, which every thread runs through with its own `worker`. Threads claim the items of a
 * loop in pieces. A loop is over when all its items are done, not when all threads have reached it: a thread that the system
 * delays holds up the others only while it has claimed an item, and when it arrives late it finds the loops over and skips
 * them. The thread that computes an item never affects a result: items are outputs, and each is computed from its own inputs
 * in one order. Outside its loops a job only reads. A waiting thread spins for a moment and then sleeps, so that a busy
 * machine gets its processors back. */

#ifndef ONEDRAW_THREAD_POOL_H
#define ONEDRAW_THREAD_POOL_H

typedef struct thread_pool thread_pool;
typedef struct {
    thread_pool *of;
    int index, count;  /* index: 0 for the caller; count: threads of the job */
    long loop;  /* number of loops that this thread has completed */
} worker;
typedef void (*job)(const void *argument, worker *m);

thread_pool *onedraw_pool_new(int count);
void onedraw_pool_free(thread_pool *t);
/* Runs a job and returns when all its loops are over and no thread is inside it. `alone`: the caller runs it without waking
 * threads. */
void onedraw_pool_run(thread_pool *t, job function, const void *argument, int alone);

/* Returns the first of up to `piece` items that the thread now has to compute, or a negative number if none is left. */
long onedraw_pool_claim(worker *m, long total, long piece);
void onedraw_pool_done(worker *m, long items, long total); /* reports items as done; the last report ends the loop */
void onedraw_pool_wait(worker *m);                         /* waits until the loop is over */

/* A parallel loop: runs a block for items i = 0 … total - 1, which threads claim `piece` at a time. */
#define PARALLEL_FOR(m, total, piece, i, ...)                                                                              \
    do {                                                                                                            \
        long loop_total = (total), loop_piece = (piece);                                                          \
        for (long loop_at; (loop_at = onedraw_pool_claim(m, loop_total, loop_piece)) >= 0;) {                   \
            long loop_end = loop_at + loop_piece < loop_total ? loop_at + loop_piece : loop_total;           \
            for (long i = loop_at; i < loop_end; i++) __VA_ARGS__                                                 \
            onedraw_pool_done(m, loop_end - loop_at, loop_total);                                                \
        }                                                                                                           \
        onedraw_pool_wait(m);                                                                                      \
    } while (0)

#endif
