/* Sampling of neighbours, numbering of the nodes found, and gathering of feature rows.

   Every function works on rows first..last of its output, so that threads can share a call; neighbour_sampler.py has
   the reference, which gives the same bits: sums run in the order of the neighbours, and nothing is contracted. */

#include <stdint.h>
#include <string.h>

#define AHEAD 12
/* Rows whose memory is requested before it is needed: most of the time goes into cache misses. */

static inline uint64_t mix(uint64_t x) {
    x += 0x9E3779B97F4A7C15ull;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

/* Writes up to `fanout` different neighbours of each node, by Floyd's algorithm: all of them if there are no more. */
void pdv_sample_1(const int64_t *indptr, const int32_t *indices, const int64_t *nodes, int64_t first, int64_t last,
                  uint64_t key, const int64_t *out_indptr, int64_t *out) {
    for (int64_t row = first; row < last; row++) {
        if (row + 2 * AHEAD < last) __builtin_prefetch(indptr + nodes[row + 2 * AHEAD]);
        if (row + AHEAD < last) __builtin_prefetch(indices + indptr[nodes[row + AHEAD]]);
        int64_t node = nodes[row], begin = indptr[node], degree = indptr[node + 1] - begin;
        int64_t *chosen = out + out_indptr[row], count = out_indptr[row + 1] - out_indptr[row];
        if (count == degree) {
            for (int64_t j = 0; j < count; j++) chosen[j] = indices[begin + j];
            continue;
        }
        uint64_t start = mix(key ^ mix((uint64_t)node));
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
void pdv_gather_1(const float *features, int64_t width, const int64_t *nodes, int64_t first, int64_t last, float *out) {
    for (int64_t row = first; row < last; row++) {
        if (row + 2 < last) {
            const char *next = (const char *)(features + nodes[row + 2] * width);
            for (int64_t at = 0; at < width * 4 && at < 1024; at += 64) __builtin_prefetch(next + at);
        }
        memcpy(out + row * width, features + nodes[row] * width, (size_t)width * sizeof(float));
    }
}

/* Sums feature rows of each row's neighbours, times their weights if there are any, else divided by their number. */
__attribute__((target_clones("avx512f", "avx2", "default")))
void pdv_aggregate_1(const float *restrict features, int64_t width, const int64_t *found, const int64_t *out_indptr,
                     const float *weights, int64_t first, int64_t last, float *restrict out) {
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
