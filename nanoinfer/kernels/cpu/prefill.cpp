// Prefill attention: sequences with several query tokens, over their paged keys and values, on AMX (bf16 products). Flash
// attention (Dao et al., 2022): per KV head, keys are brought into tile order once; then tiles of 32 query rows go over
// them in chunks. A row is one (token, head) of the group that shares the keys. Two tiles go together: while the matrix
// unit multiplies for one, the vector units turn the other's scores into weights.

#include "common.h"

#ifdef HAVE_AMX
static const int64_t ROWS = 32, STRIP = 32, STRIPS = 8, CHUNK = STRIP * STRIPS;  // query rows, keys

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

// One (sequence, KV head): keys as strips of 32 tokens, as right factors, [head_dim / 32][2][16][16][2]; values by strip, as
// bf16 caches have them, [head_dim / 16][16 pairs of tokens][16][2].
struct Context {
    bf16 *keys;
    const bf16 **values;
};

struct Cache {
    const void *keys, *values;
    const float *key_scales, *value_scales;  // null for bf16
    const int32_t *blocks;                   // of the sequence
    int64_t kv_head, seq_len;
    // Of a token, in rows of head_dim values, and in scales.
    int64_t slot(int64_t token, const AttentionShape &shape) const {
        return shape.row(blocks, kv_head, token);
    }
};

static inline __m512i load_bf16(const bf16 *p, float) { return _mm512_loadu_si512(p); }
static inline __m512i load_bf16(const int8_t *p, float scale) {
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p + 16))));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(high, _mm512_set1_ps(scale)), _mm512_mul_ps(low, _mm512_set1_ps(scale)));
}

// Within a strip, the first tile has tokens 0-3, 8-11, 16-19, 24-27 and the second the rest: `soften_row` packs two vectors
// of 16 scores 4 by 4, after which they are in order.
static inline int64_t token_of_column(int64_t half, int64_t column) { return column / 4 * 8 + half * 4 + column % 4; }

// Tokens beyond the sequence's end are zeros.
template <typename T> static void pack_keys(const Cache &cache, const AttentionShape &shape, bf16 *packed) {
    const int64_t tiles = shape.head_dim / 32, dims = 64 / sizeof(T);
    for (int64_t start = 0; start < cache.seq_len; start += STRIP, packed += STRIP * shape.head_dim)
        for (int64_t half = 0; half < 2; ++half) {
            const T *rows[16];
            float scales[16] = {0};
            for (int64_t i = 0; i < 16; ++i) {
                const int64_t token = start + token_of_column(half, i), slot = token < cache.seq_len ? cache.slot(token, shape) : 0;
                rows[i] = token < cache.seq_len ? (const T *)cache.keys + slot / 16 * 16 * shape.head_dim + slot % 16 * dims : nullptr;
                if (cache.key_scales && rows[i]) scales[i] = cache.key_scales[slot];
            }
            for (int64_t kt = 0; kt < tiles; ++kt) {
                const int64_t at = kt * 32 / dims * dims * 16 + kt * 32 % dims;
                __m512i r[16];
                for (int i = 0; i < 16; ++i) r[i] = rows[i] ? load_bf16(rows[i] + at, scales[i]) : _mm512_setzero_si512();
                transpose_dwords(r);
                for (int i = 0; i < 16; ++i) _mm512_store_si512(packed + (kt * 2 + half) * 512 + i * 32, r[i]);
            }
        }
}

