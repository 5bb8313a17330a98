// Norms, rotary embedding, KV store. Rounded to the tensors' type where the twin rounds.

#include "common.h"

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

#ifdef WIDE
static inline void store_line(void *line, __m512i x, bool streams) {
    if (streams) _mm512_stream_si512((__m512i *)line, x);
    else _mm512_storeu_si512(line, x);
}
static inline void store32(bf16 *out, __m512 a, __m512 b, bool streams) { store_line(out, (__m512i)_mm512_cvtne2ps_pbh(b, a), streams); }
static inline void store32(float *out, __m512 a, __m512 b, bool streams) {
    store_line(out, _mm512_castps_si512(a), streams);
    store_line(out + 16, _mm512_castps_si512(b), streams);
}

// norm_and_rotate of N whole vectors, which stay in registers.
template <int N, typename T>
static inline void norm_and_rotate_whole(const T *x, const T *weight, const T *cos, const T *sin, float eps, T *out, bool streams) {
    const __mmask16 all = 0xffff;
    __m512 v[N], squares = _mm512_setzero_ps();
    for (int i = 0; i < N; ++i) {
        v[i] = load16(x + i * 16, all);
        squares = _mm512_fmadd_ps(v[i], v[i], squares);
    }
    const __m512 factor = _mm512_set1_ps(1.0f / std::sqrt(_mm512_reduce_add_ps(squares) / (N * 16) + eps));
    for (int i = 0; i < N; ++i)
        v[i] = rounded16<T>(_mm512_mul_ps(rounded16<T>(_mm512_mul_ps(v[i], factor)), load16(weight + i * 16, all)));
    for (int i = 0; i < N / 2; ++i) {
        const __m512 a = v[i], b = v[i + N / 2], c = load16(cos + i * 16, all), s = load16(sin + i * 16, all);
        v[i] = _mm512_fmsub_ps(a, c, _mm512_mul_ps(b, s));
        v[i + N / 2] = _mm512_fmadd_ps(b, c, _mm512_mul_ps(a, s));
    }
    for (int i = 0; i < N; i += 2) store32(out + i * 16, v[i], v[i + 1], streams);
}
#endif

template <typename T>
static void norm_and_rotate(const T *x, const T *weight, const T *cos, const T *sin, int64_t head_dim, float eps, T *out,
                            bool streams) {
#ifdef WIDE
    if (head_dim == 128) return norm_and_rotate_whole<8>(x, weight, cos, sin, eps, out, streams);
#endif
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

#ifdef WIDE
// The orders of keys and values in decode_tiled.cpp, of which `row` is a token and head.
template <typename T> static void store_key_tiles(const T *x, int64_t head_dim, int64_t row, T *cache, bool streams) {
    const int64_t dims = 64 / sizeof(T);
    T *at = cache + row / 16 * 16 * head_dim + row % 16 * dims;
    for (int64_t d = 0; d < head_dim; d += dims) store_line(at + d * 16, _mm512_loadu_si512(x + d), streams);
}
// Of a token in an even row and the next.
static void stream_value_pair(const bf16 *x, const bf16 *next, int64_t head_dim, int64_t row, bf16 *cache) {
    bf16 *at = cache + row / 32 * 32 * head_dim + row % 32 / 2 * 32;
    for (int64_t d = 0; d < head_dim; d += 16) {
        const __m512i first = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + d)));
        const __m512i second = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(next + d)));
        store_line(at + d * 32, _mm512_or_si512(first, _mm512_slli_epi32(second, 16)), true);
    }
}
static void store_value_tiles(const bf16 *x, int64_t head_dim, int64_t row, bf16 *cache) {
    bf16 *at = cache + row / 32 * 32 * head_dim + row % 32 / 2 * 32;
    const bool odd = row % 2;
    for (int64_t d = 0; d < head_dim; d += 16) {
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(x + d)));
        _mm512_mask_storeu_epi16(at + d * 32, odd ? 0xaaaaaaaa : 0x55555555, odd ? _mm512_slli_epi32(wide, 16) : wide);
    }
}
static void store_value_tiles(const int8_t *x, int64_t head_dim, int64_t row, int8_t *cache) {
    int8_t *at = cache + row / 32 * 32 * head_dim + row % 32 / 4 * 64;
    const __m128i shift = _mm_cvtsi64_si128(8 * (row % 4));
    for (int64_t d = 0; d < head_dim; d += 16) {
        const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(x + d)));
        _mm512_mask_storeu_epi8(at + d * 32, 0x1111111111111111ull << row % 4, _mm512_sll_epi32(wide, shift));
    }
}

