/* A pool of threads: see thread_pool.h. Threads spin on an atomic number for a moment and then sleep on a condition variable.
 *
 * `round` is odd while a job is open. A thread increments `running` and then checks that the job is still open; the caller
 * closes the job and then checks `running`. One of the two always sees the other's change, so the caller never returns while a
 * thread is in the job. `place` holds the number of the current loop in its upper 32 bits, and the next item that no thread
 * has claimed in its lower 32. */

#include "thread_pool.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#define SPINS 3000 /* times a thread checks a number before it sleeps, some tens of microseconds in all */
#define SHIFT 32   /* bits of an item's number in `place` */

struct thread_pool {
    int count;  /* threads, including the caller */
    int forks;  /* value of the global `forks` when the threads were created */
    job function;
    const void *argument;
    atomic_long round, place, done, running, sleepers;
    atomic_int stopping;
    pthread_mutex_t lock, caller;
    pthread_cond_t changed;
    pthread_t *threads;
};

typedef struct {
    thread_pool *of;
    int index;
} start;

static atomic_int forks;
static void count_fork(void) { atomic_fetch_add(&forks, 1); }
static void watch_forks(void) { pthread_atfork(0, 0, count_fork); }

static inline void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

/* Waits while *number >> shift is `old`. A thread increments `sleepers` before it checks the number a last time, and a thread
 * that changes a number checks `sleepers` afterwards, so no wake-up is lost. */
static void wait_while(thread_pool *t, atomic_long *number, int shift, long old) {
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(number, memory_order_acquire) >> shift != old) return;
        pause_cpu();
    }
    pthread_mutex_lock(&t->lock);
    atomic_fetch_add(&t->sleepers, 1);
    while (atomic_load(number) >> shift == old) pthread_cond_wait(&t->changed, &t->lock);
    atomic_fetch_sub(&t->sleepers, 1);
    pthread_mutex_unlock(&t->lock);
}

static void wake(thread_pool *t) {
    if (!atomic_load(&t->sleepers)) return;
    pthread_mutex_lock(&t->lock);
    pthread_cond_broadcast(&t->changed);
    pthread_mutex_unlock(&t->lock);
}

static void next_loop(thread_pool *t, long loop) {
    atomic_store(&t->done, 0);
    atomic_store(&t->place, (loop + 1) << SHIFT);
    wake(t);
}

long onedraw_pool_claim(worker *m, long total, long piece) {
    thread_pool *t = m->of;
    long place = atomic_load(&t->place);
    for (;;) {
        long item = place & ((1L << SHIFT) - 1);
        if (place >> SHIFT != m->loop) return -1;
        if (item >= total) {  /* a loop without items is ended here, as no thread reports items of it */
            if (!total && atomic_compare_exchange_strong(&t->place, &place, (m->loop + 1) << SHIFT)) wake(t);
            return -1;
        }
        if (atomic_compare_exchange_weak(&t->place, &place, place + piece)) return item;
    }
}

void onedraw_pool_done(worker *m, long items, long total) {
    if (atomic_fetch_add(&m->of->done, items) + items == total) next_loop(m->of, m->loop);
}

void onedraw_pool_wait(worker *m) {
    wait_while(m->of, &m->of->place, SHIFT, m->loop);
    m->loop++;
}

static void *worker_main(void *arguments) {
    start own = *(start *)arguments;
    free(arguments);
    thread_pool *t = own.of;
    for (long seen = 0;;) {
        wait_while(t, &t->round, 0, seen);
        if (atomic_load(&t->stopping)) return 0;
        seen = atomic_load(&t->round);
        if (seen % 2 == 0) continue;
        atomic_fetch_add(&t->running, 1);
        if (atomic_load(&t->round) == seen) {
            worker m = {t, own.index, t->count, 0};
            t->function(t->argument, &m);
        }
        atomic_fetch_sub(&t->running, 1);
        wake(t);
    }
}

static int has_threads(const thread_pool *t) { return t->forks == atomic_load(&forks); }

/* After a fork the child has none of the threads, and locks that a thread held stay locked for ever. So the pool gets new locks,
 * and from then on the caller works alone. */
static void reset_after_fork(thread_pool *t) {
    pthread_mutex_init(&t->lock, 0);
    pthread_mutex_init(&t->caller, 0);
    pthread_cond_init(&t->changed, 0);
    atomic_store(&t->sleepers, 0);
    atomic_store(&t->running, 0);
    t->count = 1;
    t->forks = atomic_load(&forks);
}

__attribute__((visibility("default"))) thread_pool *onedraw_pool_new(int count) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    thread_pool *t = calloc(1, sizeof *t);
    if (!t) return 0;
    t->threads = calloc(count > 0 ? count : 1, sizeof *t->threads);
    if (!t->threads) { free(t); return 0; }
    t->forks = atomic_load(&forks);
    pthread_mutex_init(&t->lock, 0);
    pthread_mutex_init(&t->caller, 0);
    pthread_cond_init(&t->changed, 0);
    t->count = 1;
    for (int i = 1; i < count; i++) {  /* if a thread cannot be created, fewer threads give the same results */
        start *own = malloc(sizeof *own);
        if (!own) break;
        own->of = t;
        own->index = i;
        if (pthread_create(&t->threads[i], 0, worker_main, own)) { free(own); break; }
        t->count = i + 1;
    }
    return t;
}

void onedraw_pool_run(thread_pool *t, job function, const void *argument, int alone) {
    if (!has_threads(t)) reset_after_fork(t);
    pthread_mutex_lock(&t->caller);
    int open = !alone && t->count > 1;
    worker m = {t, 0, open ? t->count : 1, 0};
    atomic_store(&t->place, 0);
    atomic_store(&t->done, 0);
    if (open) {
        t->function = function;
        t->argument = argument;
        atomic_fetch_add(&t->round, 1);
        wake(t);
    }
    function(argument, &m);
    if (open) {
        atomic_fetch_add(&t->round, 1);
        for (long running; (running = atomic_load(&t->running));) wait_while(t, &t->running, 0, running);
    }
    pthread_mutex_unlock(&t->caller);
}

__attribute__((visibility("default"))) void onedraw_pool_free(thread_pool *t) {
    if (!t) return;
    if (has_threads(t)) {
        atomic_store(&t->stopping, 1);
        atomic_fetch_add(&t->round, 1);
        wake(t);
        for (int i = 1; i < t->count; i++) pthread_join(t->threads[i], 0);
    }
    free(t->threads);
    free(t);
}
