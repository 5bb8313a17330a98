// Linear layers on packed bf16 weights (AMX).

#include "common.h"

#include <sys/syscall.h>
#include <unistd.h>

// Linear layers. A packed weight is a row of strips, each holding 32 outputs for all inputs:
//     [strip][input / 32][2 halves of 16 outputs][16 pairs of inputs][16 outputs][2 inputs]
// One [16][16][2] piece is an AMX tile; a strip is read from front to back, so memory sees one stream per thread.


#ifdef HAVE_AMX
// Rows of activations that are multiplied in one go: their packed form stays in the L2 cache while strips go by.
static const int64_t ROWS_AT_ONCE = 256;
// With many rows, so many input tiles at a time: then both factors of a product come from the L1 cache (16 KB each).
static const int64_t K_TILES_AT_ONCE = 8;
// Distance at which the weights of few rows are fetched ahead, which are read once, at the speed of memory.
static const int64_t AHEAD = 4096;

// x [rows, k] to tiles [rows / 16][k / 32][16][32], zero-padded.
static void pack_rows(const bf16 *x, int64_t rows, int64_t k, int64_t row_stride, int64_t tile_row, bf16 *packed) {
    const int64_t k_tiles = (k + 31) / 32;
    bf16 *out = packed + tile_row * k_tiles * 512;
    for (int64_t kt = 0; kt < k_tiles; ++kt)
        for (int64_t r = 0; r < 16; ++r, out += 32) {
            const int64_t row = tile_row * 16 + r;
            const int64_t count = row < rows ? std::min<int64_t>(32, k - kt * 32) : 0;
            if (count == 32) {
                _mm512_storeu_si512(out, _mm512_loadu_si512(x + row * row_stride + kt * 32));
            } else {
                memset(out, 0, 64);
                if (count > 0) memcpy(out, x + row * row_stride + kt * 32, count * 2);
            }
        }
}

template <_mm_hint HINT> static inline void fetch_lines(const char *at, int64_t lines) {
    for (int64_t line = 0; line < lines; ++line) _mm_prefetch(at + line * 64, HINT);
}

// 16 or 32 rows (tile rows a and a1) by `k_tiles` tiles of a strip; sums [2 tile rows][2 halves][16][16] float32, which
// are added to or started. `ahead` (or null) is what the caller will want next: lines of it are fetched meanwhile.
template <bool TWO>
static void multiply(const bf16 *a, const bf16 *a1, int64_t k_tiles, const bf16 *strip, const bf16 *ahead, int64_t lines,
                     bool add, float *sums) {
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
    // Fetches stand between the tile operations: in one burst, they would block the loads behind them.
    const int64_t quarter = lines / 4;
    for (int64_t kt = 0; kt < k_tiles; ++kt) {
        const bf16 *b = strip + kt * 1024;
        const char *next = (const char *)ahead + kt * lines * 64;
        fetch_lines<_MM_HINT_T1>(next, quarter);
        _tile_loadd(6, b, 64);
        fetch_lines<_MM_HINT_T0>((const char *)(a + (kt + 2) * 512), 16);
        _tile_loadd(4, a + kt * 512, 64);
        _tile_dpbf16ps(0, 4, 6);
        fetch_lines<_MM_HINT_T1>(next + quarter * 64, quarter);
        _tile_loadd(7, b + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        fetch_lines<_MM_HINT_T1>(next + quarter * 128, quarter);
        if (TWO) {
            fetch_lines<_MM_HINT_T0>((const char *)(a1 + (kt + 2) * 512), 16);
            _tile_loadd(5, a1 + kt * 512, 64);
            _tile_dpbf16ps(2, 5, 6);
        }
        fetch_lines<_MM_HINT_T1>(next + quarter * 192, quarter);
        if (TWO) _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    if (TWO) {
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
    }
}

static inline __m512 load_bias(const bf16 *bias, int64_t column, int64_t n) {
    const int64_t count = std::min<int64_t>(16, n - column);
    if (!bias || count <= 0) return _mm512_setzero_ps();
    const __mmask16 mask = count == 16 ? (__mmask16)0xffff : (__mmask16)((1u << count) - 1);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, bias + column)), 16));
}

