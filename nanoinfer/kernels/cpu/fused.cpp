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
