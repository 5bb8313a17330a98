// Linear layers on packed int8 weights (AMX): y = (q W^T) * scale of the row * scale of the output + bias.

#include "common.h"

// Both factors are symmetric int8, row by row: x = q * scale, scale = max |x| / 127. A row of x is quantized when it is
// packed, a row of the weight (an output) once, at load. A packed weight is a row of strips, each holding 32 outputs:
//     [strip][input / 64][2 halves of 16 outputs][16 quads of inputs][16 outputs][4 inputs]
// One [16][16][4] piece is an AMX tile. Scales of the outputs: [strip][32] float32. Padding is zero in the weight alone:
// what stands opposite, unwritten rows and inputs of x, may be anything, as integers have no NaN.

#if defined(HAVE_AMX) && defined(__AMX_INT8__)
// Rows of activations that are multiplied in one go: their packed form stays in the L2 cache while strips go by.
static const int64_t ROWS_AT_ONCE = 256;
// With many rows, so many input tiles at a time: then both factors of a product come from the L1 cache (16 KB each).
static const int64_t K_TILES_AT_ONCE = 8;
// Bytes by which the weights of few rows are fetched ahead, which are read once, at the speed of memory.
static const int64_t AHEAD = 8192;
// Rows with a smaller maximum count as zero; keeps 127 / maximum finite.
static const float TINY = 1e-30f;

// One row to int8, 64 inputs at a time to out, out + stride, ...; the last ones zero-padded. Returns the scale, NaN if
// there is a NaN: as integers, bf16 magnitudes are in order, and NaN is above infinity.
static float quantize_row(const bf16 *x, int64_t k, int8_t *out, int64_t stride) {
    const __m512i low = _mm512_set1_epi32(0xffff), magnitude = _mm512_set1_epi16(0x7fff);
    const auto load = [&](int64_t i) {
        const int64_t left = k - i;
        return _mm512_maskz_loadu_epi16(left >= 32 ? 0xffffffff : left > 0 ? (1u << left) - 1 : 0, x + i);
    };
    __m512i pairs = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 32) pairs = _mm512_max_epu16(pairs, _mm512_and_si512(load(i), magnitude));
    pairs = _mm512_max_epu32(_mm512_and_si512(pairs, low), _mm512_srli_epi32(pairs, 16));
    float largest = to_float((bf16)_mm512_reduce_max_epu32(pairs));
    largest = largest < TINY ? TINY : largest;
    const __m512 inverse = _mm512_set1_ps(127.0f / largest);
    for (int64_t start = 0; start < k; start += 64, out += stride)
        for (int64_t i = 0; i < 64; i += 32) {
            // The first and the second of each pair are float32 as they lie there, but for 16 bits that are cleared.
            const __m512i pair = load(start + i);
            const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
            const __m512 second = _mm512_castsi512_ps(_mm512_andnot_si512(low, pair));
            const __m512i q = _mm512_mask_blend_epi16(
                0xaaaaaaaa, _mm512_cvtps_epi32(_mm512_mul_ps(first, inverse)),
                _mm512_slli_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(second, inverse)), 16));
            _mm256_storeu_si256((__m256i *)(out + i), _mm512_cvtsepi16_epi8(q));
        }
    return largest / 127.0f;
}

// Tiles 0 to 3 are sums, 4 and 5 rows of x (0, 1 and 4 the first 16, the others those after), 6 and 7 weights. Few rows
// cost less in tiles of as many.
static void configure_tiles_for(int64_t rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.bytes_per_row[i] = 64;
    if (rows < 16) config.rows[0] = config.rows[1] = config.rows[4] = rows;
    if (rows > 16 && rows < 32) config.rows[2] = config.rows[3] = config.rows[5] = rows - 16;
    _tile_loadconfig(&config);
}

template <_mm_hint HINT> static inline void fetch_lines(const char *at, int64_t lines) {
    for (int64_t line = 0; line < lines; ++line) _mm_prefetch(at + line * 64, HINT);
}

