// Linear layers on packed bf16 weights (AMX).

#include "common.h"

#include <sys/syscall.h>
#include <unistd.h>

// Linear layers. A packed weight is a row of strips, each holding 32 outputs for all inputs:
//     [strip][input / 32][2 halves of 16 outputs][16 pairs of inputs][16 outputs][2 inputs]
// One [16][16][2] piece is an AMX tile; a strip is read from front to back, so memory sees one stream per thread.


#ifdef HAVE_AMX
// Bytes of packed activations that stay in a core's L2 cache while strips go by.
static const int64_t PACKED_BYTES = 1 << 20;
// A thread that shares the strips with others gets at least so many rows: fewer would read weights for too little work.
static const int64_t ROWS_PER_THREAD = 128;
// Bytes by which the weights of few rows are fetched ahead.
static const int64_t AHEAD = 2048;

struct Linear {
    const bf16 *packed, *bias;
    int64_t k_tiles, n, strips;
    bool gated;
    bf16 *out;
    int64_t out_stride;
};

// Sums of up to 32 rows by one strip, [2][2 halves][16 rows][16], and where they go: out's row `row` and column `column`.
struct Block {
    alignas(64) float sums[1024];
    int64_t row, rows, column;
};

// Rows [0, count) of x to tiles [k / 32][count][32], padded with zeros up to a multiple of 32 inputs. Lines of `ahead`,
// which is wanted next, are fetched meanwhile.
static void pack_rows(const bf16 *x, int64_t row_stride, int64_t count, int64_t k, const bf16 *ahead, bf16 *packed) {
    for (int64_t kt = 0; kt < (k + 31) / 32; ++kt) {
        const __mmask32 mask = k - kt * 32 >= 32 ? ~0u : (1u << (k - kt * 32)) - 1;
        for (int64_t r = 0; r < count; ++r) {
            _mm512_store_si512(packed + (kt * count + r) * 32, _mm512_maskz_loadu_epi16(mask, x + r * row_stride + kt * 32));
            _mm_prefetch((const char *)(ahead + (kt * count + r) * 32), _MM_HINT_T1);
        }
    }
}

static inline __m512 load_bias(const bf16 *bias, int64_t column, int64_t n) {
    return bias && column < n ? load16(bias + column, lanes(n - column)) : _mm512_setzero_ps();
}

// One row of a block to the output. Gated: the halves are gate and up of the same 16 outputs.
static inline void finish_row(const Block &block, int64_t r, const Linear &linear) {
    const float *sums = block.sums + r / 16 * 512 + r % 16 * 16;
    const __m512 first = _mm512_load_ps(sums), second = _mm512_load_ps(sums + 256);
    const int64_t column = block.column, left = linear.n - column;
    bf16 *out = linear.out + (block.row + r) * linear.out_stride + column;
    if (linear.gated) {
        store16(out, _mm512_mul_ps(silu(first), second), lanes(left));
    } else {
        const __m512 bias0 = load_bias(linear.bias, column, linear.n), bias1 = load_bias(linear.bias, column + 16, linear.n);
        const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_add_ps(second, bias1), _mm512_add_ps(first, bias0));
        _mm512_mask_storeu_epi16(out, left >= 32 ? ~0u : (1u << left) - 1, (__m512i)both);
    }
}

static inline void fetch_lines(const char *at, int64_t lines) {
    for (int64_t line = 0; line < lines; ++line) _mm_prefetch(at + line * 64, _MM_HINT_T1);
}

// Up to 32 packed rows (`top` of them in a, `rest` in a1) by one strip. Everything that waits for memory stands between the
// tile operations, since bursts would block the loads behind them: fetches of what is wanted next, LINES for each tile,
// and the rows of the block before, which go to the output.
template <bool TWO, int LINES>
static void multiply(const bf16 *a, int64_t top, const bf16 *a1, int64_t rest, const bf16 *strip, const char *ahead,
                     const Linear &linear, const Block &before, Block &block) {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t kt = 0; kt < linear.k_tiles; ++kt, strip += 1024, ahead += LINES * 64) {
        fetch_lines(ahead, LINES / 4);
        _tile_loadd(6, strip, 64);
        _tile_loadd(4, a + kt * top * 32, 64);
        _tile_dpbf16ps(0, 4, 6);
        fetch_lines(ahead + LINES / 4 * 64, LINES / 4);
        _tile_loadd(7, strip + 512, 64);
        _tile_dpbf16ps(1, 4, 7);
        fetch_lines(ahead + LINES / 2 * 64, LINES / 4);
        if (TWO) {
            _tile_loadd(5, a1 + kt * rest * 32, 64);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (kt < before.rows) finish_row(before, kt, linear);
        fetch_lines(ahead + LINES * 3 / 4 * 64, LINES / 4);
        if (TWO) _tile_dpbf16ps(3, 5, 7);
    }
    for (int64_t r = linear.k_tiles; r < before.rows; ++r) finish_row(before, r, linear);
    _tile_stored(0, block.sums, 64);
    _tile_stored(1, block.sums + 256, 64);
    if (TWO) {
        _tile_stored(2, block.sums + 512, 64);
        _tile_stored(3, block.sums + 768, 64);
    }
}

