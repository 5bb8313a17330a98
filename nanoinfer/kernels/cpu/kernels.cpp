// The CPU kernels: linear layers on packed bf16 weights (AMX), paged decode attention, and the small fused steps between
// them. Plain C interface for ctypes; compiled at first use by build.py for the processor at hand. Every function has its
// plain torch twin in ../reference.py. Tensors are dense unless a stride is passed; strides count elements.
//
// OpenMP's symbols are left undefined at link time and come from the runtime that torch has loaded: two OpenMP runtimes
// in one process would fight for the cores.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <vector>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;

static inline float to_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}
static inline float to_float(float x) { return x; }

template <typename T> static inline T from_float(float x);
template <> inline float from_float<float>(float x) { return x; }
template <> inline bf16 from_float<bf16>(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    const uint32_t nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;  // ties to even
    return (bf16)((bits & 0x7fffffff) > 0x7f800000 ? (bits >> 16) | 0x40 : nearest);  // NaN stays NaN
}

template <typename T> static inline float rounded(float x) { return to_float(from_float<T>(x)); }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512BF16__)
#define WIDE 1
// 16 values of either type as float32; lanes beyond `mask` are zero, or not stored.
static inline __mmask16 lanes(int64_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }
static inline __m512 load16(const float *p, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, p); }
static inline __m512 load16(const bf16 *p, __mmask16 mask) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, p)), 16));
}
static inline void store16(float *p, __m512 x, __mmask16 mask) { _mm512_mask_storeu_ps(p, mask, x); }
static inline void store16(bf16 *p, __m512 x, __mmask16 mask) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(x));
}
template <typename T> static inline __m512 rounded16(__m512 x);
template <> inline __m512 rounded16<float>(__m512 x) { return x; }
template <> inline __m512 rounded16<bf16>(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Linear layers. A packed weight is a row of strips, each holding 32 outputs for all inputs:
//     [strip][input / 32][2 halves of 16 outputs][16 pairs of inputs][16 outputs][2 inputs]
// One [16][16][2] piece is an AMX tile; a strip is read from front to back, so memory sees one stream per thread.

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAVE_AMX 1

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t bytes_per_row[16] = {0};
    uint8_t rows[16] = {0};
};

static void configure_tiles() {
    TileConfig config;
    for (int i = 0; i < 8; ++i) config.rows[i] = 16, config.bytes_per_row[i] = 64;
    _tile_loadconfig(&config);
}

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

static inline __m512 silu(__m512 x);

static inline void store_bf16(bf16 *out, __m512 values, int64_t count) {
    const __m256i packed = (__m256i)_mm512_cvtneps_pbh(values);
    if (count >= 16) _mm256_storeu_si256((__m256i *)out, packed);
    else if (count > 0) _mm256_mask_storeu_epi16(out, (__mmask16)((1u << count) - 1), packed);
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

// ---------------------------------------------------------------------------------------------------------------------
// exp, by Cody-Waite reduction and a polynomial of degree 6 (Cephes' coefficients); relative error about 1e-7.

#if defined(__AVX512F__)
static inline __m512 exp512(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-87.0f));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(p, r), r, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}
#endif
#ifdef HAVE_AMX
static inline __m512 silu(__m512 x) {
    // exp of at most 87, so that the quotient cannot become 0 / inf's opposite.
    const __m512 e = exp512(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(87.0f)));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// Paged decode attention: one query token per sequence, each key and value read once for all query heads of its group.
// Caches are [blocks][kv_heads][block_size][head_dim]: what one (sequence, KV head) reads is contiguous within a block.
// Online softmax (Milakov and Gimelshein, 2018) over blocks; long contexts of small batches are split, and joined at the
// end (Flash-Decoding, Dao et al., 2023).

static const int MAX_GROUP = 16;
static const int CHUNK = 16;  // tokens scored together

struct AttentionShape {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    float scale;
};

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

// ---------------------------------------------------------------------------------------------------------------------
// Prefill attention: sequences with several query tokens, over their paged keys and values, on AMX (bf16 only). Flash
// attention (Dao et al., 2022): per KV head, keys and values are brought into tile order once; then tiles of 32 queries
// go over them in chunks, keeping a running maximum and sum.

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
        configure_tiles();
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

// ---------------------------------------------------------------------------------------------------------------------
// Norms, rotary embedding, KV store. Rounded to the tensors' type where the twin rounds.

template <typename T> static float inverse_rms(const T *x, int64_t size, float eps) {
#ifdef WIDE
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 value = load16(x + i, lanes(size - i));
        squares = _mm512_fmadd_ps(value, value, squares);
    }
    const float sum = _mm512_reduce_add_ps(squares);