// bf16 values stay where they are, but for a partly filled last strip: what lies beyond the end may be NaN, and 0 * NaN is
// not 0.
static void place_values(const bf16 *, const Cache &cache, const AttentionShape &shape, const bf16 **values, bf16 *buffer) {
    const int64_t strips = (cache.seq_len + STRIP - 1) / STRIP, left = cache.seq_len % STRIP;
    for (int64_t s = 0; s < strips; ++s) values[s] = (const bf16 *)cache.values + cache.slot(s * STRIP, shape) * shape.head_dim;
    if (left == 0) return;
    memset(buffer, 0, STRIP * shape.head_dim * sizeof(bf16));
    for (int64_t tile = 0, whole = left / 2 * 32; tile < STRIP * shape.head_dim; tile += 512) {
        const bf16 *from = values[strips - 1] + tile;
        memcpy(buffer + tile, from, whole * sizeof(bf16));
        if (left % 2)
            for (int64_t d = 0; d < 16; ++d) buffer[tile + whole + 2 * d] = from[whole + 2 * d];
    }
    values[strips - 1] = buffer;
}

// int8 values, in fours of tokens, to bf16 in pairs.
static void place_values(const int8_t *, const Cache &cache, const AttentionShape &shape, const bf16 **values, bf16 *buffer) {
    alignas(64) uint16_t order[32];
    for (int i = 0; i < 16; ++i) order[2 * i] = i, order[2 * i + 1] = 16 + i;
    const __m512i interleave = _mm512_load_si512(order);
    const int64_t strips = (cache.seq_len + STRIP - 1) / STRIP;
    memset(buffer + (strips - 1) * STRIP * shape.head_dim, 0, STRIP * shape.head_dim * sizeof(bf16));
    for (int64_t s = 0; s < strips; ++s) values[s] = buffer + s * STRIP * shape.head_dim;
    for (int64_t token = 0; token < cache.seq_len; token += 4) {
        const int64_t slot = cache.slot(token, shape);
        const int8_t *in = (const int8_t *)cache.values + slot / STRIP * STRIP * shape.head_dim + slot % STRIP / 4 * 64;
        bf16 *out = buffer + token / STRIP * STRIP * shape.head_dim + token % STRIP / 2 * 32;
        __m512 scales[4];
        for (int i = 0; i < 4; ++i) scales[i] = _mm512_set1_ps(token + i < cache.seq_len ? cache.value_scales[slot + i] : 0.0f);
        for (int64_t d = 0; d < shape.head_dim; d += 16, in += 512, out += 512) {
            const __m512i x = _mm512_loadu_si512(in);
            const __m512 t0 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 24), 24)), scales[0]);
            const __m512 t1 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 16), 24)), scales[1]);
            const __m512 t2 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(x, 8), 24)), scales[2]);
            const __m512 t3 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_srai_epi32(x, 24)), scales[3]);
            _mm512_store_si512(out, _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(t1, t0)));
            _mm512_store_si512(out + 32, _mm512_permutexvar_epi16(interleave, (__m512i)_mm512_cvtne2ps_pbh(t3, t2)));
        }
    }
}

// Everything is in the order of the matrix unit's tiles, so that they lie dense in the L1 cache.
struct QueryTile {
    alignas(64) bf16 queries[8][ROWS][32];
    alignas(64) float scores[STRIPS][ROWS][STRIP];
    alignas(64) bf16 weights[STRIPS][ROWS][STRIP];
    alignas(64) float acc[8][4][16][16];
    alignas(64) float sums[ROWS][16];
    float offsets[ROWS];
    int64_t visible[ROWS], end;  // keys that a row sees, and the most of any

    int64_t strips(int64_t start) const {  // of the chunk at start
        return start < 0 || start >= end ? 0 : std::min(STRIPS, (end - start + STRIP - 1) / STRIP);
    }
};

// scores = queries x keys of the chunk at start. Calls between() where the vector units would wait.
template <typename F> static inline void score(QueryTile &tile, const Context &context, int64_t start, int64_t head_dim, F between) {
    for (int64_t strip = 0; strip < tile.strips(start); ++strip) {
        const bf16 *keys = context.keys + (start + strip * STRIP) * head_dim;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t kt = 0; kt < head_dim / 32; ++kt) {
            _tile_loadd(6, keys + kt * 1024, 64);
            _tile_loadd(4, tile.queries[kt][0], 64);
            _tile_loadd(7, keys + kt * 1024 + 512, 64);
            _tile_loadd(5, tile.queries[kt][16], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            between();
        }
        _tile_stored(0, &tile.scores[strip][0][0], STRIP * 4);
        _tile_stored(1, &tile.scores[strip][0][16], STRIP * 4);
        _tile_stored(2, &tile.scores[strip][16][0], STRIP * 4);
        _tile_stored(3, &tile.scores[strip][16][16], STRIP * 4);
    }
}

