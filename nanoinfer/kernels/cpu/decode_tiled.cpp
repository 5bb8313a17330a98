// Paged decode attention on AMX, over bf16 or int8 keys and values. One item of work is a part of one sequence's context
// with all KV heads, so that a block is read from front to back; per 32 tokens, three passes over the heads (scores,
// softmax, values), of which each fetches what the next one reads. Keys and values lie in the cache as the tiles that they
// are loaded into: keys as left factors, values as right ones, W = 2 and D = 32 for bf16, 4 and 64 for int8:
//     keys    [blocks][kv_heads][block_size / 16][head_dim / D][16 tokens][D dims]
//     values  [blocks][kv_heads][block_size / 32][head_dim / 16][32 / W tokens][16 dims][W tokens]
//     scales  [blocks][kv_heads][block_size] float32, for int8: x = q * scale
// block_size is a multiple of 32, head_dim of 64 bytes. Online softmax (Milakov and Gimelshein, 2018); parts of one
// context are joined at the end (Flash-Decoding, Dao et al., 2023).
//
// Only what is stored is rounded to int8: queries and weights are split into two bytes each, as two rows of a tile, which
// costs nothing in a tile that a group of query heads does not fill.

#include "common.h"

#if defined(HAVE_AMX) && defined(__AMX_INT8__)
static const int64_t TOKENS = 32;  // scored together
static const int MOST_ROWS = 16;
static const float FIXED = 32512.0f;  // 127 * 256: the largest number whose two balanced bytes both fit

template <typename T> struct Cache {
    const T *keys, *values;
    const float *key_scales, *value_scales;
    const int32_t *block_tables;
    int64_t table_stride;
};

// Tiles 0, 1: scores [16 tokens][rows]; 3: queries; 4, 5: outputs [rows][16]; 6: weights; 2 and 7: keys or values.
template <typename T> static void configure_decode(int64_t rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.bytes_per_row[i] = 64;
    config.bytes_per_row[0] = config.bytes_per_row[1] = config.bytes_per_row[3] = rows * 4;
    config.rows[4] = config.rows[5] = config.rows[6] = rows;
    if (sizeof(T) == 1) config.rows[7] = 8, config.bytes_per_row[6] = 32;  // 32 tokens are 8 quads
    asm volatile("" : : "r"(&config) : "memory");  // gcc does not see that all of it is read
    _tile_loadconfig(&config);
}

// 16 numbers up to FIXED, rounded to whole ones, to balanced bytes: x = 256 * high + low.
static inline void split_bytes(__m512 x, __m128i *high, __m128i *low) {
    const __m512i fixed = _mm512_cvtps_epi32(x), top = _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_set1_epi32(128)), 8);
    _mm_storeu_si128(high, _mm512_cvtepi32_epi8(top));
    _mm_storeu_si128(low, _mm512_cvtepi32_epi8(_mm512_sub_epi32(fixed, _mm512_slli_epi32(top, 8))));
}

// One KV head's queries as right factors: bf16 [head_dim / 2][group][2], or int8 [head_dim / 4][2 * group][4], high bytes
// first. factors: what a score has to be multiplied with.
static void pack_queries(const bf16 *q, int64_t group, int64_t head_dim, float scale, bf16 *packed, float *factors) {
    for (int64_t g = 0; g < group; ++g) {
        factors[g] = scale;
        for (int64_t d = 0; d < head_dim; ++d) packed[(d / 2 * group + g) * 2 + d % 2] = q[g * head_dim + d];
    }
}
static void pack_queries(const bf16 *q, int64_t group, int64_t head_dim, float scale, int8_t *packed, float *factors) {
    for (int64_t g = 0; g < group; ++g, q += head_dim) {
        __m512 top = _mm512_set1_ps(1e-30f);
        for (int64_t d = 0; d < head_dim; d += 16) top = _mm512_max_ps(top, _mm512_abs_ps(load16(q + d, 0xffff)));
        const float largest = _mm512_reduce_max_ps(top);
        factors[g] = scale * largest / FIXED;
        for (int64_t d = 0; d < head_dim; d += 16) {
            alignas(16) int32_t high[4], low[4];
            split_bytes(_mm512_mul_ps(load16(q + d, 0xffff), _mm512_set1_ps(FIXED / largest)), (__m128i *)high, (__m128i *)low);
            for (int quad = 0; quad < 4; ++quad) {
                int32_t *at = (int32_t *)packed + (d / 4 + quad) * 2 * group + g;
                at[0] = high[quad], at[group] = low[quad];
            }
        }
    }
}

