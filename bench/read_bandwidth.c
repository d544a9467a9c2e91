/* The bytes per second that threads read from memory, each its own part of a gigabyte in huge pages: the best of several runs. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#define BYTES (1L << 30)
#define RUNS 6
#define MOST 64

typedef uint64_t numbers __attribute__((vector_size(64)));
typedef struct {
    const char *from;
    long size;
    numbers sum;
} part;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void *add(void *argument) {
    part *p = argument;
    numbers sums[4] = {{0}};
    for (long i = 0; i + 256 <= p->size; i += 256)
        for (long k = 0; k < 4; k++) {
            numbers next;
            memcpy(&next, p->from + i + 64 * k, 64);
            sums[k] += next;
        }
    p->sum = sums[0] + sums[1] + sums[2] + sums[3];
    return 0;
}

double read_bandwidth(int threads) {
    char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED || threads < 1 || threads > MOST) return 0;
    madvise(memory, BYTES, MADV_HUGEPAGE);
    memset(memory, 1, BYTES);
    double best = 0;
    for (int run = 0; run < RUNS; run++) {
        part parts[MOST];
        pthread_t ids[MOST];
        double begin = now();
        for (int i = 0; i < threads; i++) {
            parts[i] = (part){memory + BYTES / threads * i, BYTES / threads, {0}};
            pthread_create(ids + i, 0, add, parts + i);
        }
        for (int i = 0; i < threads; i++) pthread_join(ids[i], 0);
        double found = (double)BYTES / (now() - begin);
        best = found > best ? found : best;
    }
    munmap(memory, BYTES);
    return best;
}
