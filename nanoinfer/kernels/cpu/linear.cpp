// Linear layers on packed weights (AMX), in bf16 or in int8.
//
// A packed weight is a row of strips, each holding 32 outputs for all inputs:
//     bf16  [strip][input / 32][2 halves of 16 outputs][16 pairs of inputs][16 outputs][2 inputs]
//     int8  [strip][input / 64][2 halves of 16 outputs][16 quads of inputs][16 outputs][4 inputs]
// One piece of 16 x 16 is an AMX tile of 1 KB; a strip is read from front to back, so memory sees one stream per thread.
//
// The activations' tiles are loaded from where they lie, or from a copy, padded to a whole number of tiles. In int8,
// both factors are symmetric, row by row: x = q * scale, scale = max |x| / 127. A row of x is quantized to a copy, a row of
// the weight (an output) once, at load: y = (q W^T) * scale of the row * scale of the output. Scales of the outputs:
// [strip][32] float32. Padding is zero in the weight alone: what stands opposite may be any integer.

#include "common.h"

#include <sys/syscall.h>
#include <unistd.h>

#if defined(HAVE_AMX) && defined(__AMX_INT8__)
// Bytes of activations that stay in a core's L2 cache while strips go by.
static const int64_t RESIDENT_BYTES = 1200 << 10;
// Threads share rows rather than strips from so many rows a thread on: with fewer, each would read weights for too little.
static const int64_t ROWS_PER_THREAD = 128;
// Activations are copied where so many strips read them: rows a power of two apart share sets of the caches, which costs 4 %.
static const int64_t STRIPS_PER_COPY = 100;
// Bytes by which the weights of few rows are fetched ahead.
static const int64_t AHEAD = 2048;
static const int64_t TILE_BYTES = 1024;
// Up to so many rows, a strip is read from memory while the first of them are multiplied; of more, each fetch a part of the next.
static const int64_t FEW_ROWS = 128;
// Rows that go by a strip together: 48 if that is all, -20 % at 33 to 48 rows; of more, 32, whose sums leave room for all factors.
static const int64_t SHORT_BLOCK = 32, TALL_BLOCK = 48;

template <typename T> struct Linear {
    const T *packed;
    const float *scales;  // of the outputs; int8 only
    const bf16 *bias;
    int64_t k_tiles, n, strips;
    bool gated;
    bf16 *out;
    int64_t out_stride;
    bool streams;  // whether outputs go around the caches: only whole lines can
};

// Sums of up to 48 rows by one strip, [tiles][2 halves][16 rows][16], float32 or int32, and where they go. The last tile's
// rows end where the block does, so that some may be in the one before, too.
struct Block {
    alignas(64) float sums[1536];
    int64_t row, rows = 0, tiles, last_tile, overlap, strip;  // the last tile's first row, and how many it shares
    const float *row_scales;  // int8 only
    bf16 *halves;             // gated and streamed: [rows][16], where an even strip's outputs wait for the odd one's
};

// Rows with a smaller maximum count as zero; keeps 127 / maximum finite.
static const float TINY = 1e-30f;

// One row to int8, zero-padded to a multiple of 64 inputs. Returns the scale, NaN if there is a NaN: as integers, bf16
// magnitudes are in order, and NaN is above infinity.
static float quantize_row(const bf16 *x, int64_t k, int8_t *out) {
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
    for (int64_t start = 0; start < k; start += 64)
        for (int64_t i = start; i < start + 64; i += 32) {
            // The first and the second of each pair are float32 as they lie there, but for 16 bits that are cleared.
            const __m512i pair = load(i);
            const __m512 first = _mm512_castsi512_ps(_mm512_slli_epi32(pair, 16));
            const __m512 second = _mm512_castsi512_ps(_mm512_andnot_si512(low, pair));
            const __m512i q = _mm512_mask_blend_epi16(
                0xaaaaaaaa, _mm512_cvtps_epi32(_mm512_mul_ps(first, inverse)),
                _mm512_slli_epi32(_mm512_cvtps_epi32(_mm512_mul_ps(second, inverse)), 16));
            _mm256_storeu_si256((__m256i *)(out + i), _mm512_cvtsepi16_epi8(q));
        }
    return largest / 127.0f;
}

