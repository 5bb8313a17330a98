// Paged decode attention on AMX, over bf16 or int8 keys and values. One item of work is a part of one sequence's context
// with all KV heads, so that a block is read from front to back: per 32 tokens, the keys of all heads for the scores, each
// head's softmax while the next head's keys are read, and the values of all heads for the outputs. Every tile is fetched
// when the one LEAD tiles before it is used: fetched much earlier, a line moves twice, from memory and from the L2 cache,
// and 14 % fewer bytes a second came in.
//
// Keys and values lie in the cache as the tiles that they are loaded into: keys as left factors, values as right ones,
// W = 2 and D = 32 for bf16, 4 and 64 for int8, each head's rows of a block as AttentionShape says:
//     keys    [block_size / 16][head_dim / D][16 tokens][D dims]
//     values  [block_size / 32][head_dim / 16][32 / W tokens][16 dims][W tokens]
//     scales  [block_size] float32, for int8: x = q * scale
// block_size is a multiple of 32, head_dim of 64 bytes. Online softmax (Milakov and Gimelshein, 2018); parts of one
// context are joined at the end (Flash-Decoding, Dao et al., 2023).
//
// Only what is stored is rounded to int8: queries and weights are split into two bytes each, as two rows of a tile, which
// costs nothing in a tile that a group of query heads does not fill.

#include "common.h"

