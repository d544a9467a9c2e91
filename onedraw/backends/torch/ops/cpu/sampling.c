/* Sampling by the rule of `onedraw/sampling/law.py`, given the scores: deficits, then all filters as one limit, then noise, then
 * the best token. A deficit is the best score minus a token's score, divided by the temperature; the limit is the largest deficit
 * that is kept.
 *
 * A row (the scores of one position) is one item of work of the thread pool: its result depends on its own scores alone, and is
 * computed in one order on any thread. Only integers are summed, which is exact in any order. The noise is that of
 * `onedraw/sampling/noise.py`: its integers exactly, its logarithms within two units in the last place. A row whose scores are
 * not a distribution gets the token -1. */

#include <math.h>
#include <string.h>

#include "sampling.h"
#include "rowwise.h"

#define BLOCK 512
#define MASS 1099511627776.0f /* 2^40: probability masses are integers in units of 2^-40 */
#define BINS 2048             /* the most bins of a level of `reach` */

INLINE uint32_t mix(uint32_t x) {
    x ^= x >> 16;
    x *= 0x7FEB352Du;
    x ^= x >> 15;
    x *= 0x846CA68Bu;
    return x ^ (x >> 16);
}

/* Computes log(1 + r) + e log 2, for r between sqrt(1/2) - 1 and sqrt(2) - 1, by a polynomial in r */
INLINE float logarithm_of(float r, float e) {
    float p = 7.0376836292e-2f;
    p = p * r - 1.1514610310e-1f;
    p = p * r + 1.1676998740e-1f;
    p = p * r - 1.2420140846e-1f;
    p = p * r + 1.4249322787e-1f;
    p = p * r - 1.6668057665e-1f;
    p = p * r + 2.0000714765e-1f;
    p = p * r - 2.4999993993e-1f;
    p = p * r + 3.3333331174e-1f;
    float square = r * r;
    float y = p * r * square + e * -2.12194440e-4f;
    y = y - 0.5f * square;
    return r + y + e * 0.693359375f;
}

/* Splits a positive x that is not subnormal into (1 + r) 2^e, with 1 + r between sqrt(1/2) and sqrt(2). */
INLINE void split(float x, float *r, float *e) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    int32_t from = bits - 0x3f3504f3;  /* the bits of sqrt(1/2), so that smaller mantissas get the next lower exponent */
    int32_t whole = from >> 23;
    bits -= (int32_t)((uint32_t)whole << 23);
    float m;
    memcpy(&m, &bits, 4);
    *r = m - 1.0f;
    *e = (float)whole;
}

INLINE float gumbel(uint32_t id, uint32_t first, uint32_t second) {
    int32_t odd = (int32_t)(mix(mix(id ^ first) + second) >> 8) * 2 + 1;  /* u * 2^25, for the uniform number u */
    int32_t rest = 33554432 - odd;                                        /* (1 - u) * 2^25 */
    int upper = odd > 16777216;
    /* The noise is -log(-log u). A float holds u exactly below one half, and a = 1 - u exactly above it. So log u is computed
     * from u in the lower half; in the upper half from u = 1 + r with r = -a, or, where a is too large for the polynomial,
     * from u = (1 + r) / 2 with r = 1 - 2a. */
    float u = (float)(upper ? 16777216 : odd) * 2.98023223876953125e-8f;
    float a = (float)(upper ? rest : 0) * 2.98023223876953125e-8f;
    float r, e;
    split(u, &r, &e);
    int far = a > 0.29289f;
    float upper_r = far ? 1.0f - 2.0f * a : -a, upper_e = far ? -1.0f : 0.0f;
    r = upper ? upper_r : r;
    e = upper ? upper_e : e;
    split(-logarithm_of(r, e), &r, &e);
    return -logarithm_of(r, e);
}

/* The largest number of a row; *broken is set to whether the row has a NaN. */
INLINE float largest(const float *x, long count, int *broken) {
    float best = -INFINITY;
    int none = 0;
    for (long i = 0; i < count; i++) {
        best = x[i] > best ? x[i] : best;
        none |= x[i] != x[i];
    }
    *broken = none;
    return best;
}

/* The smallest x[i] up to which the weights add up to at least `target`; null weights are ones. The x are not negative, so
 * they sort like their bits. The search is a radix select: it finds eleven bits of the result, then ten, then ten more, by
 * histograms. */