#else
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < size; ++i) sum += to_float(x[i]) * to_float(x[i]);
#endif
    return 1.0f / std::sqrt(sum / size + eps);
}

template <typename T> static void normalize(const T *x, const T *weight, int64_t size, float eps, T *out) {
    const float factor = inverse_rms(x, size, eps);
#ifdef WIDE
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = lanes(size - i);
        const __m512 normed = rounded16<T>(_mm512_mul_ps(load16(x + i, mask), _mm512_set1_ps(factor)));
        store16(out + i, _mm512_mul_ps(normed, load16(weight + i, mask)), mask);
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) out[i] = from_float<T>(rounded<T>(to_float(x[i]) * factor) * to_float(weight[i]));
#endif
}

template <typename T> static void add_to(T *sum, const T *x, int64_t size) {
#ifdef WIDE
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 mask = lanes(size - i);
        store16(sum + i, _mm512_add_ps(load16(x + i, mask), load16(sum + i, mask)), mask);
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < size; ++i) sum[i] = from_float<T>(to_float(x[i]) + to_float(sum[i]));
#endif
}

// residual (may be null) += x, then out = norm(residual); without one, out = norm(x).
template <typename T>
static void rms_norm(const T *x, T *residual, const T *weight, int64_t rows, int64_t size, float eps, T *out) {
#pragma omp parallel for schedule(static) if (rows > 4)
    for (int64_t row = 0; row < rows; ++row) {
        const T *source = x + row * size;
        if (residual) {
            add_to(residual + row * size, source, size);
            source = residual + row * size;
        }
        normalize(source, weight, size, eps, out + row * size);
    }
}

extern "C" void rms_norm_f32(const float *x, float *residual, const float *weight, int64_t rows, int64_t size, float eps,
                             float *out) {
    rms_norm(x, residual, weight, rows, size, eps, out);
}
extern "C" void rms_norm_bf16(const bf16 *x, bf16 *residual, const bf16 *weight, int64_t rows, int64_t size, float eps,
                              bf16 *out) {
    rms_norm(x, residual, weight, rows, size, eps, out);
}

template <typename T>
static void norm_and_rotate(const T *x, const T *weight, const T *cos, const T *sin, int64_t head_dim, float eps, T *out) {
    T normed[512];
    normalize(x, weight, head_dim, eps, normed);
    const int64_t half = head_dim / 2;
#ifdef WIDE
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 mask = lanes(half - i);
        const __m512 a = load16(normed + i, mask), b = load16(normed + half + i, mask);
        const __m512 c = load16(cos + i, mask), s = load16(sin + i, mask);
        store16(out + i, _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s)), mask);
        store16(out + half + i, _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s)), mask);
    }
    return;
#endif
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        const float a = to_float(normed[i]), b = to_float(normed[i + half]), c = to_float(cos[i]), s = to_float(sin[i]);
        out[i] = from_float<T>(a * c - b * s);
        out[i + half] = from_float<T>(b * c + a * s);
    }
}

// qkv [tokens, (num_heads + 2 num_kv_heads) * head_dim] to rotated queries q [tokens, num_heads, head_dim], and to keys
// and values in their slots of the caches [blocks][kv_heads][block_size][head_dim].
template <typename T>
static void norm_rotate_store(const T *qkv, const T *q_weight, const T *k_weight, const T *cos, const T *sin,
                              const int64_t *slots, int64_t tokens, const AttentionShape &shape, float eps, T *q, T *k_cache,
                              T *v_cache) {
    const int64_t heads = shape.num_heads, kv_heads = shape.num_kv_heads, dim = shape.head_dim, half = dim / 2;
#pragma omp parallel for schedule(static) if (tokens > 1)
    for (int64_t token = 0; token < tokens; ++token) {
        const T *row = qkv + token * (heads + 2 * kv_heads) * dim;
        const T *c = cos + token * half, *s = sin + token * half;
        for (int64_t h = 0; h < heads; ++h)
            norm_and_rotate(row + h * dim, q_weight, c, s, dim, eps, q + (token * heads + h) * dim);
        const int64_t block = slots[token] / shape.block_size, offset = slots[token] % shape.block_size;
        for (int64_t h = 0; h < kv_heads; ++h) {
            const int64_t at = ((block * kv_heads + h) * shape.block_size + offset) * dim;
            norm_and_rotate(row + (heads + h) * dim, k_weight, c, s, dim, eps, k_cache + at);
            memcpy(v_cache + at, row + (heads + kv_heads + h) * dim, sizeof(T) * dim);
        }
    }
}

