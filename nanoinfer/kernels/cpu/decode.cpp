// Paged decode attention: one query token per sequence, each key and value read once for all query heads of its group.
// What one (sequence, KV head) reads of a block is contiguous.
// Online softmax (Milakov and Gimelshein, 2018) over blocks; long contexts of small batches are split, and joined at the
// end (Flash-Decoding, Dao et al., 2023).

#include "common.h"

static const int MAX_GROUP = 16;
static const int CHUNK = 16;  // tokens scored together

template <typename T> struct Head {
    // scores[g][t] = q[g] . k[t] for up to CHUNK tokens
    static void score(const T *q, int group, int64_t head_dim, const T *k, int count, float (*scores)[CHUNK]) {
        for (int t = 0; t < count; ++t)
            for (int g = 0; g < group; ++g) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int64_t d = 0; d < head_dim; ++d) sum += to_float(q[g * head_dim + d]) * to_float(k[t * head_dim + d]);
                scores[g][t] = sum;
            }
    }
    // acc[g][d] += sum over t of p[g][t] * v[t][d]
    static void weigh(const float (*p)[CHUNK], int group, int64_t head_dim, const T *v, int count, float *acc) {
        for (int t = 0; t < count; ++t)
            for (int g = 0; g < group; ++g) {
                const float weight = p[g][t];
#pragma omp simd
                for (int64_t d = 0; d < head_dim; ++d) acc[g * head_dim + d] += weight * to_float(v[t * head_dim + d]);
            }
    }
};

// One (sequence, KV head) over tokens [start, stop): the unnormalized output acc [group][head_dim], and each head's
// maximum and sum of weights.
template <typename T>
static void attend_range(const T *q, int group, const AttentionShape &shape, const T *k_cache, const T *v_cache,
                         const int32_t *blocks, int64_t kv_head, int64_t start, int64_t stop, float *acc, float *maxima,
                         float *sums) {
    const int64_t head_dim = shape.head_dim;
    memset(acc, 0, sizeof(float) * group * head_dim);
    std::fill(maxima, maxima + group, -INFINITY);
    std::fill(sums, sums + group, 0.0f);
    alignas(64) float scores[MAX_GROUP][CHUNK];
    for (int64_t token = start; token < stop;) {
        const int64_t offset = token % shape.block_size;
        const int count = (int)std::min<int64_t>(std::min<int64_t>(CHUNK, stop - token), shape.block_size - offset);
        const int64_t at = shape.row(blocks, kv_head, token) * head_dim;
        const T *k = k_cache + at, *v = v_cache + at;
        Head<T>::score(q, group, head_dim, k, count, scores);
        for (int g = 0; g < group; ++g) {
            float maximum = maxima[g], sum = 0;
#if defined(__AVX512F__)
            const __mmask16 mask = (__mmask16)((1u << count) - 1);
            const __m512 scaled = _mm512_mul_ps(_mm512_load_ps(scores[g]), _mm512_set1_ps(shape.scale));
            maximum = std::max(maximum, _mm512_mask_reduce_max_ps(mask, scaled));
#else
            for (int t = 0; t < count; ++t) maximum = std::max(maximum, scores[g][t] *= shape.scale);
#endif
            const float shrink = maxima[g] == -INFINITY ? 0.0f : maxima[g] == maximum ? 1.0f : std::exp(maxima[g] - maximum);
#if defined(__AVX512F__)
            const __m512 p = _mm512_maskz_mov_ps(mask, exp512(_mm512_sub_ps(scaled, _mm512_set1_ps(maximum))));
            _mm512_store_ps(scores[g], p);
            sum = _mm512_reduce_add_ps(p);
#else
            for (int t = 0; t < count; ++t) sum += scores[g][t] = std::exp(scores[g][t] - maximum);
#endif
            sums[g] = sums[g] * shrink + sum;
            if (shrink != 1.0f && maxima[g] != -INFINITY) {
#pragma omp simd
                for (int64_t d = 0; d < head_dim; ++d) acc[g * head_dim + d] *= shrink;
            }
            maxima[g] = maximum;
        }
        Head<T>::weigh(scores, group, head_dim, v, count, acc);
        token += count;
    }
}