static inline void fetch_lines(const char *at, int64_t lines) {
    for (int64_t line = 0; line < lines; ++line) _mm_prefetch(at + line * 64, _MM_HINT_T1);
}

// One row, padded with zeros up to a multiple of 32 inputs.
static void copy_row(const bf16 *x, int64_t k, bf16 *out, float *) {
    for (int64_t i = 0; i < k; i += 32) _mm512_store_si512(out + i, _mm512_maskz_loadu_epi16(k - i >= 32 ? ~0u : (1u << (k - i)) - 1, x + i));
}
static void copy_row(const bf16 *x, int64_t k, int8_t *out, float *scale) { *scale = quantize_row(x, k, out); }

static inline __m512 load_bias(const bf16 *bias, int64_t column, int64_t n) {
    return bias && column < n ? load16(bias + column, lanes(n - column)) : _mm512_setzero_ps();
}

// 16 of a row's outputs: half 0 or 1 of the strip.
template <typename T> static inline __m512 outputs(const Block &block, int64_t r, int half, const Linear<T> &linear) {
    const int64_t at = r + (r >= block.last_tile ? block.overlap : 0);
    const __m512 sums = _mm512_load_ps(block.sums + at / 16 * 512 + half * 256 + at % 16 * 16);
    const __m512 bias = load_bias(linear.bias, block.strip * 32 + half * 16, linear.n);  // a gated layer has none
    if constexpr (sizeof(T) == 2) return _mm512_add_ps(sums, bias);
    const __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_castps_si512(sums)), _mm512_set1_ps(block.row_scales[r]));
    return _mm512_fmadd_ps(product, _mm512_loadu_ps(linear.scales + block.strip * 32 + half * 16), bias);
}

// One row of a block to the output. Gated: the halves are gate and up of the same 16 outputs.
//
// An ordinary store fetches its line first, even to overwrite all of it, and rows that are a multiple of 4 KB apart share one
// set of the cache. So lines are put together and streamed: 0.8 -> 2.7 TF/s for 1024 x 1024 x 4096, 22 -> 27 GB/s for 32 rows.
template <typename T> static inline void finish_row(const Block &block, int64_t r, const Linear<T> &linear) {
    const __m512 first = outputs(block, r, 0, linear), second = outputs(block, r, 1, linear);
    const int64_t column = block.strip * (linear.gated ? 16 : 32), left = linear.n - column;
    bf16 *out = linear.out + (block.row + r) * linear.out_stride + column;
    if (!linear.gated) {
        const __m512i both = (__m512i)_mm512_cvtne2ps_pbh(second, first);
        if (linear.streams && left >= 32) _mm512_stream_si512((__m512i *)out, both);
        else _mm512_mask_storeu_epi16(out, left >= 32 ? ~0u : (1u << left) - 1, both);
        return;
    }
    const __m512 product = _mm512_mul_ps(silu(first), second);
    const bool odd = block.strip % 2;
    if (!linear.streams || left < (odd ? 16 : 32)) store16(out, product, lanes(left));
    else if (!odd) store16(block.halves + r * 16, product, 0xffff);
    else {
        const __m512i earlier = _mm512_castsi256_si512(_mm256_load_si256((const __m256i *)(block.halves + r * 16)));
        _mm512_stream_si512((__m512i *)(out - 16), _mm512_inserti64x4(earlier, (__m256i)_mm512_cvtneps_pbh(product), 1));
    }
}

#define PRODUCT(sums, rows, weights) \
    if constexpr (sizeof(T) == 1) _tile_dpbssd(sums, rows, weights); \
    else _tile_dpbf16ps(sums, rows, weights)