// acc += weights x values of the chunk at start.
template <typename F> static inline void weigh(QueryTile &tile, const Context &context, int64_t start, int64_t head_dim, F between) {
    const int64_t strips = tile.strips(start);
    if (strips == 0) return;
    for (int64_t d = 0; d < head_dim / 32; ++d) {
        if (start == 0) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        } else {
            _tile_loadd(0, tile.acc[d][0], 64);
            _tile_loadd(1, tile.acc[d][1], 64);
            _tile_loadd(2, tile.acc[d][2], 64);
            _tile_loadd(3, tile.acc[d][3], 64);
        }
        for (int64_t strip = 0; strip < strips; ++strip) {
            const bf16 *values = context.values[start / STRIP + strip] + d * 1024;
            _tile_loadd(6, values, 64);
            _tile_loadd(4, tile.weights[strip][0], 64);
            _tile_loadd(7, values + 512, 64);
            _tile_loadd(5, tile.weights[strip][16], 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            between();
        }
        _tile_stored(0, tile.acc[d][0], 64);
        _tile_stored(1, tile.acc[d][1], 64);
        _tile_stored(2, tile.acc[d][2], 64);
        _tile_stored(3, tile.acc[d][3], 64);
    }
}

// Weights are computed as 16-bit fixed-point logarithms, 7 bits before the point and 9 behind: 32 at once, and a bf16's bits
// are those of its logarithm + 127 but for a correction of the mantissa (Schraudolph, 1999). All weights of a row have one
// unknown factor, which the division by their sum removes: the row's reference, some early score, gets 2^(REFERENCE - 127),
// smaller ones down to 2^-127 (below: exactly 0), larger ones up to 2^(LIMIT - 127). Only a score beyond that moves the
// reference, so most chunks neither reduce a maximum nor rescale.
static const float FIXED = 512, REFERENCE = 100 * FIXED;
static const int LIMIT = 120 * 512;

static inline float largest_visible(const QueryTile &tile, int64_t row, int64_t visible, int64_t strips) {
    const __m512i column = _mm512_setr_epi32(0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27);
    __m512 top = _mm512_set1_ps(-INFINITY);
    for (int64_t s = 0; s < strips; ++s) {
        const __m512i left = _mm512_set1_epi32((int)std::min(STRIP, std::max<int64_t>(0, visible - s * STRIP)));
        const __mmask16 low = _mm512_cmplt_epi32_mask(column, left);
        const __mmask16 high = _mm512_cmplt_epi32_mask(_mm512_add_epi32(column, _mm512_set1_epi32(4)), left);
        top = _mm512_mask_max_ps(top, low, top, _mm512_load_ps(&tile.scores[s][row][0]));
        top = _mm512_mask_max_ps(top, high, top, _mm512_load_ps(&tile.scores[s][row][16]));
    }
    return _mm512_reduce_max_ps(top);
}

