// What the CPU kernels share: conversions, 16-lane loads and stores of either type, exp, AMX tiles. Every kernel has a plain C
// interface for ctypes, is compiled at first use by build.py for the processor at hand, and has its plain torch twin in
// ../reference.py. Tensors are dense unless a stride is passed; strides count elements.
//
// OpenMP's symbols are left undefined at link time and come from the runtime that torch has loaded: two OpenMP runtimes
// in one process would fight for the cores.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <immintrin.h>
#include <vector>
#include <omp.h>

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

// exp, by Cody-Waite reduction and a polynomial of degree 6 (Cephes' coefficients); relative error about 1e-7.

#if defined(__AVX512F__)
static inline __m512 exp512(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x);  // in this order, NaN stays NaN
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

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define HAVE_AMX 1

struct TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {0};
    uint16_t bytes_per_row[16] = {0};
    uint8_t rows[16] = {0};
};

// Right factors, in tiles 6 and 7, are whole; sums and left factors, in the others, have `rows` rows. 16: all tiles alike.
static void configure_tiles(int64_t rows) {
    TileConfig config;
    for (int i = 0; i < 8; ++i) {
        config.rows[i] = i < 6 ? rows : 16;
        config.bytes_per_row[i] = 64;
    }
    asm volatile("" : : "r"(&config) : "memory");  // gcc does not see that all of it is read
    _tile_loadconfig(&config);
}


static inline __m512 silu(__m512 x) {
    // exp of at most 87, so that the quotient cannot become 0 / inf's opposite.
    const __m512 e = exp512(_mm512_min_ps(_mm512_sub_ps(_mm512_setzero_ps(), x), _mm512_set1_ps(87.0f)));
    return _mm512_div_ps(x, _mm512_add_ps(e, _mm512_set1_ps(1.0f)));
}
#endif

// While one lives, its thread takes denormals for zero: weights of a softmax get that small, and each would cost 100 ns.
struct FlushDenormals {
    const unsigned before = _mm_getcsr();
    FlushDenormals() { _mm_setcsr(before | 0x8040); }
    ~FlushDenormals() { _mm_setcsr(before); }
};

// This thread's memory for intermediate results, kept from call to call; a second call may give the same.
template <typename T> static T *scratch(int64_t count) {
    static thread_local std::vector<char> memory;
    const size_t size = count * sizeof(T) + 64;
    if (memory.size() < size) memory.resize(size);
    return (T *)(((uintptr_t)memory.data() + 63) & ~(uintptr_t)63);
}

// How attention's heads share their keys and values, and where these lie: a row is one head of one token, head_dim numbers
// (or one scale). The heads of a block follow one another, and the next block's begin block_rows later.
struct AttentionShape {
    int64_t num_heads, num_kv_heads, head_dim, block_size, block_rows;
    float scale;

    int64_t row(const int32_t *blocks, int64_t kv_head, int64_t token) const {
        return blocks[token / block_size] * block_rows + kv_head * block_size + token % block_size;
    }
};
