// Prefill attention: sequences with several query tokens, over their paged keys and values, on AMX (bf16 only). Flash
// attention (Dao et al., 2022): per KV head, keys and values are brought into tile order once; then tiles of 32 queries
// go over them in chunks, keeping a running maximum and sum.

#include "common.h"

#ifdef HAVE_AMX
static const int64_t QUERY_ROWS = 32, KEY_CHUNK = 128;

// 16 rows of 16 dwords to their transpose.
static inline void transpose_dwords(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

// The row of a token in a cache, or null beyond the sequence's end.
struct PagedRows {
    const bf16 *cache;
    const int32_t *blocks;
    int64_t kv_head, seq_len;
    const AttentionShape *shape;
    const bf16 *operator()(int64_t token) const {
        if (token >= seq_len) return nullptr;
        const int64_t block = blocks[token / shape->block_size], offset = token % shape->block_size;
        return cache + ((block * shape->num_kv_heads + kv_head) * shape->block_size + offset) * shape->head_dim;
    }
};

// Keys as the weights of a linear layer with one output per token: strips of 32 tokens, as pack_bf16 orders them.
static void pack_keys(const PagedRows &rows, int64_t num_tokens, int64_t head_dim, bf16 *packed) {
    for (int64_t token = 0; token < num_tokens; token += 16)
        for (int64_t kt = 0; kt < head_dim / 32; ++kt) {
            __m512i r[16];
            for (int i = 0; i < 16; ++i) {
                const bf16 *row = rows(token + i);
                r[i] = row ? _mm512_loadu_si512(row + kt * 32) : _mm512_setzero_si512();
            }
            transpose_dwords(r);
            bf16 *tile = packed + ((token / 32 * (head_dim / 32) + kt) * 2 + token / 16 % 2) * 512;
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(tile + i * 32, r[i]);
        }
}

// Values as weights with one input per token: [32 tokens][head_dim / 16][16 pairs of tokens][16 outputs][2].
static void pack_values(const PagedRows &rows, int64_t num_tokens, int64_t head_dim, bf16 *packed) {
    alignas(64) uint16_t low[32], high[32];
    for (int i = 0; i < 16; ++i) low[2 * i] = i, low[2 * i + 1] = 32 + i, high[2 * i] = 16 + i, high[2 * i + 1] = 48 + i;
    const __m512i low_index = _mm512_load_si512(low), high_index = _mm512_load_si512(high);
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t token = 0; token < num_tokens; token += 2) {
        const bf16 *first = rows(token), *second = rows(token + 1);
        bf16 *tiles = packed + token / 32 * 32 * head_dim + token % 32 / 2 * 32;
        for (int64_t d = 0; d < head_dim; d += 32) {
            const __m512i a = first ? _mm512_loadu_si512(first + d) : zero, b = second ? _mm512_loadu_si512(second + d) : zero;
            _mm512_storeu_si512(tiles + d / 16 * 512, _mm512_permutex2var_epi16(a, low_index, b));
            _mm512_storeu_si512(tiles + (d / 16 + 1) * 512, _mm512_permutex2var_epi16(a, high_index, b));
        }
    }
}

struct QueryTile {
    alignas(64) float scores[QUERY_ROWS][KEY_CHUNK];
    alignas(64) bf16 weights[QUERY_ROWS][KEY_CHUNK];
    alignas(64) float acc[QUERY_ROWS][256];
    alignas(64) float maxima[QUERY_ROWS], sums[QUERY_ROWS];
};

// scores = queries (32 rows, row_stride apart) x keys of one chunk.
static void score_tile(const bf16 *q, int64_t row_stride, int64_t head_dim, const bf16 *keys, int64_t count, QueryTile &tile) {
    for (int64_t strip = 0; strip < (count + 31) / 32; ++strip) {
        const bf16 *b = keys + strip * 32 * head_dim;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t kt = 0; kt < head_dim / 32; ++kt) {
            _tile_loadd(4, q + kt * 32, row_stride * 2);
            _tile_loadd(5, q + 16 * row_stride + kt * 32, row_stride * 2);
            _tile_loadd(6, b + kt * 1024, 64);
            _tile_loadd(7, b + kt * 1024 + 512, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, &tile.scores[0][strip * 32], KEY_CHUNK * 4);
        _tile_stored(1, &tile.scores[0][strip * 32 + 16], KEY_CHUNK * 4);
        _tile_stored(2, &tile.scores[16][strip * 32], KEY_CHUNK * 4);
        _tile_stored(3, &tile.scores[16][strip * 32 + 16], KEY_CHUNK * 4);
    }
}