// One thread's rows [first_row, last_row) by its strips [first, last). The rows are packed by the thread that reads them:
// a barrier, and lines that another core has just written, would cost more than the copy.
template <bool FEW>
static void multiply_range(const bf16 *x, int64_t x_stride, int64_t k, const Linear &linear, int64_t first_row,
                           int64_t last_row, int64_t first, int64_t last) {
    const int64_t k_tiles = linear.k_tiles, size = k_tiles * 1024;
    const int64_t at_once = std::max<int64_t>(32, PACKED_BYTES / (k_tiles * 64) / 32 * 32);
    // A tile with fewer rows than 16 is read beyond its end.
    bf16 *packed = scratch<bf16>(std::min(at_once, (last_row - first_row + 31) / 32 * 32) * k_tiles * 32 + 512);
    Block blocks[2];
    blocks[0].rows = blocks[1].rows = 0;
    int turn = 0;
    for (int64_t start = first_row; start < last_row; start += at_once) {
        const int64_t rows = std::min(at_once, last_row - start);
        for (int64_t r = 0; r < rows; r += 16)
            pack_rows(x + (start + r) * x_stride, x_stride, std::min<int64_t>(16, rows - r), k,
                      linear.packed + first * size + r * k_tiles * 32, packed + r * k_tiles * 32);
        for (int64_t strip = first; strip < last; ++strip) {
            const bf16 *weights = linear.packed + strip * size;
            for (int64_t r = 0; r < rows; r += 32) {
                const int64_t top = std::min<int64_t>(16, rows - r), rest = std::min<int64_t>(16, rows - r - top);
                const bf16 *a = packed + r * k_tiles * 32, *a1 = a + k_tiles * 512;
                Block &block = blocks[turn], &before = blocks[turn ^= 1];
                block.row = start + r, block.rows = top + rest, block.column = strip * (linear.gated ? 16 : 32);
                // Few rows: this strip, a little later. Many: the next strip, a part of it with every 32 rows.
                const char *ahead = (const char *)weights + (FEW ? AHEAD : size * 2 + r / 32 * k_tiles * 256);
                if (rest) multiply<true, FEW ? 32 : 4>(a, top, a1, rest, weights, ahead, linear, before, block);
                else multiply<false, FEW ? 32 : 4>(a, top, a, 0, weights, ahead, linear, before, block);
            }
        }
    }
    for (int64_t r = 0; r < blocks[turn ^ 1].rows; ++r) finish_row(blocks[turn ^ 1], r, linear);
}

// x [m, k], rows x_stride apart; out [m, n]. Gated: there are 2 n outputs, and out is silu(first half) * second half.
extern "C" void linear_bf16(const bf16 *x, int64_t m, int64_t k, int64_t x_stride, const bf16 *packed, int64_t n,
                            const bf16 *bias, int gated, bf16 *out, int64_t out_stride) {
    const Linear linear = {packed, bias, (k + 31) / 32, n, gated ? (n + 15) / 16 : (n + 31) / 32, gated != 0, out, out_stride};
#pragma omp parallel
    {
        // A grid of row ranges by strip ranges.
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        int64_t row_parts = std::min(threads, std::max<int64_t>(1, m / ROWS_PER_THREAD));
        while (threads % row_parts) --row_parts;
        const int64_t strip_parts = threads / row_parts, row_part = thread / strip_parts, strip_part = thread % strip_parts;
        const int64_t row_tiles = (m + 31) / 32;
        const int64_t first_row = row_tiles * row_part / row_parts * 32, last_row = row_tiles * (row_part + 1) / row_parts * 32;
        const int64_t first = linear.strips * strip_part / strip_parts, last = linear.strips * (strip_part + 1) / strip_parts;
        configure_tiles(std::min<int64_t>(m, 16), std::max<int64_t>(0, std::min<int64_t>(m - 16, 16)));
        (m <= 32 ? multiply_range<true> : multiply_range<false>)(x, x_stride, k, linear, first_row, std::min(m, last_row), first, last);
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