// 16 or 32 rows (tile rows a and a1) by `k_tiles` tiles of a strip; sums [2 tile rows][2 halves][16][16] int32, which are
// added to or started. `ahead` is what the caller will want next: lines of it are fetched meanwhile, between the tile
// operations, as in one burst they would block the loads behind them.
template <bool TWO>
static void multiply(const int8_t *a, const int8_t *a1, int64_t k_tiles, const int8_t *strip, const int8_t *ahead,
                     int64_t lines, bool add, int32_t *sums) {
    if (add) {
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + 256, 64);
        if (TWO) {
            _tile_loadd(2, sums + 512, 64);
            _tile_loadd(3, sums + 768, 64);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        if (TWO) {
            _tile_zero(2);
            _tile_zero(3);
        }
    }
    const int64_t quarter = lines / 4;
    const _mm_hint HINT = TWO ? _MM_HINT_T1 : _MM_HINT_T0;  // two tile rows leave no room in the L1 cache
    for (int64_t kt = 0; kt < k_tiles; ++kt) {
        const int8_t *b = strip + kt * 2048;
        const char *next = (const char *)ahead + kt * lines * 64;
        fetch_lines<HINT>(next, quarter);
        _tile_loadd(6, b, 64);
        if (TWO) fetch_lines<_MM_HINT_T0>((const char *)(a + (kt + 2) * 1024), 16);
        _tile_loadd(4, a + kt * 1024, 64);
        _tile_dpbssd(0, 4, 6);
        fetch_lines<HINT>(next + quarter * 64, quarter);
        _tile_loadd(7, b + 1024, 64);
        _tile_dpbssd(1, 4, 7);
        fetch_lines<HINT>(next + quarter * 128, quarter);
        if (TWO) {
            fetch_lines<_MM_HINT_T0>((const char *)(a1 + (kt + 2) * 1024), 16);
            _tile_loadd(5, a1 + kt * 1024, 64);
            _tile_dpbssd(2, 5, 6);
        }
        fetch_lines<HINT>(next + quarter * 192, quarter);
        if (TWO) _tile_dpbssd(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if (TWO) {
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
    }
}

static inline __m512 load_bias(const bf16 *bias, int64_t column, int64_t n) {
    return bias && column < n ? load16(bias + column, lanes(n - column)) : _mm512_setzero_ps();
}

// One strip's sums of up to 32 rows to the output. Gated: the halves are gate and up of the same 16 outputs.
static void finish(const int32_t *sums, const float *row_scales, int64_t rows, int64_t strip, const float *scales, int64_t n,
                   const bf16 *bias, bool gated, bf16 *out, int64_t out_stride) {
    const int64_t column = strip * (gated ? 16 : 32);
    const __m512 bias0 = load_bias(bias, column, n), bias1 = load_bias(bias, column + 16, n);
    const __m512 scale0 = _mm512_loadu_ps(scales + strip * 32), scale1 = _mm512_loadu_ps(scales + strip * 32 + 16);
    for (int64_t r = 0; r < rows; ++r) {
        const int32_t *row = sums + (r / 16) * 512 + (r % 16) * 16;
        const __m512 row_scale = _mm512_set1_ps(row_scales[r]);
        const __m512 product0 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(row)), row_scale);
        const __m512 product1 = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_load_si512(row + 256)), row_scale);
        const __m512 first = _mm512_fmadd_ps(product0, scale0, bias0), second = _mm512_fmadd_ps(product1, scale1, bias1);
        bf16 *target = out + r * out_stride + column;
        if (gated) {
            store_bf16(target, _mm512_mul_ps(silu(first), second), n - column);
        } else {
            store_bf16(target, first, n - column);
            store_bf16(target + 16, second, n - column - 16);
        }
    }
}

