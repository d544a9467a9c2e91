/* One team of threads that lives as long as its owner. A job is run by the caller and by whichever members come in time.
 *
 * A job is a sequence of loops that every member walks through with its own `member`. The items of a loop are claimed in
 * pieces; a loop is over when its items are done, not when everybody has come: a member that the machine holds up holds up
 * nobody unless it has an item in hand, and when it comes late it finds the loops over and walks on. Which member computes what is
 * never part of a result: items are outputs, and an output is computed from its own inputs alone. Between loops a job only
 * reads. Whoever waits spins for a moment and then sleeps, so a busy machine gets its processors back. */

#ifndef ONEDRAW_THREAD_POOL_H
#define ONEDRAW_THREAD_POOL_H

typedef struct thread_pool thread_pool;
typedef struct {
    thread_pool *of;
    int index, count; /* 0 is the caller */
    long loop;        /* how many loops it has left behind */
} worker;
typedef void (*job)(const void *argument, worker *m);

thread_pool *onedraw_pool_new(int count);
void onedraw_pool_free(thread_pool *t);
/* alone: too little work to wake anybody. Returns when all loops are over and nobody is inside the job any more. */
void onedraw_pool_run(thread_pool *t, job function, const void *argument, int alone);

long onedraw_pool_claim(worker *m, long total, long piece); /* the first of up to `piece` items; negative: none is left */
void onedraw_pool_done(worker *m, long items, long total);
void onedraw_pool_wait(worker *m); /* wait until the loop is over */

/* Items 0 … total - 1, claimed in pieces. */
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