// Scores to weights, for keys start .. start + count - 1; row r sees keys up to position + r.
static void soften_tile(int64_t rows, int64_t position, int64_t start, int64_t count, float scale, int64_t head_dim, QueryTile &tile) {
    const int64_t padded = (count + 31) / 32 * 32;
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t visible = std::min(count, position + r - start + 1);
        __m512 top = _mm512_set1_ps(-INFINITY);
        for (int64_t i = 0; i < padded; i += 16) {
            const int64_t left = visible - i;
            const __mmask16 mask = left >= 16 ? 0xffff : left > 0 ? (__mmask16)((1u << left) - 1) : 0;
            const __m512 x = _mm512_mask_mul_ps(_mm512_set1_ps(-INFINITY), mask, _mm512_load_ps(&tile.scores[r][i]), _mm512_set1_ps(scale));
            _mm512_store_ps(&tile.scores[r][i], x);
            top = _mm512_max_ps(top, x);
        }
        const float before = tile.maxima[r], maximum = std::max(before, _mm512_reduce_max_ps(top));
        const float shift = maximum == -INFINITY ? 0.0f : maximum;
        __m512 sum = _mm512_setzero_ps();
        for (int64_t i = 0; i < padded; i += 16) {
            const __m512 x = _mm512_sub_ps(_mm512_load_ps(&tile.scores[r][i]), _mm512_set1_ps(shift));
            const __mmask16 counts = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
            const __m512 weight = _mm512_maskz_mov_ps(counts, exp512(x));
            sum = _mm512_add_ps(sum, weight);
            _mm256_store_si256((__m256i *)&tile.weights[r][i], (__m256i)_mm512_cvtneps_pbh(weight));
        }
        const float shrink = before == -INFINITY ? 0.0f : std::exp(before - maximum);
        tile.sums[r] = tile.sums[r] * shrink + _mm512_reduce_add_ps(sum);
        tile.maxima[r] = maximum;
        if (shrink != 1.0f)
            for (int64_t d = 0; d < head_dim; d += 16)
                _mm512_store_ps(&tile.acc[r][d], _mm512_mul_ps(_mm512_load_ps(&tile.acc[r][d]), _mm512_set1_ps(shrink)));
    }
}

