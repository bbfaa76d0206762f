/* One pass of AdamW over host memory, on a pool of threads.

   Every element goes through the operations of arithmetic.py in the same order, each rounded once: no fused
   multiply-add (the file is built with -ffp-contract=off), no approximate division or root. Inputs and outputs are
   separate pointers: equal ones update in place, other ones leave the old state as it was. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

enum { BLOCK = 2048, CHUNK = 16 * BLOCK };
enum { ALL, WEIGHTS, MOMENTS }; /* the parts of an update; a part is always written in place */
static const int64_t FILL = (int64_t)1 << 24;

typedef struct {
    float scale, beta1, rest1, beta2, rest2, unroot2, eps, decay, rate;
} Scalars;

typedef struct {
    Scalars s;
    int64_t n;
    int is_split;      /* bf16 weight with a 16-bit low half, and bf16 gradient; otherwise all float */
    int is_wide;       /* float gradient of a split weight */
    int part;          /* what is written */
    const void *g, *w; /* gradient; weight, or its high half */
    const int16_t *low;
    const float *m, *v;
    void *w_out;
    int16_t *low_out;
    float *m_out, *v_out;
} Job;

static void stream(void *to, const void *from, size_t size) {
    size_t i = 0;
#ifdef __SSE2__
    if (((uintptr_t)to & 15) == 0)
        for (; i + 16 <= size; i += 16)
            _mm_stream_si128((__m128i *)((char *)to + i), _mm_loadu_si128((const __m128i *)((const char *)from + i)));
#endif
    memcpy((char *)to + i, (const char *)from + i, size - i);
}

static inline float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t to_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* The operations of arithmetic.update_ on one element; `w` is the master. */
static inline void adamw_moments(const Scalars *s, float g, float *m, float *v) {
    float x = g * s->scale;
    *m = *m * s->beta1 + x * s->rest1;
    *v = *v * s->beta2 + (x * s->rest2) * x;
}

static inline void adamw(const Scalars *s, float g, float *w, float *m, float *v) {
    adamw_moments(s, g, m, v);
    float d = __builtin_sqrtf(*v) * s->unroot2 + s->eps;
    *w = *w * s->decay - (*m / d) * s->rate;
}

CLONES static void update_split(const Scalars *scalars, int n, const uint16_t *g, const uint16_t *high, const int16_t *low,
                                const float *m, const float *v, uint16_t *high_out, int16_t *low_out, float *m_out,
                                float *v_out) {
    const Scalars s = *scalars;
#pragma GCC ivdep
    for (int i = 0; i < n; i++) {
        float w = from_bits(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]), a = m[i], b = v[i];
        adamw(&s, from_bits((uint32_t)g[i] << 16), &w, &a, &b);
        high_out[i] = (uint16_t)((to_bits(w) + 0x8000u) >> 16);
        low_out[i] = (int16_t)(uint16_t)to_bits(w);
        m_out[i] = a;
        v_out[i] = b;
    }
}

CLONES static void update_split_wide(const Scalars *scalars, int n, const float *g, const uint16_t *high,
                                     const int16_t *low, const float *m, const float *v, uint16_t *high_out,
                                     int16_t *low_out, float *m_out, float *v_out) {
    const Scalars s = *scalars;
#pragma GCC ivdep
    for (int i = 0; i < n; i++) {
        float w = from_bits(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]), a = m[i], b = v[i];
        adamw(&s, g[i], &w, &a, &b);
        high_out[i] = (uint16_t)((to_bits(w) + 0x8000u) >> 16);
        low_out[i] = (int16_t)(uint16_t)to_bits(w);
        m_out[i] = a;
        v_out[i] = b;
    }
}

CLONES static void update_whole(const Scalars *scalars, int n, const float *g, const float *weight, const float *m,
                                const float *v, float *weight_out, float *m_out, float *v_out) {
    const Scalars s = *scalars;
#pragma GCC ivdep
    for (int i = 0; i < n; i++) {
        float w = weight[i], a = m[i], b = v[i];
        adamw(&s, g[i], &w, &a, &b);
        weight_out[i] = w;
        m_out[i] = a;
        v_out[i] = b;
    }
}