static inline void fetch_tile(const void *at) {
    for (int64_t line = 0; line < 16; ++line) _mm_prefetch((const char *)at + line * 64, _MM_HINT_T1);
}

#define PRODUCT(sums, left, right) \
    if constexpr (sizeof(T) == 1) _tile_dpbssd(sums, left, right); \
    else _tile_dpbf16ps(sums, left, right)

// scores [32 tokens][rows] of one KV head, as float32 or int32. `ahead`, as long as the keys, is fetched meanwhile.
template <typename T>
static void score(const T *keys, int64_t head_dim, const T *queries, int64_t rows, const T *ahead, float *scores) {
    const int64_t step = 64 / sizeof(T), half = 16 * head_dim;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t d = 0; d < head_dim; d += step, keys += step * 16, ahead += step * 16) {
        _tile_loadd(3, queries + d * rows, rows * 4);
        fetch_tile(ahead);
        _tile_loadd(2, keys, 64);
        PRODUCT(0, 2, 3);
        fetch_tile(ahead + half);
        _tile_loadd(2, keys + half, 64);
        PRODUCT(1, 2, 3);
    }
    _tile_stored(0, scores, rows * 4);
    _tile_stored(1, scores + 16 * rows, rows * 4);
}

// The running state of one query head: maximum and sum of weights; outputs are kept apart.
struct Softmax {
    float maximum, sum;
};

// Scores of 32 tokens, two vectors, to weights; returns what earlier outputs have to be multiplied with.
static inline float soften(__m512 *x, Softmax &state) {
    const float maximum = std::max(state.maximum, _mm512_reduce_max_ps(_mm512_max_ps(x[0], x[1])));
    const __m512 top = _mm512_set1_ps(maximum == -INFINITY ? 0.0f : maximum);
    for (int i = 0; i < 2; ++i) {
        const __mmask16 seen = _mm512_cmp_ps_mask(x[i], _mm512_set1_ps(-INFINITY), _CMP_NEQ_UQ);  // NaN stays NaN
        x[i] = _mm512_maskz_mov_ps(seen, exp512(_mm512_sub_ps(x[i], top)));
    }
    const float shrink = state.maximum == maximum ? 1.0f : std::exp(state.maximum - maximum);
    state.sum = state.sum * shrink + _mm512_reduce_add_ps(_mm512_add_ps(x[0], x[1]));
    state.maximum = maximum;
    return shrink;
}

// Scores of one head's column as two vectors, -infinity for tokens from `count` on.
static inline void load_scores(const float *scores, int64_t rows, int64_t g, int64_t count, __m512 *x) {
    const __m512i index = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32((int)rows));
    for (int i = 0; i < 2; ++i) x[i] = _mm512_i32gather_ps(index, scores + i * 16 * rows + g, 4);
}

// One KV head's scores to weights, left factors [rows][32 tokens]; outputs so far shrink. Returns nothing for bf16; for
// int8, factors[g] is what the products with these weights have to be multiplied with.
static void weights_of(const float *scores, int64_t group, int64_t count, const float *, const float *, const float *query_factors,
                       int64_t head_dim, Softmax *states, float *outputs, bf16 *weights, float *) {
    for (int64_t g = 0; g < group; ++g) {
        __m512 x[2];
        load_scores(scores, group, g, count, x);
        for (int i = 0; i < 2; ++i)
            x[i] = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), lanes(std::max<int64_t>(0, count - i * 16)), x[i], _mm512_set1_ps(query_factors[g]));
        const float shrink = soften(x, states[g]);
        _mm512_storeu_si512(weights + g * TOKENS, (__m512i)_mm512_cvtne2ps_pbh(x[1], x[0]));
        if (shrink != 1.0f)
            for (int64_t d = 0; d < head_dim; d += 16)
                _mm512_storeu_ps(outputs + g * head_dim + d, _mm512_mul_ps(_mm512_loadu_ps(outputs + g * head_dim + d), _mm512_set1_ps(shrink)));
    }
}