// The row's scores to weights, added to its sums; false, and nothing added, if a score is beyond the limit.
static inline bool weigh_row(QueryTile &tile, int64_t row, int64_t visible, int64_t strips, float factor) {
    const __m512 factors = _mm512_set1_ps(factor), offset = _mm512_set1_ps(tile.offsets[row]);
    const __m512i ones = _mm512_set1_epi16(0x3f80);
    // 2^f - 1 - f is about -f (1 - f) (0.304 + 0.079 f).
    const __m512i constant = _mm512_set1_epi16((short)(0.304 * 65536)), slope = _mm512_set1_epi16((short)(0.079 * 65536));
    __m512 sums = _mm512_load_ps(tile.sums[row]);
    __m512i top = _mm512_setzero_si512();
    for (int64_t s = 0; s < strips; ++s) {
        const __m512i low = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_load_ps(&tile.scores[s][row][0]), factors, offset));
        const __m512i high = _mm512_cvtps_epi32(_mm512_fmadd_ps(_mm512_load_ps(&tile.scores[s][row][16]), factors, offset));
        __m512i x = _mm512_packus_epi32(low, high);
        const int64_t left = visible - s * STRIP;
        if (left < STRIP) x = _mm512_maskz_mov_epi16(left > 0 ? (1u << left) - 1 : 0, x);
        top = _mm512_max_epu16(top, x);
        const __m512i f = _mm512_slli_epi16(x, 7), rest = _mm512_xor_si512(f, _mm512_set1_epi16(-1));
        const __m512i slant = _mm512_add_epi16(_mm512_mulhi_epu16(f, slope), constant);
        const __m512i correction = _mm512_mulhi_epu16(_mm512_mulhi_epu16(f, rest), slant);
        const __m512i weight = _mm512_srli_epi16(_mm512_sub_epi16(x, _mm512_srli_epi16(correction, 7)), 2);
        _mm512_store_si512(tile.weights[s][row], weight);
        sums = _mm512_dpbf16_ps(sums, (__m512bh)weight, (__m512bh)ones);
    }
    if (_mm512_cmpgt_epu16_mask(top, _mm512_set1_epi16((short)LIMIT))) return false;
    _mm512_store_ps(tile.sums[row], sums);
    return true;
}

// Makes the largest score of the chunk the row's reference.
static __attribute__((noinline)) void raise_reference(QueryTile &tile, int64_t row, int64_t visible, int64_t strips, float factor,
                                                      bool is_first, int64_t head_dim) {
    const float offset = REFERENCE - largest_visible(tile, row, visible, strips) * factor;
    const __m512 shrink = _mm512_set1_ps(std::exp2((offset - tile.offsets[row]) / FIXED));
    tile.offsets[row] = offset;
    if (is_first) return;
    _mm512_store_ps(tile.sums[row], _mm512_mul_ps(_mm512_load_ps(tile.sums[row]), shrink));
    for (int64_t d = 0; d < head_dim / 16; ++d) {
        float *acc = tile.acc[d / 2][row / 16 * 2 + d % 2][row % 16];
        _mm512_store_ps(acc, _mm512_mul_ps(_mm512_load_ps(acc), shrink));
    }
}

static void soften_row(QueryTile &tile, int64_t row, int64_t start, float factor, int64_t head_dim) {
    const int64_t strips = tile.strips(start), visible = tile.visible[row] - start;
    if (start == 0) {
        tile.offsets[row] = REFERENCE - largest_visible(tile, row, visible, 1) * factor;
        _mm512_store_ps(tile.sums[row], _mm512_setzero_ps());
    }
    if (weigh_row(tile, row, visible, strips, factor)) return;
    raise_reference(tile, row, visible, strips, factor, start == 0, head_dim);
    weigh_row(tile, row, visible, strips, factor);
}

// What a pair of tiles works on: query rows of one sequence and the group of one KV head.
struct Queries {
    const bf16 *q;
    bf16 *out;
    int64_t group, row_stride, count, before;  // count: of rows; before: tokens before the first query
    int64_t offset(int64_t row, int64_t head_dim) const { return row / group * row_stride + row % group * head_dim; }
};

// Rows that are fetched one by one while others are worked on: two heads of 128 dims are 8 lines on a page of their own.
struct Ahead {
    const Queries &queries;
    int64_t row, stop, head_dim;
    void fetch_row() {
        if (row >= stop) return;
        const bf16 *q = queries.q + queries.offset(row++, head_dim);
        for (int64_t d = 0; d < head_dim; d += 32) _mm_prefetch((const char *)(q + d), _MM_HINT_T1);
    }
};