#if defined(HAVE_AMX) && defined(__AMX_INT8__)
static const int64_t TOKENS = 32;  // scored together
static const int64_t TILE_BYTES = 1024;
static const int64_t LEAD = 3;  // 2, 3 and 4 tiles: 25.8, 26.3, 24.5 GB/s
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
    for (int64_t g = 0; g < group; ++g, q += head_dim) {
        factors[g] = scale;
        for (int64_t d = 0; d < head_dim; d += 2) memcpy(packed + d * group + 2 * g, q + d, 2 * sizeof(bf16));
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

// When the i-th of `count` tiles at `at` is used: lines FROM to TO - 1 of the tile LEAD later, a few between one load and
// the next, since 16 at once would block the loads behind them (3 to 5 % fewer bytes a second). `next` is what will be used
// after those tiles; null: nothing is to be fetched.
template <int FROM, int TO> static inline void fetch_ahead(const void *at, int64_t i, int64_t count, const void *next) {
    const char *tile = i + LEAD < count ? (const char *)at + (i + LEAD) * TILE_BYTES : (const char *)next + (i + LEAD - count) * TILE_BYTES;
    if (next == nullptr) return;
    for (int64_t line = FROM; line < TO; ++line) _mm_prefetch(tile + line * 64, _MM_HINT_T1);
}

#define PRODUCT(sums, left, right) \
    if constexpr (sizeof(T) == 1) _tile_dpbssd(sums, left, right); \
    else _tile_dpbf16ps(sums, left, right)

// scores [32 tokens][rows] of one KV head, as float32 or int32; of the second 16 tokens zero if there are no more than 16.
// next: what is read after these keys.
template <typename T>
static void score(const T *keys, int64_t count, int64_t head_dim, const T *queries, int64_t rows, const void *next, float *scores) {
    const int64_t step = 64 / sizeof(T), tiles = head_dim / step, all = count > 16 ? 2 * tiles : tiles;
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < tiles; ++i) {
        fetch_ahead<0, 5>(keys, i, all, next);
        _tile_loadd(3, queries + i * step * rows, rows * 4);
        fetch_ahead<5, 10>(keys, i, all, next);
        _tile_loadd(2, keys + i * step * 16, 64);
        fetch_ahead<10, 16>(keys, i, all, next);
        PRODUCT(0, 2, 3);
    }
    for (int64_t i = tiles; i < all; ++i) {
        fetch_ahead<0, 5>(keys, i, all, next);
        _tile_loadd(3, queries + (i - tiles) * step * rows, rows * 4);
        fetch_ahead<5, 10>(keys, i, all, next);
        _tile_loadd(2, keys + i * step * 16, 64);
        fetch_ahead<10, 16>(keys, i, all, next);
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

// outputs [group][head_dim] += weights x values of 32 tokens. next: what is read after these values.
static void weigh(const bf16 *values, int64_t head_dim, const bf16 *weights, int64_t, const float *, const void *next, float *outputs) {
    const int64_t tiles = head_dim / 16;
    _tile_loadd(6, weights, 64);
    for (int64_t i = 0; i < tiles; i += 2) {
        float *out = outputs + i * 16;
        fetch_ahead<0, 8>(values, i, tiles, next);
        _tile_loadd(4, out, head_dim * 4);
        _tile_loadd(7, values + i * 512, 64);
        fetch_ahead<8, 16>(values, i, tiles, next);
        _tile_dpbf16ps(4, 6, 7);
        fetch_ahead<0, 8>(values, i + 1, tiles, next);
        _tile_loadd(5, out + 16, head_dim * 4);
        _tile_loadd(2, values + (i + 1) * 512, 64);
        fetch_ahead<8, 16>(values, i + 1, tiles, next);
        _tile_dpbf16ps(5, 6, 2);
        _tile_stored(4, out, head_dim * 4);
        _tile_stored(5, out + 16, head_dim * 4);
    }
}

static void weigh(const int8_t *values, int64_t head_dim, const int8_t *weights, int64_t group, const float *factors, const void *next,
                  float *outputs) {
    alignas(64) int32_t sums[2][MOST_ROWS * 16];
    _tile_loadd(6, weights, 32);
    for (int64_t d = 0; d < head_dim; d += 32) {
        // Two groups of 16 dims are one tile's worth.
        fetch_ahead<0, 8>(values, d / 32, head_dim / 32, next);
        _tile_zero(4);
        _tile_loadd(7, values + d * TOKENS, 64);
        _tile_dpbssd(4, 6, 7);
        fetch_ahead<8, 16>(values, d / 32, head_dim / 32, next);
        _tile_zero(5);
        _tile_loadd(7, values + (d + 16) * TOKENS, 64);
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

// Fetches what `copy_values` reads.
template <typename T> static void fetch_values(const T *values, int64_t count, int64_t head_dim) {
    const int64_t lines = (count * sizeof(T) + 3) / 4;
    for (int64_t at = 0; at < TOKENS * head_dim; at += TOKENS * 16)
        for (int64_t line = 0; line < lines; ++line) _mm_prefetch((const char *)(values + at) + line * 64, _MM_HINT_T1);
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
    // Per KV head its queries, weights, and what scores and products have to be multiplied with; scores of the last two
    // heads; a copy of one head's values.
    const int64_t query_size = rows * dim, score_size = rows * TOKENS, weight_size = rows * 64 / sizeof(T), copy_size = TOKENS * dim;
    const int64_t head_bytes = (query_size + weight_size) * sizeof(T) + 2 * MOST_ROWS * sizeof(float);
    char *memory = scratch<char>(kv_heads * head_bytes + 2 * score_size * sizeof(float) + copy_size * sizeof(T));
    float *scores = (float *)memory, *query_factors = scores + 2 * score_size, *factors = query_factors + kv_heads * MOST_ROWS;
    T *weights = (T *)(factors + kv_heads * MOST_ROWS), *copy = weights + kv_heads * weight_size, *queries = copy + copy_size;
    int64_t row = start < stop ? shape.row(blocks, 0, start) : 0;
    // The first keys come while the queries are packed.
    for (int64_t at = 0; at < TOKENS * dim * (int64_t)sizeof(T); at += 64) _mm_prefetch((const char *)(cache.keys + row * dim) + at, _MM_HINT_T1);
    for (int64_t h = 0; h < kv_heads; ++h)
        pack_queries(q + h * group * dim, group, dim, shape.scale, queries + h * query_size, query_factors + h * MOST_ROWS);
    memset(outputs, 0, shape.num_heads * dim * sizeof(float));
    for (int64_t h = 0; h < shape.num_heads; ++h) states[h] = {-INFINITY, 0.0f};
    const int64_t head_rows = shape.block_size;
    for (int64_t token = start; token < stop; token += TOKENS) {
        const int64_t count = std::min(TOKENS, stop - token), row_after = count < TOKENS ? row : shape.row(blocks, 0, token + TOKENS);
        const T *keys = cache.keys + row * dim, *values = cache.values + row * dim, *keys_after = cache.keys + row_after * dim;
        for (int64_t h = 0; h <= kv_heads; ++h) {
            const T *next = h + 1 < kv_heads ? keys + (h + 1) * head_rows * dim : values;
            if (h < kv_heads) score(keys + h * head_rows * dim, count, dim, queries + h * query_size, rows, next, scores + h % 2 * score_size);
            const int64_t before = h - 1, at = row + before * head_rows;
            if (before >= 0)
                weights_of(scores + before % 2 * score_size, group, count, cache.key_scales + at, cache.value_scales + at,
                           query_factors + before * MOST_ROWS, dim, states + before * group, outputs + before * group * dim,
                           weights + before * weight_size, factors + before * MOST_ROWS);
        }
        for (int64_t h = 0; h < kv_heads; ++h, values += head_rows * dim) {
            const T *next = h + 1 < kv_heads ? values + head_rows * dim : keys_after, *at = values;
            if (count < TOKENS) {
                if (h + 1 < kv_heads) fetch_values(next, count, dim);
                copy_values(values, count, dim, copy);
                at = copy, next = nullptr;
            }
            weigh(at, dim, weights + h * weight_size, group, factors + h * MOST_ROWS, next, outputs + h * group * dim);
        }
        row = row_after;
    }
}

// A head's parts to one output.
static void join(const float *outputs, const Softmax *states, int64_t parts, int64_t output_stride, int64_t state_stride, int64_t head_dim, bf16 *out) {
    float maximum = -INFINITY, total = 0;
    for (int64_t p = 0; p < parts; ++p) maximum = std::max(maximum, states[p * state_stride].maximum);
    alignas(64) float sum[256];
    memset(sum, 0, head_dim * sizeof(float));
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
        // A sequence in one part is finished where it was computed, in memory that stays in this core's cache.
        std::vector<float> own(parts == 1 ? size + 2 * heads : 0);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < num_seqs * parts; ++item) {
            const int64_t seq = item / parts, part = item % parts, len = seq_lens[seq];
            const int64_t length = ((len + parts - 1) / parts + TOKENS - 1) / TOKENS * TOKENS;
            const int64_t start = std::min(len, part * length), stop = std::min(len, start + length);
            float *outputs = parts == 1 ? own.data() : memory + item * size;
            Softmax *state = parts == 1 ? (Softmax *)(outputs + size) : states + item * heads;
            attend_part<T>(q + rows[seq] * size, shape, cache, cache.block_tables + seq * cache.table_stride, start, stop, outputs, state);
            for (int64_t h = 0; parts == 1 && h < heads; ++h)
                join(outputs + h * shape.head_dim, state + h, 1, 0, 0, shape.head_dim, out + (rows[seq] * heads + h) * shape.head_dim);
        }
        _tile_release();
#pragma omp for schedule(static)
        for (int64_t i = 0; i < (parts == 1 ? 0 : num_seqs * heads); ++i) {
            const int64_t seq = i / heads, h = i % heads;
            join(memory + (seq * parts * heads + h) * shape.head_dim, states + seq * parts * heads + h, parts, size, heads,
                 shape.head_dim, out + (rows[seq] * heads + h) * shape.head_dim);
        }
    }
}

extern "C" void tiled_decode_bf16(const bf16 *q, const bf16 *keys, const bf16 *values, const float *key_scales,
                                  const float *value_scales, const int32_t *block_tables, int64_t table_stride,
                                  const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs, int64_t num_heads,
                                  int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t block_rows, float scale,
                                  int64_t parts, float *memory, bf16 *out) {
    tiled_decode<bf16>(q, {keys, values, key_scales, value_scales, block_tables, table_stride}, seq_lens, rows, num_seqs,
                       {num_heads, num_kv_heads, head_dim, block_size, block_rows, scale}, parts, memory, out);
}

extern "C" void tiled_decode_int8(const bf16 *q, const int8_t *keys, const int8_t *values, const float *key_scales,
                                  const float *value_scales, const int32_t *block_tables, int64_t table_stride,
                                  const int32_t *seq_lens, const int64_t *rows, int64_t num_seqs, int64_t num_heads,
                                  int64_t num_kv_heads, int64_t head_dim, int64_t block_size, int64_t block_rows, float scale,
                                  int64_t parts, float *memory, bf16 *out) {
    tiled_decode<int8_t>(q, {keys, values, key_scales, value_scales, block_tables, table_stride}, seq_lens, rows, num_seqs,
                         {num_heads, num_kv_heads, head_dim, block_size, block_rows, scale}, parts, memory, out);
}
#endif
