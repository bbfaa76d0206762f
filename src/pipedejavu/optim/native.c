/* One pass of AdamW over host memory, on a pool of threads.

   Every element goes through the operations of arithmetic.py in the same order, each rounded once: no fused
   multiply-add (the file is built with -ffp-contract=off), no approximate division or root. Inputs and outputs are
   separate pointers: equal ones update in place, other ones leave the old state as it was. Moments of fewer bits are
   widened into a cached block and rounded from it; moment_format.py defines the formats. */

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

enum { BLOCK = 2048, CHUNK = 16 * BLOCK, SCALE_BLOCK = 256 };
enum { FP32, BF16, INT8 }; /* the formats of moments */
enum { ALL, WEIGHTS, MOMENTS }; /* the parts of an update; a part is always written in place */
static const int64_t FILL = (int64_t)1 << 24;

typedef struct {
    float scale, beta1, rest1, beta2, rest2, unroot2, eps, decay, rate;
    uint32_t seed; /* of the random bits with which moments are rounded */
} Scalars;

typedef struct {
    Scalars s;
    int64_t n;
    int is_split;      /* bf16 weight with a 16-bit low half, and bf16 gradient; otherwise all float */
    int is_wide;       /* float gradient of a split weight */
    int part;          /* what is written */
    int moments;       /* their format */
    const void *g, *w; /* gradient; weight, or its high half */
    const int16_t *low;
    const void *m, *v;
    const float *m_scale, *v_scale;
    void *w_out;
    int16_t *low_out;
    void *m_out, *v_out;
    float *m_scale_out, *v_scale_out;
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

/* The random bits of an element, as moment_format.random_bits. */
static inline uint32_t hash(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

/* A magnitude with noise added to its last bits; infinities and NaN get none. */
static inline int32_t noisy(int32_t bits, int32_t noise) {
    const int32_t magnitude = bits & 0x7FFFFFFF;
    return magnitude + (magnitude < 0x7F800000 ? noise : 0);
}

static inline int32_t larger(int32_t a, int32_t b) { return a > b ? a : b; }

CLONES static void widen_bf16(int n, const uint16_t *from, float *to) {
    for (int i = 0; i < n; i++) to[i] = from_bits((uint32_t)from[i] << 16);
}

CLONES static void narrow_bf16(uint32_t first, int n, const float *m, const float *v, uint16_t *m_out, uint16_t *v_out) {
#pragma GCC ivdep
    for (int i = 0; i < n; i++) {
        const uint32_t random = hash(first + (uint32_t)i);
        const int32_t a = (int32_t)to_bits(m[i]), b = (int32_t)to_bits(v[i]), least = (b & 0x7FFFFFFF) > 0;
        m_out[i] = (uint16_t)(noisy(a, (int32_t)(random >> 16)) >> 16 | (a >> 16 & 0x8000));
        v_out[i] = (uint16_t)(larger(noisy(b, random & 0xFFFF) >> 16, least) | (b >> 16 & 0x8000));
    }
}

/* The code of the largest value of a block is 127 or 255, less the bits of its mantissa that are zero. */
static inline int32_t base_of(int32_t exponent, int32_t top) { return 8 * exponent + 7 - top; }

static inline int32_t exponent_of(float scale) { return (int32_t)(to_bits(scale) >> 23); }

CLONES static void widen_int8(int n, const uint8_t *from, const float *scale, int32_t top, float *to) {
    for (int block = 0; block < n; block += SCALE_BLOCK) {
        const int stop = n - block < SCALE_BLOCK ? n - block : SCALE_BLOCK;
        const int32_t base = base_of(exponent_of(scale[block / SCALE_BLOCK]), top), sign = top == 127 ? 128 : 0;
        for (int i = block; i < block + stop; i++) {
            const int32_t code = from[i], magnitude = code & top;
            const uint32_t bits = magnitude ? (uint32_t)(magnitude + base) << 20 : 0;
            to[i] = from_bits(bits | (uint32_t)(code & sign) << 24);
        }
    }
}

CLONES static void narrow_int8(uint32_t first, int n, const float *m, const float *v, uint8_t *m_out, uint8_t *v_out,
                               float *m_scale, float *v_scale) {
    int32_t a[SCALE_BLOCK], b[SCALE_BLOCK];
    for (int block = 0; block < n; block += SCALE_BLOCK) {
        const int stop = n - block < SCALE_BLOCK ? n - block : SCALE_BLOCK;
        int32_t a_most = 0, b_most = 0;
        for (int i = 0; i < stop; i++) {
            const uint32_t random = hash(first + (uint32_t)(block + i));
            a[i] = noisy((int32_t)to_bits(m[block + i]), (int32_t)(random >> 12));
            b[i] = noisy((int32_t)to_bits(v[block + i]), (int32_t)(random & 0xFFFFF));
            a_most = larger(a[i], a_most);
            b_most = larger(b[i], b_most);
        }
        const int32_t a_exponent = larger(a_most >> 23, 15), a_base = base_of(a_exponent, 127);
        const int32_t b_exponent = larger(b_most >> 23, 31), b_base = base_of(b_exponent, 255);
        m_scale[block / SCALE_BLOCK] = from_bits((uint32_t)a_exponent << 23);
        v_scale[block / SCALE_BLOCK] = from_bits((uint32_t)b_exponent << 23);
        for (int i = 0; i < stop; i++) {
            const int32_t sign = (int32_t)to_bits(m[block + i]) >> 24 & 128;
            m_out[block + i] = (uint8_t)(larger((a[i] >> 20) - a_base, 0) | sign);
        }
        for (int i = 0; i < stop; i++) {
            const int32_t least = (to_bits(v[block + i]) & 0x7FFFFFFFu) > 0;
            v_out[block + i] = (uint8_t)larger((b[i] >> 20) - b_base, least);
        }
    }
}

/* `at` is a multiple of SCALE_BLOCK. */
static void widen(const Job *job, int64_t at, int n, float *m, float *v) {
    if (job->moments == BF16) {
        widen_bf16(n, (const uint16_t *)job->m + at, m);
        widen_bf16(n, (const uint16_t *)job->v + at, v);
    } else {
        widen_int8(n, (const uint8_t *)job->m + at, job->m_scale + at / SCALE_BLOCK, 127, m);
        widen_int8(n, (const uint8_t *)job->v + at, job->v_scale + at / SCALE_BLOCK, 255, v);
    }
}

static void narrow(const Job *job, int64_t at, int n, const float *m, const float *v) {
    const uint32_t first = (uint32_t)at + job->s.seed;
    if (job->moments == BF16)
        narrow_bf16(first, n, m, v, (uint16_t *)job->m_out + at, (uint16_t *)job->v_out + at);
    else
        narrow_int8(first, n, m, v, (uint8_t *)job->m_out + at, (uint8_t *)job->v_out + at,
                    job->m_scale_out + at / SCALE_BLOCK, job->v_scale_out + at / SCALE_BLOCK);
}

static void run_part(const Job *job, int64_t at, int n, float *m, float *v) {
    const uint16_t *half = (const uint16_t *)job->g + at;
    const float *whole = (const float *)job->g + at;
    const int is_half = job->is_split && !job->is_wide;
    if (job->part == MOMENTS && is_half)
        moments_half(&job->s, n, half, m, v);
    else if (job->part == MOMENTS)
        moments_whole(&job->s, n, whole, m, v);
    else if (!job->is_split)
        weights_whole(&job->s, n, whole, (float *)job->w_out + at, m, v);
    else if (job->is_wide)
        weights_split_wide(&job->s, n, whole, (uint16_t *)job->w_out + at, job->low_out + at, m, v);
    else
        weights_split(&job->s, n, half, (uint16_t *)job->w_out + at, job->low_out + at, m, v);
}

/* A copy is computed in a cached block and written with streaming stores, which do not read the old lines first. */
static void run_block(const Job *job, int64_t at, int n) {
    float w[BLOCK], m[BLOCK], v[BLOCK];
    int16_t low[BLOCK];
    const int is_narrow = job->moments != FP32, is_copy = job->m != job->m_out, is_cached = is_narrow || is_copy;
    const float *m_old = is_narrow ? m : (const float *)job->m + at, *v_old = is_narrow ? v : (const float *)job->v + at;
    float *m_new = is_cached ? m : (float *)job->m_out + at, *v_new = is_cached ? v : (float *)job->v_out + at;
    if (is_narrow) widen(job, at, n, m, v);
    if (job->part != ALL) {
        run_part(job, at, n, m_new, v_new);
    } else if (job->is_split) {
        uint16_t *high_out = (uint16_t *)job->w_out + at, *high = is_copy ? (uint16_t *)w : high_out;
        int16_t *rest = is_copy ? low : job->low_out + at;
        if (job->is_wide)
            update_split_wide(&job->s, n, (const float *)job->g + at, (const uint16_t *)job->w + at, job->low + at,
                              m_old, v_old, high, rest, m_new, v_new);
        else
            update_split(&job->s, n, (const uint16_t *)job->g + at, (const uint16_t *)job->w + at, job->low + at,
                         m_old, v_old, high, rest, m_new, v_new);
        if (is_copy) {
            stream(high_out, high, 2 * (size_t)n);
            stream(job->low_out + at, low, 2 * (size_t)n);
        }
    } else {
        float *weight = is_copy ? w : (float *)job->w_out + at;
        update_whole(&job->s, n, (const float *)job->g + at, (const float *)job->w + at, m_old, v_old, weight, m_new,
                     v_new);
        if (is_copy) stream((float *)job->w_out + at, w, 4 * (size_t)n);
    }
    if (is_narrow && job->part != WEIGHTS) {
        narrow(job, at, n, m, v);
    } else if (is_copy && !is_narrow) {
        stream((float *)job->m_out + at, m, 4 * (size_t)n);
        stream((float *)job->v_out + at, v, 4 * (size_t)n);
    }
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
void pdv_adamw_4(Pool *pool, const Job *jobs, int num_jobs) {
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
