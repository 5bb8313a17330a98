// Paged decode attention: one query token per sequence, each key and value read once for all query heads of its group.
// Caches are [blocks][kv_heads][block_size][head_dim]: what one (sequence, KV head) reads is contiguous within a block.
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

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
static inline __m512bh load_bh(const bf16 *p) { return (__m512bh)_mm512_loadu_si512(p); }

// Sums the 16 lanes of each of 16 vectors: lane i of the result belongs to v[i].
static inline __m512 transpose_sum(__m512 *v) {
    for (int i = 0; i < 8; ++i)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
    for (int i = 0; i < 4; ++i)
        v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd));
    for (int i = 0; i < 2; ++i)
        v[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[i], v[i + 2]), _mm512_unpackhi_ps(v[i], v[i + 2]));
    const __m512 sum = _mm512_add_ps(_mm512_unpacklo_ps(v[0], v[1]), _mm512_unpackhi_ps(v[0], v[1]));
    return sum;
}

// The 16 sums of transpose_sum in order: within a 128-bit lane stand vectors 0 to 3 of a quad, and quads 0, 2, 1, 3.
static inline __m512 in_order(__m512 sums) { return _mm512_shuffle_f32x4(sums, sums, 0xd8); }

// One token's line of memory after the other, between the arithmetic: in one burst, fetches would block the loads behind.
template <int DIM> static inline void fetch(const bf16 *ahead, int t) {
    for (int i = 0; i < DIM / 32; ++i) _mm_prefetch((const char *)(ahead + t * DIM + i * 32), _MM_HINT_T1);
}

// Two heads (or one, twice) by CHUNK tokens; keys beyond `count` are not read. `ahead`, unless null, is fetched meanwhile.
template <int DIM>
static void score_bf16(const bf16 *q0, const bf16 *q1, const bf16 *k, int count, const bf16 *ahead, float *scores0,
                       float *scores1) {
    const int VECTORS = DIM / 32;
    __m512 sums[2][CHUNK];
    for (int t = 0; t < CHUNK; ++t) {
        __m512 sum0 = _mm512_setzero_ps(), sum1 = _mm512_setzero_ps();
        if (ahead) fetch<DIM>(ahead, t);
        if (t < count)
            for (int i = 0; i < VECTORS; ++i) {
                const __m512bh key = load_bh(k + t * DIM + i * 32);
                sum0 = _mm512_dpbf16_ps(sum0, load_bh(q0 + i * 32), key);
                sum1 = _mm512_dpbf16_ps(sum1, load_bh(q1 + i * 32), key);
            }
        sums[0][t] = sum0;
        sums[1][t] = sum1;
    }
    _mm512_store_ps(scores0, in_order(transpose_sum(sums[0])));
    _mm512_store_ps(scores1, in_order(transpose_sum(sums[1])));
}

// Two tokens at a time: their values are interleaved so that one dot-product instruction adds both; for two heads (or
// one, twice, with acc1 null).
template <int DIM>
static void weigh_bf16(const float *p0, const float *p1, const bf16 *v, int count, const bf16 *ahead, float *acc0,
                       float *acc1) {
    const int VECTORS = DIM / 32;
    __m512 sums0[2 * VECTORS], sums1[2 * VECTORS];
    for (int i = 0; i < 2 * VECTORS; ++i) {
        sums0[i] = _mm512_load_ps(acc0 + i * 16);
        sums1[i] = acc1 ? _mm512_load_ps(acc1 + i * 16) : _mm512_setzero_ps();
    }
    // Pairs of weights, rounded to bf16; those beyond `count` are zero.
    alignas(64) bf16 pairs0[CHUNK], pairs1[CHUNK];
    _mm256_store_si256((__m256i *)pairs0, (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(p0)));
    _mm256_store_si256((__m256i *)pairs1, (__m256i)_mm512_cvtneps_pbh(_mm512_load_ps(p1)));
    for (int t = 0; t < count; t += 2) {
        const __m512bh weights0 = (__m512bh)_mm512_set1_epi32(((const int *)pairs0)[t / 2]);
        const __m512bh weights1 = (__m512bh)_mm512_set1_epi32(((const int *)pairs1)[t / 2]);
        const bf16 *row = v + t * DIM, *next = t + 1 < count ? row + DIM : row;
        if (ahead) {
            fetch<DIM>(ahead, t);
            fetch<DIM>(ahead, t + 1);
        }
        for (int i = 0; i < VECTORS; ++i) {
            const __m512i a = _mm512_loadu_si512(row + i * 32), b = _mm512_loadu_si512(next + i * 32);
            const __m512bh low = (__m512bh)_mm512_unpacklo_epi16(a, b), high = (__m512bh)_mm512_unpackhi_epi16(a, b);
            sums0[2 * i] = _mm512_dpbf16_ps(sums0[2 * i], weights0, low);
            sums0[2 * i + 1] = _mm512_dpbf16_ps(sums0[2 * i + 1], weights0, high);
            sums1[2 * i] = _mm512_dpbf16_ps(sums1[2 * i], weights1, low);
            sums1[2 * i + 1] = _mm512_dpbf16_ps(sums1[2 * i + 1], weights1, high);
        }
    }
    for (int i = 0; i < 2 * VECTORS; ++i) {
        _mm512_store_ps(acc0 + i * 16, sums0[i]);
        if (acc1) _mm512_store_ps(acc1 + i * 16, sums1[i]);
    }
}