// Rows of activations, row_bytes apart, by one strip: a tile of 16 (or all, of fewer) from each of a, a1 and a2. Everything
// that waits for memory stands between the tile operations, since bursts would block the loads behind them: fetches of what
// is wanted next, LINES for each tile of the strip, and the rows of the block before, which go to the output.
//
// After half a microsecond of tile loads and products alone, a tile store takes 0.3 us (seen on a 4th generation Xeon in a
// virtual machine; the cause is not known), and none if there was another store of 512 bits or a tile meanwhile: hence the
// one within, which means nothing.
template <int TILES, int LINES, typename T>
static void multiply(const T *a, const T *a1, const T *a2, int64_t row_bytes, const char *strip, const char *ahead,
                     const Linear<T> &linear, const Block &before, Block &block) {
    _tile_zero(0);
    _tile_zero(1);
    if (TILES > 1) {
        _tile_zero(2);
        _tile_zero(3);
    }
    if (TILES > 2) {
        _tile_zero(4);
        _tile_zero(5);
    }
    const int64_t step = 64 / sizeof(T), odd = (LINES + 2) / 4, even = LINES / 4;
    for (int64_t kt = 0; kt < linear.k_tiles; ++kt, a += step, a1 += step, a2 += step, strip += 2 * TILE_BYTES, ahead += LINES * 64) {
        fetch_lines(ahead, odd);
        _tile_loadd(6, strip, 64);
        if constexpr (TILES == 3) {
            // Six sums leave two tiles: rows are loaded again, from the L1 cache, for the strip's second half.
            _tile_loadd(7, a, row_bytes);
            PRODUCT(0, 7, 6);
            fetch_lines(ahead + odd * 64, even);
            _tile_loadd(7, a1, row_bytes);
            PRODUCT(2, 7, 6);
            _tile_loadd(7, a2, row_bytes);
            PRODUCT(4, 7, 6);
            fetch_lines(ahead + (odd + even) * 64, odd);
            _tile_loadd(6, strip + TILE_BYTES, 64);
            PRODUCT(5, 7, 6);
        } else {
            _tile_loadd(4, a, row_bytes);
            PRODUCT(0, 4, 6);
            fetch_lines(ahead + odd * 64, even);
            _tile_loadd(7, strip + TILE_BYTES, 64);
            PRODUCT(1, 4, 7);
            fetch_lines(ahead + (odd + even) * 64, odd);
            if constexpr (TILES == 2) {
                _tile_loadd(5, a1, row_bytes);
                PRODUCT(2, 5, 6);
            }
        }
        if (kt < before.rows) finish_row(before, kt, linear);
        else if (LINES < 32 && kt % 16 == 15) _tile_stored(7, block.sums, 64);
        fetch_lines(ahead + (2 * odd + even) * 64, even);
        if constexpr (TILES == 3) {
            _tile_loadd(7, a1, row_bytes);
            PRODUCT(3, 7, 6);
            _tile_loadd(7, a, row_bytes);
            PRODUCT(1, 7, 6);
        } else if constexpr (TILES == 2) {
            PRODUCT(3, 5, 7);
        }
    }
    for (int64_t r = linear.k_tiles; r < before.rows; ++r) finish_row(before, r, linear);
    _tile_stored(0, block.sums, 64);
    _tile_stored(1, block.sums + 256, 64);
    if (TILES > 1) {
        _tile_stored(2, block.sums + 512, 64);
        _tile_stored(3, block.sums + 768, 64);
    }
    if (TILES > 2) {
        _tile_stored(4, block.sums + 1024, 64);
        _tile_stored(5, block.sums + 1280, 64);
    }
}

template <int LINES, typename T>
static void multiply_block(const T *rows, int64_t row_bytes, const char *strip, const char *ahead, const Linear<T> &linear,
                           const Block &before, Block &block) {
    const auto from = [&](int64_t row) { return rows + row * row_bytes / (int64_t)sizeof(T); };
    const T *last = from(std::max<int64_t>(0, block.rows - 16));
    if (block.tiles == 1) multiply<1, LINES>(rows, rows, rows, row_bytes, strip, ahead, linear, before, block);
    else if (block.tiles == 2) multiply<2, LINES>(rows, last, last, row_bytes, strip, ahead, linear, before, block);
    else multiply<3, 32>(rows, from(16), last, row_bytes, strip, ahead, linear, before, block);
}