static float reach(const float *x, const int64_t *weights, long count, int64_t target) {
    int64_t bins[BINS], below = 0;
    uint32_t found = 0;
    const int shifts[3] = {20, 10, 0}, sizes[3] = {2048, 1024, 1024};
    for (int level = 0; level < 3; level++) {
        const int shift = shifts[level], size = sizes[level], before = level ? shift + 10 : 31;
        memset(bins, 0, sizeof bins);
        for (long i = 0; i < count; i++) {
            uint32_t bits;
            memcpy(&bits, x + i, 4);
            if (bits >> before == found) bins[(bits >> shift) & (uint32_t)(size - 1)] += weights ? weights[i] : 1;
        }
        int bin = 0;
        while (bin < size - 1 && below + bins[bin] < target) below += bins[bin++];
        found = found * (uint32_t)size + (uint32_t)bin;
    }
    float t;
    memcpy(&t, &found, 4);
    return t;
}

INLINE float share(const float *deficit, int64_t *masses, long count, float limit, double top_p) {
    int64_t total = 0;
    for (long i = 0; i < count; i++) {
        float mass = deficit[i] > limit ? 0.0f : exponential(-deficit[i]) * MASS;
        masses[i] = (int64_t)mass;
        total += masses[i];
    }
    double wanted = ceil(top_p * (double)total);
    int64_t target = wanted < 1.0 ? 1 : wanted < (double)total ? (int64_t)wanted : total;
    return reach(deficit, masses, count, target);
}

INLINE int64_t pick(const float *deficit, long count, float limit, const row_parameters *w) {
    float values[BLOCK], best = -INFINITY;
    int64_t token = 0;
    for (long start = 0; start < count; start += BLOCK) {
        const long size = count - start < BLOCK ? count - start : BLOCK;
        const float *here = deficit + start;
        if (w->greedy)
            for (long i = 0; i < size; i++) values[i] = 0.0f - here[i];
        else
            for (long i = 0; i < size; i++) values[i] = gumbel((uint32_t)(start + i), w->key[0], w->key[1]) - here[i];
        float most = -INFINITY;
        for (long i = 0; i < size; i++) {
            values[i] = here[i] > limit ? -INFINITY : values[i];
            most = values[i] > most ? values[i] : most;
        }
        if (most > best) {
            long i = 0;
            while (values[i] != most) i++;
            best = most;
            token = start + i;
        }
    }
    return token;
}

static void sample_row(const sampling_arguments *c, long row, int64_t *masses) {
    const row_parameters *w = c->parameters + row;
    const float *scores = c->scores + row * c->stride;
    float *deficit = c->deficits + row * c->width, limit = w->limit;
    int broken, hidden = 0;
    float best = largest(scores, c->vocab, &broken) + 0.0f;  /* adding 0 turns -0 into 0 */
    /* The raw logits are checked as well, because a ban may have replaced a NaN or an infinity in the scores. */
    if (c->raw) broken |= !(largest(c->raw + row * c->raw_stride, c->vocab, &hidden) < INFINITY) || hidden;
    for (long i = 0; i < c->vocab; i++) deficit[i] = (best - scores[i]) / w->divisor;
    for (long i = c->vocab; i < c->width; i++) deficit[i] = INFINITY;
    const int valid = !broken && best > -INFINITY && best < INFINITY;
    if (valid && w->top_k > 0) {
        float t = reach(deficit, 0, c->vocab, w->top_k);
        limit = t < limit ? t : limit;
    }
    if (valid && w->top_p < 1.0) {
        float t = share(deficit, masses, c->vocab, limit, w->top_p);
        limit = t < limit ? t : limit;
    }
    c->limits[row] = limit;
    c->tokens[row] = valid ? pick(deficit, c->vocab, limit, w) : -1;
}

typedef struct {
    const sampling_arguments *arguments;
    long rows;
} work;

static void sample_rows(const void *argument, worker *m) {
    const work *all = argument;
    PARALLEL_FOR(m, all->rows, 1, row, { sample_row(all->arguments, row, all->arguments->masses + m->index * all->arguments->width); });
}

void EXPORT(onedraw_sample)(const sampling_arguments *arguments, long rows, thread_pool *t) {
    const work all = {arguments, rows};
    onedraw_pool_run(t, sample_rows, &all, rows < 2);
}