static void weights_of(const float *scores, int64_t group, int64_t count, const float *key_scales, const float *value_scales,
                       const float *query_factors, int64_t head_dim, Softmax *states, float *outputs, int8_t *weights, float *factors) {
    for (int64_t g = 0; g < group; ++g) {
        __m512 high[2], low[2], x[2];
        load_scores(scores, 2 * group, g, count, high);
        load_scores(scores, 2 * group, group + g, count, low);
        for (int i = 0; i < 2; ++i) {
            const __mmask16 mask = lanes(std::max<int64_t>(0, count - i * 16));
            const __m512 product = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(high[i])), _mm512_set1_ps(256.0f),
                                                   _mm512_cvtepi32_ps(_mm512_castps_si512(low[i])));
            const __m512 factor = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, key_scales + i * 16), _mm512_set1_ps(query_factors[g]));
            x[i] = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), mask, product, factor);
        }
        const float shrink = soften(x, states[g]);
        // The values' scales go into the weights, which are then split into bytes.
        for (int i = 0; i < 2; ++i)
            x[i] = _mm512_mul_ps(x[i], _mm512_maskz_loadu_ps(lanes(std::max<int64_t>(0, count - i * 16)), value_scales + i * 16));
        const float largest = std::max(1e-30f, _mm512_reduce_max_ps(_mm512_max_ps(x[0], x[1])));
        factors[g] = largest / FIXED;
        for (int i = 0; i < 2; ++i)
            split_bytes(_mm512_mul_ps(x[i], _mm512_set1_ps(FIXED / largest)), (__m128i *)(weights + g * TOKENS + i * 16),
                        (__m128i *)(weights + (group + g) * TOKENS + i * 16));
        if (shrink != 1.0f)
            for (int64_t d = 0; d < head_dim; d += 16)
                _mm512_storeu_ps(outputs + g * head_dim + d, _mm512_mul_ps(_mm512_loadu_ps(outputs + g * head_dim + d), _mm512_set1_ps(shrink)));
    }
}

// outputs [group][head_dim] += weights x values of 32 tokens. `ahead`, as long as the values, is fetched meanwhile.
static void weigh(const bf16 *values, int64_t head_dim, const bf16 *weights, int64_t, const float *, const bf16 *ahead, float *outputs) {
    _tile_loadd(6, weights, 64);
    for (int64_t d = 0; d < head_dim; d += 32, values += 1024, ahead += 1024) {
        fetch_tile(ahead);
        _tile_loadd(4, outputs + d, head_dim * 4);
        _tile_loadd(7, values, 64);
        _tile_dpbf16ps(4, 6, 7);
        fetch_tile(ahead + 512);
        _tile_loadd(5, outputs + d + 16, head_dim * 4);
        _tile_loadd(2, values + 512, 64);
        _tile_dpbf16ps(5, 6, 2);
        _tile_stored(4, outputs + d, head_dim * 4);
        _tile_stored(5, outputs + d + 16, head_dim * 4);
    }
}

static void weigh(const int8_t *values, int64_t head_dim, const int8_t *weights, int64_t group, const float *factors, const int8_t *ahead,
                  float *outputs) {
    alignas(64) int32_t sums[2][MOST_ROWS * 16];
    _tile_loadd(6, weights, 32);
    for (int64_t d = 0; d < head_dim; d += 32, values += 1024, ahead += 1024) {
        fetch_tile(ahead);
        _tile_zero(4);
        _tile_loadd(7, values, 64);
        _tile_dpbssd(4, 6, 7);
        _tile_zero(5);
        _tile_loadd(7, values + 512, 64);
        _tile_dpbssd(5, 6, 7);
        _tile_stored(4, sums[0], 64);
        _tile_stored(5, sums[1], 64);
        for (int64_t g = 0; g < group; ++g)
            for (int i = 0; i < 2; ++i) {
                const __m512 high = _mm512_cvtepi32_ps(_mm512_load_si512(sums[i] + g * 16));
                const __m512 low = _mm512_cvtepi32_ps(_mm512_load_si512(sums[i] + (group + g) * 16));
                float *out = outputs + g * head_dim + d + i * 16;
                _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_fmadd_ps(high, _mm512_set1_ps(256.0f), low), _mm512_set1_ps(factors[g]), _mm512_loadu_ps(out)));
            }
    }
}