// One thread's rows [first_row, last_row) by its strips [first, last), at_once of them together. Rows that have to be copied
// are copied by the thread that reads them: a barrier, and lines that another core has just written, would cost more.
template <typename T>
static void multiply_range(const bf16 *x, int64_t x_stride, int64_t k, const Linear<T> &linear, int64_t first_row,
                           int64_t last_row, int64_t at_once, bool few, int64_t first, int64_t last) {
    const bool copies = sizeof(T) == 1 || k % 32 || last - first >= STRIPS_PER_COPY;
    const int64_t strip_bytes = linear.k_tiles * 2 * TILE_BYTES, row_bytes = copies ? (linear.k_tiles + 1) * 64 : x_stride * sizeof(bf16);
    const int64_t copy_bytes = copies ? at_once * row_bytes : 0;
    char *memory = scratch<char>(copy_bytes + at_once * (16 * sizeof(bf16) + sizeof(float)));
    T *copy = (T *)memory;
    bf16 *halves = (bf16 *)(memory + copy_bytes);
    float *row_scales = (float *)(halves + at_once * 16);
    const char *weights = (const char *)linear.packed;
    const int64_t block_rows = at_once <= TALL_BLOCK ? TALL_BLOCK : SHORT_BLOCK;
    // Lines of the next strip that are fetched for each tile: so that it comes while this one is multiplied, but once.
    const int64_t lines = at_once < 512 ? 4 : 2;
    if (few) fetch_lines(weights + first * strip_bytes, AHEAD / 64);
    Block blocks[2];
    for (int64_t begin = first_row; begin < last_row; begin += at_once) {
        const int64_t start = std::max(first_row, std::min(begin, last_row - 16)), rows = std::min(at_once, last_row - start);
        for (int64_t r = 0; copies && r < rows; ++r) {
            fetch_lines(weights + first * strip_bytes + r * linear.k_tiles * 64, linear.k_tiles);
            copy_row(x + (start + r) * x_stride, k, copy + r * row_bytes / sizeof(T), row_scales + r);
        }
        const T *activations = copies ? copy : (const T *)(x + start * x_stride);
        int turn = 0;
        blocks[1].rows = 0;
        for (int64_t strip = first; strip < last; ++strip)
            for (int64_t done = 0, part = few ? -1 : 0; done < rows; done += block_rows, ++part, turn ^= 1) {
                const int64_t end = std::min(rows, done + block_rows), r = std::max<int64_t>(0, std::min(done, end - 16));
                Block &block = blocks[turn];
                const Block &before = blocks[turn ^ 1];
                block.row = start + r, block.rows = end - r, block.tiles = (end - r + 15) / 16, block.strip = strip;
                block.last_tile = 16 * (block.tiles - 1), block.overlap = 16 * block.tiles - std::max<int64_t>(16, end - r);
                block.row_scales = row_scales + r, block.halves = halves + r * 16;
                const char *at = weights + strip * strip_bytes, *next = at + strip_bytes + part * linear.k_tiles * lines * 64;
                const T *block_at = activations + r * row_bytes / (int64_t)sizeof(T);
                if (part < 0) multiply_block<32>(block_at, row_bytes, at, at + AHEAD, linear, before, block);
                else if (lines == 4) multiply_block<4>(block_at, row_bytes, at, next, linear, before, block);
                else multiply_block<2>(block_at, row_bytes, at, next, linear, before, block);
            }
        for (int64_t r = 0; r < blocks[turn ^ 1].rows; ++r) finish_row(blocks[turn ^ 1], r, linear);
    }
    _mm_sfence();
}