CLONES static void weights_split(const Scalars *scalars, int n, const uint16_t *g, uint16_t *high, int16_t *low,
                                 const float *m, const float *v) {
    const Scalars s = *scalars;
#pragma GCC ivdep
    for (int i = 0; i < n; i++) {
        float w = from_bits(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]), a = m[i], b = v[i];
        adamw(&s, from_bits((uint32_t)g[i] << 16), &w, &a, &b);
        high[i] = (uint16_t)((to_bits(w) + 0x8000u) >> 16);
        low[i] = (int16_t)(uint16_t)to_bits(w);
    }
}

CLONES static void weights_split_wide(const Scalars *scalars, int n, const float *g, uint16_t *high, int16_t *low,
                                      const float *m, const float *v) {
    const Scalars s = *scalars;
#pragma GCC ivdep
    for (int i = 0; i < n; i++) {
        float w = from_bits(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]), a = m[i], b = v[i];
        adamw(&s, g[i], &w, &a, &b);
        high[i] = (uint16_t)((to_bits(w) + 0x8000u) >> 16);
        low[i] = (int16_t)(uint16_t)to_bits(w);
    }
}

CLONES static void weights_whole(const Scalars *scalars, int n, const float *g, float *weight, const float *m,
                                 const float *v) {
    const Scalars s = *scalars;
#pragma GCC ivdep
    for (int i = 0; i < n; i++) {
        float w = weight[i], a = m[i], b = v[i];
        adamw(&s, g[i], &w, &a, &b);
        weight[i] = w;
    }
}

CLONES static void moments_half(const Scalars *scalars, int n, const uint16_t *g, float *m, float *v) {
    const Scalars s = *scalars;
#pragma GCC ivdep
    for (int i = 0; i < n; i++) adamw_moments(&s, from_bits((uint32_t)g[i] << 16), &m[i], &v[i]);
}

CLONES static void moments_whole(const Scalars *scalars, int n, const float *g, float *m, float *v) {
    const Scalars s = *scalars;
#pragma GCC ivdep
    for (int i = 0; i < n; i++) adamw_moments(&s, g[i], &m[i], &v[i]);
}

static void run_part(const Job *job, int64_t at, int n) {
    const uint16_t *half = (const uint16_t *)job->g + at;
    const float *whole = (const float *)job->g + at, *m = job->m + at, *v = job->v + at;
    const int is_half = job->is_split && !job->is_wide;
    if (job->part == MOMENTS && is_half)
        moments_half(&job->s, n, half, job->m_out + at, job->v_out + at);
    else if (job->part == MOMENTS)
        moments_whole(&job->s, n, whole, job->m_out + at, job->v_out + at);
    else if (!job->is_split)
        weights_whole(&job->s, n, whole, (float *)job->w_out + at, m, v);
    else if (job->is_wide)
        weights_split_wide(&job->s, n, whole, (uint16_t *)job->w_out + at, job->low_out + at, m, v);
    else
        weights_split(&job->s, n, half, (uint16_t *)job->w_out + at, job->low_out + at, m, v);
}

/* A copy is computed in a cached block and written with streaming stores, which do not read the old lines first. */
static void run_block(const Job *job, int64_t at, int n) {
    if (job->part != ALL) {
        run_part(job, at, n);
        return;
    }
    float w[BLOCK], m[BLOCK], v[BLOCK];
    int16_t low[BLOCK];
    const int is_copy = job->m != job->m_out;
    float *m_out = is_copy ? m : job->m_out + at, *v_out = is_copy ? v : job->v_out + at;
    if (job->is_split) {
        uint16_t *high_out = (uint16_t *)job->w_out + at, *high = is_copy ? (uint16_t *)w : high_out;
        int16_t *rest = is_copy ? low : job->low_out + at;
        if (job->is_wide)
            update_split_wide(&job->s, n, (const float *)job->g + at, (const uint16_t *)job->w + at, job->low + at,
                              job->m + at, job->v + at, high, rest, m_out, v_out);
        else
            update_split(&job->s, n, (const uint16_t *)job->g + at, (const uint16_t *)job->w + at, job->low + at,
                         job->m + at, job->v + at, high, rest, m_out, v_out);
        if (!is_copy) return;
        stream(high_out, high, 2 * (size_t)n);
        stream(job->low_out + at, low, 2 * (size_t)n);
    } else {
        float *weight = is_copy ? w : (float *)job->w_out + at;
        update_whole(&job->s, n, (const float *)job->g + at, (const float *)job->w + at, job->m + at, job->v + at,
                     weight, m_out, v_out);
        if (!is_copy) return;
        stream((float *)job->w_out + at, w, 4 * (size_t)n);
    }
    stream(job->m_out + at, m, 4 * (size_t)n);
    stream(job->v_out + at, v, 4 * (size_t)n);
}