extern "C" void norm_rotate_store_f32(const float *qkv, const float *q_weight, const float *k_weight, const float *cos,
                                      const float *sin, const int64_t *slots, int64_t tokens, int64_t num_heads,
                                      int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float eps, float *q,
                                      float *k_cache, float *v_cache) {
    const AttentionShape shape = {num_heads, num_kv_heads, head_dim, block_size, 0.0f};
    norm_rotate_store(qkv, q_weight, k_weight, cos, sin, slots, tokens, shape, eps, q, k_cache, v_cache);
}
extern "C" void norm_rotate_store_bf16(const bf16 *qkv, const bf16 *q_weight, const bf16 *k_weight, const bf16 *cos,
                                       const bf16 *sin, const int64_t *slots, int64_t tokens, int64_t num_heads,
                                       int64_t num_kv_heads, int64_t head_dim, int64_t block_size, float eps, bf16 *q,
                                       bf16 *k_cache, bf16 *v_cache) {
    const AttentionShape shape = {num_heads, num_kv_heads, head_dim, block_size, 0.0f};
    norm_rotate_store(qkv, q_weight, k_weight, cos, sin, slots, tokens, shape, eps, q, k_cache, v_cache);
}

// ---------------------------------------------------------------------------------------------------------------------
// Sampling: the passes over a row of logits, straight from the head's type, without a float32 copy.

// Per row the largest logit and the first column that has it; NaN wins over everything.
template <typename T>
static void row_argmax(const T *logits, int64_t rows, int64_t columns, int64_t stride, float *best, int64_t *winners) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T *x = logits + row * stride;
        float maximum = -INFINITY;
        int has_nan = 0;
#pragma omp simd reduction(max : maximum) reduction(| : has_nan)
        for (int64_t i = 0; i < columns; ++i) {
            const float value = to_float(x[i]);
            has_nan |= value != value;
            maximum = value > maximum ? value : maximum;
        }
        int64_t winner = 0;
        while (winner < columns - 1 && to_float(x[winner]) != maximum) ++winner;
        best[row] = has_nan ? NAN : maximum;
        winners[row] = winner;
    }
}

static inline float weight_of(float logit, float best, float inverse_temperature) {
    const float x = (logit - best) * inverse_temperature;
    return x < -87.0f ? 0.0f : std::exp(x);
}

// sums[row][s]: the sum of exp((logit - best) / temperature) over columns s * segment .. (s + 1) * segment - 1.
template <typename T>
static void segment_sums(const T *logits, int64_t rows, int64_t columns, int64_t stride, const float *best,
                         const float *inverse_temperature, int64_t segment, double *sums) {
    const int64_t segments = (columns + segment - 1) / segment;
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < rows * segments; ++item) {
        const int64_t row = item / segments, start = item % segments * segment;
        const T *x = logits + row * stride + start;
        const int64_t count = std::min(segment, columns - start);
        double sum = 0;
        int64_t i = 0;
#if defined(__AVX512F__)
        const __m512 top = _mm512_set1_ps(best[row]), factor = _mm512_set1_ps(inverse_temperature[row]);
        __m512 total = _mm512_setzero_ps();
        for (; i + 16 <= count; i += 16) {
            __m512 value;
            if constexpr (sizeof(T) == 2)
                value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + i))), 16));
            else
                value = _mm512_loadu_ps((const float *)x + i);
            value = _mm512_mul_ps(_mm512_sub_ps(value, top), factor);
            const __mmask16 counts = _mm512_cmp_ps_mask(value, _mm512_set1_ps(-87.0f), _CMP_GE_OQ);
            total = _mm512_mask_add_ps(total, counts, total, exp512(value));
        }
        sum = _mm512_reduce_add_ps(total);
#endif
        for (; i < count; ++i) sum += weight_of(to_float(x[i]), best[row], inverse_temperature[row]);
        sums[item] = sum;
    }
}

extern "C" void row_argmax_f32(const float *x, int64_t rows, int64_t columns, int64_t stride, float *best, int64_t *winners) {
    row_argmax(x, rows, columns, stride, best, winners);
}
extern "C" void row_argmax_bf16(const bf16 *x, int64_t rows, int64_t columns, int64_t stride, float *best, int64_t *winners) {
    row_argmax(x, rows, columns, stride, best, winners);
}
extern "C" void segment_sums_f32(const float *x, int64_t rows, int64_t columns, int64_t stride, const float *best,
                                 const float *inverse_temperature, int64_t segment, double *sums) {
    segment_sums(x, rows, columns, stride, best, inverse_temperature, segment, sums);
}
extern "C" void segment_sums_bf16(const bf16 *x, int64_t rows, int64_t columns, int64_t stride, const float *best,
                                  const float *inverse_temperature, int64_t segment, double *sums) {
    segment_sums(x, rows, columns, stride, best, inverse_temperature, segment, sums);
}