static void load_queries(QueryTile &tile, const Queries &queries, int64_t first, int64_t head_dim) {
    tile.end = 0;
    for (int64_t r = 0; r < ROWS && first < queries.count; ++r) {
        const int64_t row = std::min(first + r, queries.count - 1);  // the last one again, where there are no more
        const bf16 *q = queries.q + queries.offset(row, head_dim);
        for (int64_t kt = 0; kt < head_dim / 32; ++kt) _mm512_store_si512(tile.queries[kt][r], _mm512_loadu_si512(q + kt * 32));
        tile.end = tile.visible[r] = queries.before + row / queries.group + 1;
    }
}

static void store_outputs(const QueryTile &tile, const Queries &queries, int64_t first, int64_t head_dim) {
    for (int64_t r = 0; r < ROWS && first + r < queries.count; ++r) {
        const __m512 factor = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(_mm512_load_ps(tile.sums[r])));
        bf16 *out = queries.out + queries.offset(first + r, head_dim);
        const bool streams = (uintptr_t)out % 64 == 0;  // around the caches: an ordinary store reads its line first
        for (int64_t d = 0; d < head_dim / 32; ++d) {
            const float(*halves)[16][16] = tile.acc[d] + r / 16 * 2;
            const __m512 low = _mm512_mul_ps(_mm512_load_ps(halves[0][r % 16]), factor);
            const __m512i line = (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_load_ps(halves[1][r % 16]), factor), low);
            if (streams) _mm512_stream_si512((__m512i *)(out + d * 32), line);
            else _mm512_storeu_si512(out + d * 32, line);
        }
    }
}

// For `now`, weighs the values of one chunk and scores the next; between these products `other`'s scores of its chunk at
// soften_start become weights, and rows ahead are fetched. Chunks below 0 or beyond a tile's end are empty.
static void overlap(QueryTile &now, int64_t weigh_start, int64_t score_start, QueryTile &other, int64_t soften_start,
                    const Context &context, float factor, int64_t head_dim, Ahead &ahead) {
    // The intrinsics do not tell the compiler that tiles are loaded from memory.
    asm volatile("" ::: "memory");
    const int64_t rows = other.strips(soften_start) ? ROWS : 0;
    const int64_t products = std::max<int64_t>(1, (now.strips(weigh_start) + now.strips(score_start)) * head_dim / 32);
    int64_t row = 0, due = 0;
    const auto between = [&] {
        ahead.fetch_row();
        for (due += rows; row * products < due && row < rows; ++row) soften_row(other, row, soften_start, factor, head_dim);
    };
    weigh(now, context, weigh_start, head_dim, between);
    score(now, context, score_start, head_dim, between);
    for (; row < rows; ++row) soften_row(other, row, soften_start, factor, head_dim);
    asm volatile("" ::: "memory");
}

// Two tiles of rows from `first` on; those from `next` on will follow.
static void attend(QueryTile *tiles, const Queries &queries, int64_t first, int64_t next, const Context &context,
                   const AttentionShape &shape) {
    const int64_t head_dim = shape.head_dim;
    const float factor = shape.scale * 1.44269504f * FIXED;
    QueryTile &a = tiles[0], &b = tiles[1];
    load_queries(a, queries, first, head_dim);
    load_queries(b, queries, first + ROWS, head_dim);
    Ahead ahead = {queries, next, std::min(queries.count, next + 2 * ROWS), head_dim};
    const int64_t end = std::max(a.end, b.end), before = -CHUNK;
    overlap(a, before, 0, b, before, context, factor, head_dim, ahead);
    for (int64_t start = 0; start < end + CHUNK; start += CHUNK) {
        overlap(b, start - CHUNK, start, a, start, context, factor, head_dim, ahead);
        overlap(a, start, start + CHUNK, b, start, context, factor, head_dim, ahead);
    }
    store_outputs(a, queries, first, head_dim);
    store_outputs(b, queries, first + ROWS, head_dim);
}

