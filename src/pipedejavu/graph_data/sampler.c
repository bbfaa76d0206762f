/* Sampling of neighbours, numbering of the nodes found, and gathering of feature rows.

   The functions that end in `_rows` work on rows first..last of their output, and threads share them: threads of this
   library, as those of Python wait for each other whenever a call ends. neighbour_sampler.py has the reference, which
   gives the same bits: sums run in the order of the neighbours, and nothing is contracted. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#define AHEAD 12
/* Rows whose memory is requested before it is needed: most of the time goes into cache misses. */

#define MOST_THREADS 256
#define LEAST_ROWS 256
/* What a thread must have to do; a new one takes as long as a few dozen rows. */

typedef struct {
    void (*run)(const void *call, int64_t first, int64_t last);
    const void *call;
    int64_t count, step;
    atomic_int_fast64_t next;
} shared_rows;

static void *take_rows(void *of) {
    shared_rows *rows = of;
    for (;;) {
        int64_t first = atomic_fetch_add(&rows->next, rows->step), last = first + rows->step;
        if (first >= rows->count) return NULL;
        rows->run(rows->call, first, last < rows->count ? last : rows->count);
    }
}

/* Calls a function on all rows, by this thread and others; with fewer of them if the system has no more. */
static void share(void (*run)(const void *, int64_t, int64_t), const void *call, int64_t count, int64_t threads) {
    if (threads > count / LEAST_ROWS) threads = count / LEAST_ROWS;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads <= 1) {
        run(call, 0, count);
        return;
    }
    shared_rows rows = {run, call, count, count / (4 * threads) + 1, 0};
    pthread_t others[MOST_THREADS];
    int64_t started = 0;
    while (started < threads - 1 && !pthread_create(&others[started], NULL, take_rows, &rows)) started++;
    take_rows(&rows);
    for (int64_t n = 0; n < started; n++) pthread_join(others[n], NULL);
}

static inline uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* Writes up to `fanout` different neighbours of each node, by Floyd's algorithm: all of them if there are no more. */
typedef struct {
    const int64_t *indptr;
    const int32_t *indices;
    const int64_t *nodes;
    uint64_t key;
    const int64_t *out_indptr;
    int64_t *out;
} sample_call;

static void sample_rows(const void *of, int64_t first, int64_t last) {
    const sample_call call = *(const sample_call *)of;
    const int64_t *indptr = call.indptr, *nodes = call.nodes, *out_indptr = call.out_indptr;
    const int32_t *indices = call.indices;
    int64_t *out = call.out;
    for (int64_t row = first; row < last; row++) {
        if (row + 2 * AHEAD < last) __builtin_prefetch(indptr + nodes[row + 2 * AHEAD]);
        if (row + AHEAD < last) __builtin_prefetch(indices + indptr[nodes[row + AHEAD]]);
        int64_t node = nodes[row], begin = indptr[node], degree = indptr[node + 1] - begin;
        int64_t *chosen = out + out_indptr[row], count = out_indptr[row + 1] - out_indptr[row];
        if (count == degree) {
            for (int64_t j = 0; j < count; j++) chosen[j] = indices[begin + j];
            continue;
        }
        uint64_t start = mix(call.key ^ mix((uint64_t)node));
        for (int64_t j = 0; j < count; j++) {
            uint64_t most = (uint64_t)(degree - count + j);
            int64_t drawn = (int64_t)(((mix(start + (uint64_t)j) >> 32) * (most + 1)) >> 32);
            for (int64_t other = 0; other < j; other++)
                if (chosen[other] == drawn) { drawn = (int64_t)most; break; }
            chosen[j] = drawn;
        }
        for (int64_t j = 0; j < count; j++) chosen[j] = indices[begin + chosen[j]];
    }
}

void pdv_sample_2(const int64_t *indptr, const int32_t *indices, const int64_t *nodes, int64_t count, uint64_t key,
                  const int64_t *out_indptr, int64_t *out, int64_t threads) {
    sample_call call = {indptr, indices, nodes, key, out_indptr, out};
    share(sample_rows, &call, count, threads);
}