// x [m, k], rows x_stride apart, by all strips, in a grid of row ranges and strip ranges, one for each thread.
template <typename T> static void multiply_all(const bf16 *x, int64_t m, int64_t k, int64_t x_stride, Linear<T> linear) {
    if (m == 0) return;
    linear.streams = ((uintptr_t)linear.out | linear.out_stride * sizeof(bf16)) % 64 == 0;
    const int64_t unit = linear.gated ? 2 : 1, units = (linear.strips + unit - 1) / unit;
#pragma omp parallel
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        int64_t row_parts = std::min(threads, std::max<int64_t>(1, m / ROWS_PER_THREAD));
        while (threads % row_parts) --row_parts;
        const int64_t strip_parts = threads / row_parts, row_part = thread / strip_parts, strip_part = thread % strip_parts;
        const int64_t row_tiles = (m + 31) / 32;
        const int64_t first_row = row_tiles * row_part / row_parts * 32, last_row = row_tiles * (row_part + 1) / row_parts * 32;
        const int64_t first = units * strip_part / strip_parts * unit;
        const int64_t last = std::min(linear.strips, units * (strip_part + 1) / strip_parts * unit);
        configure_tiles(std::min<int64_t>(m, 16));
        const int64_t rows = std::min(m, last_row) - first_row, most = std::max<int64_t>(32, RESIDENT_BYTES / (linear.k_tiles * 64) / 32 * 32);
        const int64_t groups = (rows + most - 1) / most, at_once = std::min(rows, ((rows + groups - 1) / groups + 31) / 32 * 32);
        multiply_range(x, x_stride, k, linear, first_row, first_row + rows, at_once, m <= FEW_ROWS, first, last);
        _tile_release();
    }
}

static int64_t num_strips(int64_t n, int gated) { return gated ? (n + 15) / 16 : (n + 31) / 32; }

// out [m, n] = x W^T + bias. Gated: there are 2 n outputs and no bias, and out is silu(first half) * second half.
extern "C" void linear_bf16(const bf16 *x, int64_t m, int64_t k, int64_t x_stride, const bf16 *packed, int64_t n,
                            const bf16 *bias, int gated, bf16 *out, int64_t out_stride) {
    multiply_all<bf16>(x, m, k, x_stride, {packed, nullptr, bias, (k + 31) / 32, n, num_strips(n, gated), gated != 0, out, out_stride});
}

extern "C" void linear_int8(const bf16 *x, int64_t m, int64_t k, int64_t x_stride, const int8_t *packed, const float *scales,
                            int64_t n, const bf16 *bias, int gated, bf16 *out, int64_t out_stride) {
    multiply_all<int8_t>(x, m, k, x_stride, {packed, scales, bias, (k + 63) / 64, n, num_strips(n, gated), gated != 0, out, out_stride});
}

// w [n, k] to strips. Gated: w is [2 n, k], gate first, and a strip takes 16 rows of each.
extern "C" void pack_bf16(const bf16 *w, int64_t n, int64_t k, int64_t w_stride, int gated, bf16 *packed) {
    const int64_t k_tiles = (k + 31) / 32, strips = num_strips(n, gated);
#pragma omp parallel for schedule(static)
    for (int64_t strip = 0; strip < strips; ++strip)
        for (int64_t kt = 0; kt < k_tiles; ++kt)
            for (int64_t half = 0; half < 2; ++half) {
                bf16 *tile = packed + ((strip * k_tiles + kt) * 2 + half) * 512;
                for (int64_t c = 0; c < 16; ++c) {
                    const int64_t column = gated ? strip * 16 + c : strip * 32 + half * 16 + c;
                    const bf16 *row = w + (gated ? column + half * n : column) * w_stride;
                    for (int64_t i = 0; i < 32; ++i) {
                        const int64_t input = kt * 32 + i;
                        tile[(i / 2) * 32 + c * 2 + i % 2] = column < n && input < k ? row[input] : 0;
                    }
                }
            }
}

// w [n, k] to strips and their scales. Gated: w is [2 n, k], gate first, and a strip takes 16 rows of each.
extern "C" void pack_int8(const bf16 *w, int64_t n, int64_t k, int64_t w_stride, int gated, int8_t *packed, float *scales) {
    const int64_t k_tiles = (k + 63) / 64, strips = num_strips(n, gated);
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
                    scales[strip * 32 + c] = quantize_row(row, k, (int8_t *)quads.data());
                }
                int32_t *tiles = (int32_t *)packed + strip * k_tiles * 512 + half * 256 + c % 16;
                for (int64_t quad = 0; quad < k_tiles * 16; ++quad) tiles[quad / 16 * 512 + quad % 16 * 16] = quads[quad];
            }
    }
}
#endif

// 1 if this process may use AMX, asking the kernel for the permission; 0 otherwise.
extern "C" int enable_amx() {
#ifdef HAVE_AMX
    const int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}