template <typename T>
static void paged_prefill(const bf16 *q, const T *k_cache, const T *v_cache, const float *k_scales, const float *v_scales,
                          const int32_t *block_tables, int64_t table_stride, const int64_t *starts, const int64_t *query_lens,
                          const int64_t *seq_lens, int64_t num_seqs, const AttentionShape &shape, int64_t parts, bf16 *out) {
    const int64_t group = shape.num_heads / shape.num_kv_heads, head_dim = shape.head_dim;
#pragma omp parallel
    {
        configure_tiles(16);
        const FlushDenormals flush;
        static thread_local QueryTile tiles[2];
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < num_seqs * shape.num_kv_heads * parts; ++item) {
            const int64_t part = item % parts, kv_head = item / parts % shape.num_kv_heads, seq = item / parts / shape.num_kv_heads;
            const int64_t at = (starts[seq] * shape.num_heads + kv_head * group) * head_dim;
            const Queries queries = {q + at, out + at, group, shape.num_heads * head_dim, query_lens[seq] * group,
                                     seq_lens[seq] - query_lens[seq]};
            if (part * 2 * ROWS >= queries.count) continue;
            const int64_t strips = (seq_lens[seq] + STRIP - 1) / STRIP, size = strips * STRIP * head_dim;
            bf16 *memory = scratch<bf16>(2 * size + strips * sizeof(void *));
            const Context context = {memory, (const bf16 **)(memory + 2 * size)};
            const Cache cache = {k_cache, v_cache, k_scales, v_scales, block_tables + seq * table_stride, kv_head, seq_lens[seq]};
            pack_keys<T>(cache, shape, context.keys);
            place_values(v_cache, cache, shape, context.values, memory + size);
            // Later tiles see more keys: shares take every parts-th pair.
            for (int64_t first = part * 2 * ROWS, next; first < queries.count; first = next) {
                next = first + parts * 2 * ROWS;
                attend(tiles, queries, first, next, context, shape);
            }
        }
        _mm_sfence();
        _tile_release();
    }
}

// Sequence i has the queries starts[i] .. starts[i] + query_lens[i] - 1, the last ones of its seq_lens[i] tokens.
// The caches' order is that of decode_tiled.cpp. head_dim: at most 256. parts: into how many shares the query tiles of one (sequence, KV head) go.
extern "C" void paged_prefill_bf16(const bf16 *q, const bf16 *k_cache, const bf16 *v_cache, const float *k_scales,
                                   const float *v_scales, const int32_t *block_tables, int64_t table_stride,
                                   const int64_t *starts, const int64_t *query_lens, const int64_t *seq_lens, int64_t num_seqs,
                                   int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                                   int64_t block_rows, float scale, int64_t parts, bf16 *out) {
    paged_prefill(q, k_cache, v_cache, k_scales, v_scales, block_tables, table_stride, starts, query_lens, seq_lens, num_seqs,
                  {num_heads, num_kv_heads, head_dim, block_size, block_rows, scale}, parts, out);
}

extern "C" void paged_prefill_int8(const bf16 *q, const int8_t *k_cache, const int8_t *v_cache, const float *k_scales,
                                   const float *v_scales, const int32_t *block_tables, int64_t table_stride,
                                   const int64_t *starts, const int64_t *query_lens, const int64_t *seq_lens, int64_t num_seqs,
                                   int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size,
                                   int64_t block_rows, float scale, int64_t parts, bf16 *out) {
    paged_prefill(q, k_cache, v_cache, k_scales, v_scales, block_tables, table_stride, starts, query_lens, seq_lens, num_seqs,
                  {num_heads, num_kv_heads, head_dim, block_size, block_rows, scale}, parts, out);
}
#endif