// Symmetric int8: x = q * scale, scale = max |x| / 127; zeros and scale 0 for zeros. Returns the scale.
static float quantize(const bf16 *x, int64_t head_dim, int8_t *q) {
    __m512 top = _mm512_setzero_ps();
    for (int64_t d = 0; d < head_dim; d += 16) top = _mm512_max_ps(top, _mm512_abs_ps(load16(x + d, 0xffff)));
    const float largest = _mm512_reduce_max_ps(top), scale = largest / 127.0f;
    const __m512 inverse = _mm512_set1_ps(largest > 1e-30f ? 127.0f / largest : 0.0f);
    for (int64_t d = 0; d < head_dim; d += 16)
        _mm_storeu_si128((__m128i *)(q + d), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(load16(x + d, 0xffff), inverse))));
    return largest > 1e-30f ? scale : 0.0f;
}
#endif

// Where a head's keys and values of one token go, by their row. fetch: of the lines that are written. WHOLE_LINES: keys are
// such, and so are the values of an even row and the next together, which put_values streams.
struct PlainStore {
    static const bool WHOLE_LINES = false;
    template <typename C> static void fetch(int64_t, int64_t, C *, C *) {}
    template <typename T> static void put_key(const T *k, int64_t head_dim, int64_t row, T *keys, float *, bool) {
        memcpy(keys + row * head_dim, k, sizeof(T) * head_dim);
    }
    template <typename T> static void put_value(const T *v, int64_t head_dim, int64_t row, T *values, float *) {
        memcpy(values + row * head_dim, v, sizeof(T) * head_dim);
    }
    template <typename T> static void put_values(const T *, const T *, int64_t, int64_t, T *) {}
};
#ifdef WIDE
template <typename C> struct TiledStore {
    static const bool WHOLE_LINES = sizeof(C) == 2;
    static void fetch(int64_t head_dim, int64_t row, C *keys, C *values) {
        const int64_t dims = 64 / sizeof(C), ways = 4 / sizeof(C);
        const C *key = keys + row / 16 * 16 * head_dim + row % 16 * dims, *value = values + row / 32 * 32 * head_dim + row % 32 / ways * 16 * ways;
        for (int64_t d = 0; d < head_dim; d += dims) __builtin_prefetch(key + d * 16, 1);
        for (int64_t d = 0; d < head_dim; d += 16) __builtin_prefetch(value + d * 32, 1);
    }
    static void put_key(const bf16 *k, int64_t head_dim, int64_t row, C *keys, float *scales, bool streams) {
        if constexpr (sizeof(C) == 2) store_key_tiles(k, head_dim, row, keys, streams);
        else {
            C quantized[512];
            scales[row] = quantize(k, head_dim, quantized);
            store_key_tiles(quantized, head_dim, row, keys, false);
        }
    }
    static void put_value(const bf16 *v, int64_t head_dim, int64_t row, C *values, float *scales) {
        if constexpr (sizeof(C) == 2) store_value_tiles(v, head_dim, row, values);
        else {
            C quantized[512];
            scales[row] = quantize(v, head_dim, quantized);
            store_value_tiles(quantized, head_dim, row, values);
        }
    }
    static void put_values(const bf16 *v, const bf16 *next, int64_t head_dim, int64_t row, C *values) {
        if constexpr (WHOLE_LINES) stream_value_pair(v, next, head_dim, row, values);
    }
};
#endif

// From so many queries on (1 MB), a step's queries, keys and values are out of the caches before they are read: they are
// written around them, since an ordinary store reads its line first (2.36 -> 1.83 ms for 2,048 tokens).
static const int64_t STREAMED_QUERIES = 1 << 19;