// weigh_bf16 leaves 32 values as two vectors, with the 128-bit lanes' first and second quads apart.
template <int DIM> static void unscramble(float *acc, int group) {
    alignas(64) float plain[32];
    for (int64_t start = 0; start < (int64_t)group * DIM; start += 32) {
        for (int lane = 0; lane < 4; ++lane)
            for (int j = 0; j < 4; ++j) {
                plain[lane * 8 + j] = acc[start + lane * 4 + j];
                plain[lane * 8 + 4 + j] = acc[start + 16 + lane * 4 + j];
            }
        memcpy(acc + start, plain, sizeof plain);
    }
}
#define FAST_BF16 1
#endif

// One (sequence, KV head) over tokens [start, stop): the unnormalized output acc [group][head_dim], and each head's
// maximum and sum of weights.
template <typename T, int DIM>
static void attend_range(const T *q, int group, const AttentionShape &shape, const T *k_cache, const T *v_cache,
                         const int32_t *blocks, int64_t kv_head, int64_t start, int64_t stop, float *acc, float *maxima,
                         float *sums) {
    const int64_t head_dim = DIM ? DIM : shape.head_dim;
    memset(acc, 0, sizeof(float) * group * head_dim);
    std::fill(maxima, maxima + group, -INFINITY);
    std::fill(sums, sums + group, 0.0f);
    alignas(64) float scores[MAX_GROUP][CHUNK];
    for (int64_t token = start; token < stop;) {
        const int64_t offset = token % shape.block_size;
        const int count = (int)std::min<int64_t>(std::min<int64_t>(CHUNK, stop - token), shape.block_size - offset);
        const int64_t at = ((blocks[token / shape.block_size] * shape.num_kv_heads + kv_head) * shape.block_size + offset) * head_dim;
        const T *k = k_cache + at, *v = v_cache + at;
#ifdef FAST_BF16
        // What comes two chunks later: no hardware can foresee where the next block lies.
        const int64_t later = token + 2 * CHUNK;
        const bf16 *k_ahead = nullptr, *v_ahead = nullptr;
        if (DIM != 0 && later < stop) {
            const int64_t block = blocks[later / shape.block_size];
            const int64_t there = ((block * shape.num_kv_heads + kv_head) * shape.block_size + later % shape.block_size) * head_dim;
            k_ahead = (const bf16 *)k_cache + there;
            v_ahead = (const bf16 *)v_cache + there;
        }
#endif
#ifdef FAST_BF16
        if constexpr (DIM != 0) {
            for (int g = 0; g < group; g += 2) {
                const int h = g + 1 < group ? g + 1 : g;
                score_bf16<DIM>((const bf16 *)q + g * DIM, (const bf16 *)q + h * DIM, (const bf16 *)k, count, g ? nullptr : k_ahead,
                                scores[g], scores[h]);
            }
        } else
#endif
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
#ifdef FAST_BF16
        if constexpr (DIM != 0)
            for (int g = 0; g < group; g += 2) {
                const bool two = g + 1 < group;
                weigh_bf16<DIM>(scores[g], scores[two ? g + 1 : g], (const bf16 *)v, count, g ? nullptr : v_ahead,
                                acc + g * DIM, two ? acc + (g + 1) * DIM : nullptr);
            }
        else
#endif
            Head<T>::weigh(scores, group, head_dim, v, count, acc);
        token += count;
    }
#ifdef FAST_BF16
    if constexpr (DIM != 0) unscramble<DIM>(acc, group);
#endif
}

// rows[i]: the token of q and out that is sequence i's query. scratch: num_seqs * num_heads * splits * (head_dim + 2)
// floats, and 16 more.
template <typename T, int DIM>
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
            attend_range<T, DIM>(q + at, group, shape, k_cache, v_cache, block_tables + seq * table_stride, kv_head, start,
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
                                 int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale,
                                 int64_t splits, float *scratch, float *out) {
    const AttentionShape shape = {num_heads, num_kv_heads, head_dim, block_size, scale};
    paged_decode<float, 0>(q, k, v, block_tables, table_stride, seq_lens, rows, num_seqs, shape, splits, scratch, out);
}

extern "C" void paged_decode_bf16(const bf16 *q, const bf16 *k, const bf16 *v, const int32_t *block_tables,
                                  int64_t table_stride, const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs,
                                  int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale,
                                  int64_t splits, float *scratch, bf16 *out) {
    const AttentionShape shape = {num_heads, num_kv_heads, head_dim, block_size, scale};
#ifdef FAST_BF16
    if (head_dim == 128)
        return paged_decode<bf16, 128>(q, k, v, block_tables, table_stride, seq_lens, rows, num_seqs, shape, splits, scratch, out);
    if (head_dim == 64)
        return paged_decode<bf16, 64>(q, k, v, block_tables, table_stride, seq_lens, rows, num_seqs, shape, splits, scratch, out);
#endif
    paged_decode<bf16, 0>(q, k, v, block_tables, table_stride, seq_lens, rows, num_seqs, shape, splits, scratch, out);
}