// The first `count` of 32 tokens' values, zeros for the others: what lies there may be NaN, and 0 * NaN is NaN.
template <typename T> static void copy_values(const T *values, int64_t count, int64_t head_dim, T *copy) {
    const int64_t ways = 4 / sizeof(T), whole = count / ways * 16 * ways, tile = TOKENS * 16;
    memset(copy, 0, TOKENS * head_dim * sizeof(T));
    for (int64_t at = 0; at < TOKENS * head_dim; at += tile) {
        memcpy(copy + at, values + at, whole * sizeof(T));
        for (int64_t t = 0; t < count % ways; ++t)
            for (int64_t d = 0; d < 16; ++d) copy[at + whole + d * ways + t] = values[at + whole + d * ways + t];
    }
}

// Tokens [start, stop) of one sequence (start: a multiple of 32), all heads: unnormalized outputs [num_heads][head_dim].
template <typename T>
static void attend_part(const bf16 *q, const AttentionShape &shape, const Cache<T> &cache, const int32_t *blocks, int64_t start,
                        int64_t stop, float *outputs, Softmax *states) {
    const int64_t dim = shape.head_dim, kv_heads = shape.num_kv_heads, group = shape.num_heads / kv_heads;
    const int64_t rows = sizeof(T) == 1 ? 2 * group : group;
    // Per KV head: its queries, scores, weights, and two factors for each query head.
    const int64_t head_bytes = rows * (dim * sizeof(T) + TOKENS * 4 + 64) + 2 * 64;
    char *memory = scratch<char>(kv_heads * head_bytes + TOKENS * dim * sizeof(T) + 1024);
    T *copy = (T *)(memory + kv_heads * head_bytes);
    const auto queries = [&](int64_t h) { return (T *)(memory + h * head_bytes); };
    const auto scores = [&](int64_t h) { return (float *)(queries(h) + rows * dim); };
    const auto weights = [&](int64_t h) { return (T *)(scores(h) + rows * TOKENS); };
    const auto factors = [&](int64_t h) { return (float *)((char *)weights(h) + rows * 64); };
    for (int64_t h = 0; h < kv_heads; ++h) pack_queries(q + h * group * dim, group, dim, shape.scale, queries(h), factors(h));
    memset(outputs, 0, shape.num_heads * dim * sizeof(float));
    for (int64_t h = 0; h < shape.num_heads; ++h) states[h] = {-INFINITY, 0.0f};
    // Where the 32 tokens from `token` on begin for the first KV head; the others follow at equal distances.
    const int64_t head_stride = shape.block_size * dim;
    const auto first_row = [&](int64_t token) { return blocks[token / shape.block_size] * kv_heads * shape.block_size + token % shape.block_size; };
    for (int64_t token = start; token < stop; token += TOKENS) {
        const int64_t count = std::min(TOKENS, stop - token), row = first_row(token);
        const T *keys = cache.keys + row * dim, *values = cache.values + row * dim;
        const T *next = cache.keys + first_row(token + TOKENS < stop ? token + TOKENS : token) * dim;
        for (int64_t h = 0; h < kv_heads; ++h)
            score(keys + h * head_stride, dim, queries(h), rows, values + h * head_stride, scores(h));
        for (int64_t h = 0; h < kv_heads; ++h) {
            const int64_t at = row + h * shape.block_size;
            weights_of(scores(h), group, count, cache.key_scales + at, cache.value_scales + at, factors(h), dim, states + h * group,
                       outputs + h * group * dim, weights(h), factors(h) + 16);
        }
        for (int64_t h = 0; h < kv_heads; ++h) {
            const T *at = values + h * head_stride;
            if (count < TOKENS) copy_values(at, count, dim, copy), at = copy;
            weigh(at, dim, weights(h), group, factors(h) + 16, next + h * head_stride, outputs + h * group * dim);
        }
    }
}