// qkv [tokens, (num_heads + 2 num_kv_heads) * head_dim] to rotated queries q [tokens, num_heads, head_dim], and to keys
// and values in their slots of the caches.
template <typename Store, typename T, typename C>
static void norm_rotate_store(const T *qkv, const T *q_weight, const T *k_weight, const T *cos, const T *sin,
                              const int64_t *slots, int64_t tokens, const AttentionShape &shape, float eps, T *q, C *keys,
                              C *values, float *key_scales, float *value_scales) {
    const int64_t heads = shape.num_heads, kv_heads = shape.num_kv_heads, dim = shape.head_dim, half = dim / 2;
    const int64_t width = (heads + 2 * kv_heads) * dim;
    const bool streams = tokens * heads * dim >= STREAMED_QUERIES && (uintptr_t)q % 64 == 0, whole_lines = streams && Store::WHOLE_LINES;
    const auto row_of = [&](int64_t token, int64_t head) {
        const int32_t block = slots[token] / shape.block_size;
        return shape.row(&block, head, slots[token] % shape.block_size);
    };
#pragma omp parallel if (tokens > 1)
    {
        const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
        const int64_t first = tokens * thread / threads, stop = tokens * (thread + 1) / threads;
        const auto are_pair = [&](int64_t token) {
            return whole_lines && token >= first && token + 1 < stop && slots[token] % 2 == 0 && slots[token + 1] == slots[token] + 1;
        };
        for (int64_t token = first; token < stop; ++token) {
            const T *queries = qkv + token * width, *k = queries + heads * dim, *v = k + kv_heads * dim;
            const T *c = cos + token * half, *s = sin + token * half;
            // Scattered lines on many pages: together they come while a token is computed.
            for (int64_t h = 0; !whole_lines && token + 1 < stop && h < kv_heads; ++h) Store::fetch(dim, row_of(token + 1, h), keys, values);
            for (int64_t h = 0; h < heads; ++h)
                norm_and_rotate(queries + h * dim, q_weight, c, s, dim, eps, q + (token * heads + h) * dim, streams);
            const bool is_first = are_pair(token), is_second = are_pair(token - 1);
            for (int64_t h = 0; h < kv_heads; ++h) {
                T key[512];
                norm_and_rotate(k + h * dim, k_weight, c, s, dim, eps, key, false);
                Store::put_key(key, dim, row_of(token, h), keys, key_scales, whole_lines);
                if (is_second) continue;
                if (is_first) Store::put_values(v + h * dim, v + width + h * dim, dim, row_of(token, h), values);
                else Store::put_value(v + h * dim, dim, row_of(token, h), values, value_scales);
            }
        }
#ifdef WIDE
        _mm_sfence();
#endif
    }
}

#define NORM_ROTATE_STORE(name, Store, T, C) \
    extern "C" void name(const T *qkv, const T *q_weight, const T *k_weight, const T *cos, const T *sin, const int64_t *slots, \
                         int64_t tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t block_size, \
                         int64_t block_rows, float eps, T *q, C *keys, C *values, float *key_scales, float *value_scales) { \
        const AttentionShape shape = {num_heads, num_kv_heads, head_dim, block_size, block_rows, 0.0f}; \
        norm_rotate_store<Store>(qkv, q_weight, k_weight, cos, sin, slots, tokens, shape, eps, q, keys, values, key_scales, value_scales); \
    }

NORM_ROTATE_STORE(norm_rotate_store_f32, PlainStore, float, float)
NORM_ROTATE_STORE(norm_rotate_store_bf16, PlainStore, bf16, bf16)
#ifdef WIDE
NORM_ROTATE_STORE(norm_rotate_store_tiled_bf16, TiledStore<bf16>, bf16, bf16)
NORM_ROTATE_STORE(norm_rotate_store_tiled_int8, TiledStore<int8_t>, bf16, int8_t)
#endif

// cos and sin of positions times inv_freq, times amplitude: [tokens, half] each.
template <typename T>
static void rotary(const int64_t *positions, const float *inv_freq, int64_t tokens, int64_t half, float amplitude, T *cos, T *sin) {
#pragma omp parallel for schedule(static) if (tokens > 4)
    for (int64_t t = 0; t < tokens; ++t)
        for (int64_t i = 0; i < half; ++i) {
            const float angle = (float)positions[t] * inv_freq[i];
            cos[t * half + i] = from_float<T>(std::cos(angle) * amplitude);
            sin[t * half + i] = from_float<T>(std::sin(angle) * amplitude);
        }
}

extern "C" void rotary_f32(const int64_t *positions, const float *inv_freq, int64_t tokens, int64_t half, float amplitude, float *cos,
                           float *sin) {
    rotary(positions, inv_freq, tokens, half, amplitude, cos, sin);
}
extern "C" void rotary_bf16(const int64_t *positions, const float *inv_freq, int64_t tokens, int64_t half, float amplitude, bf16 *cos,
                            bf16 *sin) {
    rotary(positions, inv_freq, tokens, half, amplitude, cos, sin);
}

// Rows of a table, of so many bytes each.
extern "C" void gather_rows(const char *table, const int64_t *indices, int64_t count, int64_t row_bytes, char *out) {
#pragma omp parallel for schedule(static) if (count > 4)
    for (int64_t i = 0; i < count; ++i) std::memcpy(out + i * row_bytes, table + indices[i] * row_bytes, row_bytes);
}