static int64_t num_chunks(const Job *job) { return (job->n + CHUNK - 1) / CHUNK; }

typedef struct Pool {
    pthread_mutex_t lock;
    pthread_cond_t begin, end;
    int num_threads, busy, stops;
    uint64_t round;
    const Job *jobs;
    int num_jobs;
    void *fill;
    int64_t fill_size;
    atomic_llong next;
    pthread_t threads[];
} Pool;

/* The chunks of all jobs share one numbering; each thread takes the next chunk until none is left. */
static void run_chunks(Pool *pool) {
    if (pool->fill) {
        for (int64_t start; (start = atomic_fetch_add(&pool->next, 1) * FILL) < pool->fill_size;) {
            int64_t left = pool->fill_size - start;
            memset((char *)pool->fill + start, 0, (size_t)(left < FILL ? left : FILL));
        }
        return;
    }
    const Job *job = pool->jobs, *last = job + pool->num_jobs;
    int64_t before = 0;
    for (;;) {
        int64_t chunk = atomic_fetch_add(&pool->next, 1);
        while (job < last && chunk - before >= num_chunks(job)) before += num_chunks(job++);
        if (job == last) break;
        int64_t start = (chunk - before) * CHUNK, stop = start + CHUNK < job->n ? start + CHUNK : job->n;
        for (int64_t at = start; at < stop; at += BLOCK) run_block(job, at, (int)(stop - at < BLOCK ? stop - at : BLOCK));
    }
#ifdef __SSE2__
    _mm_sfence();
#endif
}

static void *work(void *argument) {
    Pool *pool = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->round == seen && !pool->stops) pthread_cond_wait(&pool->begin, &pool->lock);
        if (pool->stops) break;
        seen = pool->round;
        pthread_mutex_unlock(&pool->lock);
        run_chunks(pool);
        pthread_mutex_lock(&pool->lock);
        if (--pool->busy == 0) pthread_cond_signal(&pool->end);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* A pool of this many threads, the caller among them; NULL if it cannot be started. */
Pool *pdv_start(int num_threads) {
    Pool *pool = calloc(1, sizeof(Pool) + sizeof(pthread_t) * (size_t)num_threads);
    if (!pool) return NULL;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->begin, NULL);
    pthread_cond_init(&pool->end, NULL);
    for (int i = 1; i < num_threads; i++) {
        if (pthread_create(&pool->threads[pool->num_threads], NULL, work, pool)) break;
        pool->num_threads++;
    }
    return pool;
}

void pdv_stop(Pool *pool) {
    pthread_mutex_lock(&pool->lock);
    pool->stops = 1;
    pthread_cond_broadcast(&pool->begin);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->num_threads; i++) pthread_join(pool->threads[i], NULL);
    free(pool);
}

static void run_all(Pool *pool, int is_small) {
    atomic_store(&pool->next, 0);
    if (is_small) {
        run_chunks(pool);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->busy = pool->num_threads;
    pool->round++;
    pthread_cond_broadcast(&pool->begin);
    pthread_mutex_unlock(&pool->lock);
    run_chunks(pool);
    pthread_mutex_lock(&pool->lock);
    while (pool->busy) pthread_cond_wait(&pool->end, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

/* Runs all jobs; one caller at a time. */
void pdv_adamw_3(Pool *pool, const Job *jobs, int num_jobs) {
    int64_t chunks = 0;
    for (int i = 0; i < num_jobs; i++) chunks += num_chunks(&jobs[i]);
    pool->jobs = jobs;
    pool->num_jobs = num_jobs;
    pool->fill = NULL;
    run_all(pool, chunks <= 1);
}

/* Writes zeros, so that the pages are mapped. */
void pdv_zero(Pool *pool, void *to, int64_t size) {
    pool->fill = to;
    pool->fill_size = size;
    run_all(pool, size <= FILL);
}