// A head's parts to one output.
static void join(const float *outputs, const Softmax *states, int64_t parts, int64_t output_stride, int64_t state_stride, int64_t head_dim, bf16 *out) {
    float maximum = -INFINITY, total = 0;
    for (int64_t p = 0; p < parts; ++p) maximum = std::max(maximum, states[p * state_stride].maximum);
    alignas(64) float sum[256] = {0};
    for (int64_t p = 0; p < parts; ++p) {
        const Softmax &state = states[p * state_stride];
        const float weight = state.maximum == maximum ? 1.0f : std::exp(state.maximum - maximum);
        total += weight * state.sum;
        for (int64_t d = 0; d < head_dim; d += 16)
            _mm512_store_ps(sum + d, _mm512_fmadd_ps(_mm512_set1_ps(weight), _mm512_loadu_ps(outputs + p * output_stride + d), _mm512_load_ps(sum + d)));
    }
    for (int64_t d = 0; d < head_dim; d += 16) store16(out + d, _mm512_mul_ps(_mm512_load_ps(sum + d), _mm512_set1_ps(1.0f / total)), 0xffff);
}

// Sequence i's query is the token rows[i] of q and out, [tokens, num_heads, head_dim]. Its context is cut into `parts`.
// memory: num_seqs * parts * num_heads * (head_dim + 2) floats.
template <typename T>
static void tiled_decode(const bf16 *q, const Cache<T> &cache, const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs,
                         const AttentionShape &shape, int64_t parts, float *memory, bf16 *out) {
    const int64_t heads = shape.num_heads, size = heads * shape.head_dim;
    Softmax *states = (Softmax *)(memory + num_seqs * parts * size);
#pragma omp parallel
    {
        const FlushDenormals flush;
        configure_decode<T>((sizeof(T) == 1 ? 2 : 1) * heads / shape.num_kv_heads);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < num_seqs * parts; ++item) {
            const int64_t seq = item / parts, part = item % parts, len = seq_lens[seq];
            const int64_t length = ((len + parts - 1) / parts + TOKENS - 1) / TOKENS * TOKENS;
            const int64_t start = std::min(len, part * length), stop = std::min(len, start + length);
            attend_part<T>(q + rows[seq] * size, shape, cache, cache.block_tables + seq * cache.table_stride, start, stop,
                           memory + item * size, states + item * heads);
        }
        _tile_release();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_seqs * heads; ++i) {
            const int64_t seq = i / heads, h = i % heads;
            join(memory + (seq * parts * heads + h) * shape.head_dim, states + seq * parts * heads + h, parts, size, heads,
                 shape.head_dim, out + (rows[seq] * heads + h) * shape.head_dim);
        }
    }
}

extern "C" void tiled_decode_bf16(const bf16 *q, const bf16 *keys, const bf16 *values, const float *key_scales,
                                  const float *value_scales, const int32_t *block_tables, int64_t table_stride,
                                  const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs, int64_t num_heads,
                                  int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale, int64_t parts,
                                  float *memory, bf16 *out) {
    tiled_decode<bf16>(q, {keys, values, key_scales, value_scales, block_tables, table_stride}, seq_lens, rows, num_seqs,
                       {num_heads, num_kv_heads, head_dim, block_size, scale}, parts, memory, out);
}

extern "C" void tiled_decode_int8(const bf16 *q, const int8_t *keys, const int8_t *values, const float *key_scales,
                                  const float *value_scales, const int32_t *block_tables, int64_t table_stride,
                                  const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs, int64_t num_heads,
                                  int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float scale, int64_t parts,
                                  float *memory, bf16 *out) {
    tiled_decode<int8_t>(q, {keys, values, key_scales, value_scales, block_tables, table_stride}, seq_lens, rows, num_seqs,
                         {num_heads, num_kv_heads, head_dim, block_size, scale}, parts, memory, out);
}
#endif