// acc += weights x values of one chunk.
static void weigh_tile(const bf16 *values, int64_t count, int64_t head_dim, QueryTile &tile) {
    for (int64_t d = 0; d < head_dim; d += 32) {
        _tile_loadd(0, &tile.acc[0][d], 1024);
        _tile_loadd(1, &tile.acc[0][d + 16], 1024);
        _tile_loadd(2, &tile.acc[16][d], 1024);
        _tile_loadd(3, &tile.acc[16][d + 16], 1024);
        for (int64_t strip = 0; strip < (count + 31) / 32; ++strip) {
            const bf16 *b = values + strip * 32 * head_dim + d / 16 * 512;
            _tile_loadd(4, &tile.weights[0][strip * 32], KEY_CHUNK * 2);
            _tile_loadd(5, &tile.weights[16][strip * 32], KEY_CHUNK * 2);
            _tile_loadd(6, b, 64);
            _tile_loadd(7, b + 512, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, &tile.acc[0][d], 1024);
        _tile_stored(1, &tile.acc[0][d + 16], 1024);
        _tile_stored(2, &tile.acc[16][d], 1024);
        _tile_stored(3, &tile.acc[16][d + 16], 1024);
    }
}

// Rows of up to 32 queries of one head, at positions position .. position + rows - 1 of their sequence.
static void attend_tile(const bf16 *q, int64_t rows, int64_t position, const AttentionShape &shape, const bf16 *keys,
                        const bf16 *values, QueryTile &tile, bf16 *out) {
    const int64_t head_dim = shape.head_dim, row_stride = shape.num_heads * head_dim;
    alignas(64) bf16 padded[QUERY_ROWS * 256];
    if (rows < QUERY_ROWS) {  // tiles read 32 rows, and there may be none behind these
        memset(padded, 0, sizeof padded);
        for (int64_t r = 0; r < rows; ++r) memcpy(padded + r * head_dim, q + r * row_stride, head_dim * 2);
    }
    memset(tile.acc, 0, sizeof tile.acc);
    memset(tile.weights, 0, sizeof tile.weights);
    std::fill(tile.maxima, tile.maxima + QUERY_ROWS, -INFINITY);
    std::fill(tile.sums, tile.sums + QUERY_ROWS, 0.0f);
    for (int64_t start = 0; start < position + rows; start += KEY_CHUNK) {
        const int64_t count = std::min(KEY_CHUNK, position + rows - start);
        if (rows < QUERY_ROWS) score_tile(padded, head_dim, head_dim, keys + start * head_dim, count, tile);
        else score_tile(q, row_stride, head_dim, keys + start * head_dim, count, tile);
        soften_tile(rows, position, start, count, shape.scale, head_dim, tile);
        weigh_tile(values + start * head_dim, count, head_dim, tile);
    }
    for (int64_t r = 0; r < rows; ++r) {
        const float factor = 1.0f / tile.sums[r];
        for (int64_t d = 0; d < head_dim; d += 16)
            store_bf16(out + r * row_stride + d, _mm512_mul_ps(_mm512_load_ps(&tile.acc[r][d]), _mm512_set1_ps(factor)), 16);
    }
}

// Sequence i has the queries starts[i] .. starts[i] + query_lens[i] - 1, the last ones of its seq_lens[i] tokens.
// head_dim: a multiple of 32, at most 256. parts: into how many shares the query tiles of one (sequence, KV head) go.
extern "C" void paged_prefill_bf16(const bf16 *q, const bf16 *k_cache, const bf16 *v_cache, const int32_t *block_tables,
                                   int64_t table_stride, const int64_t *starts, const int64_t *query_lens,
                                   const int64_t *seq_lens, int64_t num_seqs, int64_t num_heads, int64_t num_kv_heads,
                                   int64_t head_dim, int64_t block_size, float scale, int64_t parts, bf16 *out) {
    const AttentionShape shape = {num_heads, num_kv_heads, head_dim, block_size, scale};
    const int64_t group = num_heads / num_kv_heads;
#pragma omp parallel
    {
        configure_tiles(16, 16);
        static thread_local std::vector<bf16> scratch;
        static thread_local QueryTile tile;
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < num_seqs * num_kv_heads * parts; ++item) {
            const int64_t part = item % parts, kv_head = item / parts % num_kv_heads, seq = item / parts / num_kv_heads;
            const int64_t tiles = (query_lens[seq] + QUERY_ROWS - 1) / QUERY_ROWS;
            const int64_t before = seq_lens[seq] - query_lens[seq];
            // Later tiles see more keys: shares take every parts-th tile.
            if (part >= tiles) continue;
            const int64_t num_tokens = (seq_lens[seq] + 31) / 32 * 32;
            if ((int64_t)scratch.size() < 2 * num_tokens * head_dim + 64) scratch.resize(2 * num_tokens * head_dim + 64);
            bf16 *keys = (bf16 *)(((uintptr_t)scratch.data() + 63) & ~(uintptr_t)63), *values = keys + num_tokens * head_dim;
            const int32_t *blocks = block_tables + seq * table_stride;
            pack_keys({k_cache, blocks, kv_head, seq_lens[seq], &shape}, num_tokens, head_dim, keys);
            pack_values({v_cache, blocks, kv_head, seq_lens[seq], &shape}, num_tokens, head_dim, values);
            for (int64_t t = part; t < tiles; t += parts)
                for (int64_t g = 0; g < group; ++g) {
                    const int64_t row = t * QUERY_ROWS;
                    const int64_t at = ((starts[seq] + row) * num_heads + kv_head * group + g) * head_dim;
                    attend_tile(q + at, std::min(QUERY_ROWS, query_lens[seq] - row), before + row, shape, keys, values, tile,
                                out + at);
                }
        }
        _tile_release();
    }
}
#endif