// One strip's sums of up to 32 rows to the output. Gated: the halves are gate and up of the same 16 outputs.
static void finish(const float *sums, int64_t rows, int64_t strip, int64_t n, const bf16 *bias, bool gated, bf16 *out,
                   int64_t out_stride) {
    const int64_t column = strip * (gated ? 16 : 32);
    const __m512 bias0 = load_bias(bias, column, n), bias1 = load_bias(bias, column + 16, n);
    for (int64_t r = 0; r < rows; ++r) {
        const float *row = sums + (r / 16) * 512 + (r % 16) * 16;
        const __m512 first = _mm512_load_ps(row), second = _mm512_load_ps(row + 256);
        bf16 *target = out + r * out_stride + column;
        if (gated) {
            store_bf16(target, _mm512_mul_ps(silu(first), second), n - column);
        } else {
            store_bf16(target, _mm512_add_ps(first, bias0), n - column);
            store_bf16(target + 16, _mm512_add_ps(second, bias1), n - column - 16);
        }
    }
}

extern "C" void linear_bf16(const bf16 *x, int64_t m, int64_t k, int64_t x_stride, const bf16 *packed, int64_t n,
                            const bf16 *bias, int gated, bf16 *out, int64_t out_stride, bf16 *scratch) {
    const int64_t k_tiles = (k + 31) / 32, strips = gated ? (n + 15) / 16 : (n + 31) / 32;
#pragma omp parallel
    {
        configure_tiles();
        alignas(64) float sums[ROWS_AT_ONCE / 32 * 1024];
        for (int64_t start = 0; start < m; start += ROWS_AT_ONCE) {
            const int64_t rows = std::min(ROWS_AT_ONCE, m - start);
#pragma omp for schedule(static)
            for (int64_t tile_row = 0; tile_row < (rows + 31) / 32 * 2; ++tile_row)
                pack_rows(x + start * x_stride, rows, k, x_stride, tile_row, scratch);
#pragma omp for schedule(static)
            for (int64_t strip = 0; strip < strips; ++strip) {
                const bf16 *weights = packed + strip * k_tiles * 1024;
                const int64_t step = rows > 32 ? K_TILES_AT_ONCE : k_tiles;
                for (int64_t kt = 0; kt < k_tiles; kt += step) {
                    const int64_t count = std::min(step, k_tiles - kt);
                    for (int64_t r = 0; r < rows; r += 32) {
                        const bf16 *a = scratch + (r / 16 * k_tiles + kt) * 512, *b = weights + kt * 1024;
                        // Few rows: the same strip, further on. Many: an eighth of the tiles that come after these.
                        const bf16 *ahead = rows > 32 ? b + step * 1024 + r / 32 * step * 128 : b + AHEAD;
                        const int64_t lines = rows > 32 ? 4 : 32;
                        float *block = sums + r / 32 * 1024;
                        if (rows - r > 16) multiply<true>(a, a + k_tiles * 512, count, b, ahead, lines, kt > 0, block);
                        else multiply<false>(a, a, count, b, ahead, lines, kt > 0, block);
                    }
                }
                for (int64_t r = 0; r < rows; r += 32)
                    finish(sums + r / 32 * 1024, std::min<int64_t>(32, rows - r), strip, n, bias, gated,
                           out + (start + r) * out_stride, out_stride);
            }
        }
        _tile_release();
    }
}

// w [n, k] to strips. Gated: w is [2 n, k], gate first, and a strip takes 16 rows of each.
extern "C" void pack_bf16(const bf16 *w, int64_t n, int64_t k, int64_t w_stride, int gated, bf16 *packed) {
    const int64_t k_tiles = (k + 31) / 32, strips = gated ? (n + 15) / 16 : (n + 31) / 32;
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