/* Numbers nodes in the order of their first occurrence, after the rows of the targets. Returns how many rows there are;
   `slot` has one entry of -1 for each node of the graph, and has so again afterwards. */
int64_t pdv_relabel_1(int32_t *slot, const int64_t *targets, int64_t num_targets, const int64_t *found,
                      int64_t num_found, int64_t *nodes, int64_t *local) {
    int64_t count = num_targets;
    for (int64_t n = 0; n < num_targets; n++) {
        nodes[n] = targets[n];
        if (slot[targets[n]] < 0) slot[targets[n]] = (int32_t)n;
    }
    for (int64_t n = 0; n < num_found; n++) {
        if (n + AHEAD < num_found) __builtin_prefetch(slot + found[n + AHEAD], 1);
        int64_t node = found[n];
        if (slot[node] < 0) {
            nodes[count] = node;
            slot[node] = (int32_t)count++;
        }
        local[n] = slot[node];
    }
    for (int64_t n = 0; n < count; n++) slot[nodes[n]] = -1;
    return count;
}

/* Copies feature rows. */
typedef struct {
    const float *features;
    int64_t width;
    const int64_t *nodes;
    float *out;
} gather_call;

static void gather_rows(const void *of, int64_t first, int64_t last) {
    const gather_call call = *(const gather_call *)of;
    const float *features = call.features;
    const int64_t width = call.width, *nodes = call.nodes;
    for (int64_t row = first; row < last; row++) {
        if (row + 2 < last) {
            const char *next = (const char *)(features + nodes[row + 2] * width);
            for (int64_t at = 0; at < width * 4 && at < 1024; at += 64) __builtin_prefetch(next + at);
        }
        memcpy(call.out + row * width, features + nodes[row] * width, (size_t)width * sizeof(float));
    }
}

void pdv_gather_2(const float *features, int64_t width, const int64_t *nodes, int64_t count, float *out,
                  int64_t threads) {
    gather_call call = {features, width, nodes, out};
    share(gather_rows, &call, count, threads);
}

/* Sums feature rows of each row's neighbours, times their weights if there are any, else divided by their number. */
typedef struct {
    const float *features;
    int64_t width;
    const int64_t *found, *out_indptr;
    const float *weights;
    float *out;
} aggregate_call;

__attribute__((target_clones("avx512f", "avx2", "default")))
static void aggregate_rows(const void *of, int64_t first, int64_t last) {
    const aggregate_call call = *(const aggregate_call *)of;
    const float *restrict features = call.features, *weights = call.weights;
    const int64_t width = call.width, *found = call.found, *out_indptr = call.out_indptr;
    float *restrict out = call.out;
    int64_t end = out_indptr[last];
    for (int64_t row = first; row < last; row++) {
        float *restrict sum = out + row * width;
        memset(sum, 0, (size_t)width * sizeof(float));
        for (int64_t n = out_indptr[row]; n < out_indptr[row + 1]; n++) {
            if (n + 2 < end) {
                const char *next = (const char *)(features + found[n + 2] * width);
                for (int64_t at = 0; at < width * 4 && at < 1024; at += 64) __builtin_prefetch(next + at);
            }
            const float *restrict x = features + found[n] * width;
            if (weights) {
                float weight = weights[n];
                for (int64_t k = 0; k < width; k++) sum[k] += weight * x[k];
            } else {
                for (int64_t k = 0; k < width; k++) sum[k] += x[k];
            }
        }
        int64_t count = out_indptr[row + 1] - out_indptr[row];
        if (!weights && count > 1)
            for (int64_t k = 0; k < width; k++) sum[k] /= (float)count;
    }
}

void pdv_aggregate_2(const float *features, int64_t width, const int64_t *found, const int64_t *out_indptr,
                     const float *weights, int64_t count, float *out, int64_t threads) {
    aggregate_call call = {features, width, found, out_indptr, weights, out};
    share(aggregate_rows, &call, count, threads);
}