// scratch: tiles [rows / 16][k / 64][16][64] int8 of as many rows as go at once (a multiple of 32), then their scales.
extern "C" void linear_int8(const bf16 *x, int64_t m, int64_t k, int64_t x_stride, const int8_t *packed, const float *scales,
                            int64_t n, const bf16 *bias, int gated, bf16 *out, int64_t out_stride, int8_t *scratch) {
    const int64_t k_tiles = (k + 63) / 64, strips = gated ? (n + 15) / 16 : (n + 31) / 32;
    if (m == 0) return;
    const int64_t held = std::min(ROWS_AT_ONCE, (m + 31) / 32 * 32);
    float *row_scales = (float *)(scratch + held * k_tiles * 64);
#pragma omp parallel
    {
        configure_tiles_for(m);
        alignas(64) int32_t sums[ROWS_AT_ONCE / 32 * 1024];
        for (int64_t start = 0; start < m; start += ROWS_AT_ONCE) {
            const int64_t rows = std::min(ROWS_AT_ONCE, m - start);
#pragma omp for schedule(static)
            for (int64_t r = 0; r < rows; ++r) {
                int8_t *tiles = scratch + r / 16 * k_tiles * 1024 + r % 16 * 64;
                row_scales[r] = quantize_row(x + (start + r) * x_stride, k, tiles, 1024);
            }
#pragma omp for schedule(static)
            for (int64_t strip = 0; strip < strips; ++strip) {
                const int8_t *weights = packed + strip * k_tiles * 2048;
                const int64_t step = rows > 32 ? K_TILES_AT_ONCE : k_tiles;
                for (int64_t kt = 0; kt < k_tiles; kt += step) {
                    const int64_t count = std::min(step, k_tiles - kt);
                    for (int64_t r = 0; r < rows; r += 32) {
                        const int8_t *a = scratch + (r / 16 * k_tiles + kt) * 1024, *b = weights + kt * 2048;
                        // Few rows: the same strip, further on. Many: an eighth of the tiles that come after these.
                        const int8_t *ahead = rows > 32 ? b + step * 2048 + r / 32 * step * 256 : b + AHEAD;
                        const int64_t lines = rows > 32 ? 4 : 32;
                        int32_t *block = sums + r / 32 * 1024;
                        if (rows - r > 16) multiply<true>(a, a + k_tiles * 1024, count, b, ahead, lines, kt > 0, block);
                        else multiply<false>(a, a, count, b, ahead, lines, kt > 0, block);
                    }
                }
                for (int64_t r = 0; r < rows; r += 32)
                    finish(sums + r / 32 * 1024, row_scales + r, std::min<int64_t>(32, rows - r), strip, scales, n, bias,
                           gated, out + (start + r) * out_stride, out_stride);
            }
        }
        _tile_release();
    }
}

// w [n, k] to strips and their scales. Gated: w is [2 n, k], gate first, and a strip takes 16 rows of each.
extern "C" void pack_int8(const bf16 *w, int64_t n, int64_t k, int64_t w_stride, int gated, int8_t *packed, float *scales) {
    const int64_t k_tiles = (k + 63) / 64, strips = gated ? (n + 15) / 16 : (n + 31) / 32;
#pragma omp parallel
    {
        std::vector<int32_t> quads(k_tiles * 16);
#pragma omp for schedule(static)
        for (int64_t strip = 0; strip < strips; ++strip)
            for (int64_t c = 0; c < 32; ++c) {
                const int64_t half = c / 16, column = gated ? strip * 16 + c % 16 : strip * 32 + c;
                std::fill(quads.begin(), quads.end(), 0);
                scales[strip * 32 + c] = 0;
                if (column < n) {
                    const bf16 *row = w + (gated ? column + half * n : column) * w_stride;
                    scales[strip * 32 + c] = quantize_row(row, k, (int8_t *)quads.data(), 64);
                }
                int32_t *tiles = (int32_t *)packed + strip * k_tiles * 512 + half * 256 + c % 16;
                for (int64_t quad = 0; quad < k_tiles * 16; ++quad) tiles[quad / 16 * 512 + quad % 16 * 16] = quads[quad];
            }
    }
}
#endif