// rows[i]: the token of q and out that is sequence i's query. scratch: num_seqs * num_heads * splits * (head_dim + 2)
// floats, and 16 more.
template <typename T>
static void paged_decode(const T *q, const T *k_cache, const T *v_cache, const int32_t *block_tables, int64_t table_stride,
                         const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs, const AttentionShape &shape,
                         int64_t splits, float *scratch, T *out) {
    const int group = (int)(shape.num_heads / shape.num_kv_heads);
    const int64_t head_dim = shape.head_dim, per_item = group * (head_dim + 2);
    scratch = (float *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
    const int64_t items = num_seqs * shape.num_kv_heads * splits;
#pragma omp parallel
    {
        alignas(64) float acc[MAX_GROUP * 256], maxima[MAX_GROUP], sums[MAX_GROUP];
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; ++item) {
            const int64_t split = item % splits, kv_head = item / splits % shape.num_kv_heads;
            const int64_t seq = item / splits / shape.num_kv_heads, len = seq_lens[seq];
            const int64_t length = ((len + splits - 1) / splits + CHUNK - 1) / CHUNK * CHUNK;
            const int64_t start = std::min(len, split * length), stop = std::min(len, start + length);
            const int64_t at = (rows[seq] * shape.num_heads + kv_head * group) * head_dim;
            attend_range<T>(q + at, group, shape, k_cache, v_cache, block_tables + seq * table_stride, kv_head, start,
                                 stop, acc, maxima, sums);
            if (splits == 1) {
                for (int g = 0; g < group; ++g) {
                    const float factor = 1.0f / sums[g];
                    for (int64_t d = 0; d < head_dim; ++d)
                        out[at + g * head_dim + d] = from_float<T>(acc[g * head_dim + d] * factor);
                }
            } else {
                float *part = scratch + item * per_item;
                memcpy(part, acc, sizeof(float) * group * head_dim);
                memcpy(part + group * head_dim, maxima, sizeof(float) * group);
                memcpy(part + group * head_dim + group, sums, sizeof(float) * group);
            }
        }
        if (splits > 1) {
#pragma omp for schedule(static)
            for (int64_t head = 0; head < num_seqs * shape.num_heads; ++head) {
                const int64_t seq = head / shape.num_heads, h = head % shape.num_heads, g = h % group;
                const float *parts = scratch + (seq * shape.num_kv_heads + h / group) * splits * per_item;
                float maximum = -INFINITY, total = 0;
                for (int64_t s = 0; s < splits; ++s)
                    maximum = std::max(maximum, parts[s * per_item + group * head_dim + g]);
                memset(acc, 0, sizeof(float) * head_dim);
                for (int64_t s = 0; s < splits; ++s) {
                    const float *part = parts + s * per_item;
                    const float weight = std::exp(part[group * head_dim + g] - maximum);
                    total += weight * part[group * head_dim + group + g];
                    for (int64_t d = 0; d < head_dim; ++d) acc[d] += weight * part[g * head_dim + d];
                }
                T *target = out + (rows[seq] * shape.num_heads + h) * head_dim;
                for (int64_t d = 0; d < head_dim; ++d) target[d] = from_float<T>(acc[d] / total);
            }
        }
    }
}

extern "C" void paged_decode_f32(const float *q, const float *k, const float *v, const int32_t *block_tables,
                                 int64_t table_stride, const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs,
                                 int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t block_rows,
                                 float scale, int64_t splits, float *scratch, float *out) {
    const AttentionShape shape = {num_heads, num_kv_heads, head_dim, block_size, block_rows, scale};
    paged_decode<float>(q, k, v, block_tables, table_stride, seq_lens, rows, num_seqs, shape, splits, scratch, out);
}

extern "C" void paged_decode_bf16(const bf16 *q, const bf16 *k, const bf16 *v, const int32_t *block_tables,
                                  int64_t table_stride, const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs,
                                  int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t block_rows,
                                  float scale, int64_t splits, float *scratch, bf16 *out) {
    const AttentionShape shape = {num_heads, num_kv_heads, head_dim, block_size, block_rows, scale};
    paged_decode<bf16>(q, k, v, block_tables, table_stride, seq_lens, rows, num_seqs, shape, splits, scratch, out);
}
