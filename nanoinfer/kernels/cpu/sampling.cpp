// Sampling: the passes over a row of logits, straight from the head's type, without a float32 copy.

#include "common.h"

// Columns whose maximum is found together; the winner is then looked for among them.
static const int64_t CHUNK = 1024;

#if defined(__AVX512F__)
// 32 values, in any order; the order of the columns does not matter to a maximum or a sum.
static inline void load32(const float *x, __m512 *out) { out[0] = _mm512_loadu_ps(x), out[1] = _mm512_loadu_ps(x + 16); }
static inline void load32(const bf16 *x, __m512 *out) {
    const __m512i pairs = _mm512_loadu_si512(x);
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}
#endif

// The largest of some numbers, without regard to NaN; has_nan is set if there is one.
template <typename T> static float largest_of(const T *x, int64_t count, bool &has_nan) {
    float largest = -INFINITY;
    int64_t i = 0;
#if defined(__AVX512F__)
    __m512 best = _mm512_set1_ps(-INFINITY), value[2];
    __mmask16 nan = 0;
    for (; i + 32 <= count; i += 32) {
        load32(x + i, value);
        nan |= _mm512_cmp_ps_mask(value[0], value[1], _CMP_UNORD_Q);
        best = _mm512_max_ps(_mm512_max_ps(value[0], value[1]), best);  // of NaN and another, the second
    }
    has_nan |= nan != 0;
    largest = _mm512_reduce_max_ps(best);
#endif
    for (; i < count; ++i) {
        const float value = to_float(x[i]);
        has_nan |= value != value;
        largest = value > largest ? value : largest;
    }
    return largest;
}

// The largest logit and the first column that has it; NaN wins over everything.
template <typename T> static void argmax(const T *x, int64_t columns, float &best, int64_t &winner) {
    bool has_nan = false;
    best = -INFINITY, winner = 0;
    for (int64_t start = 0; start < columns; start += CHUNK) {
        const float largest = largest_of(x + start, std::min(CHUNK, columns - start), has_nan);
        if (largest > best) best = largest, winner = start;
    }
    while (winner < columns - 1 && to_float(x[winner]) != best) ++winner;
    if (has_nan) best = NAN;
}

template <typename T>
static void row_argmax(const T *logits, int64_t rows, int64_t columns, int64_t stride, float *best, int64_t *winners) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) argmax(logits + row * stride, columns, best[row], winners[row]);
}

static inline float weight_of(float logit, float best, float inverse_temperature) {
    const float x = (logit - best) * inverse_temperature;
    return x < -87.0f ? 0.0f : std::exp(x);
}

// The sum of exp((logit - best) / temperature).
template <typename T> static double segment_sum(const T *x, int64_t count, float best, float inverse_temperature) {
    double sum = 0;
    int64_t i = 0;
#if defined(__AVX512F__)
    const __m512 top = _mm512_set1_ps(best), factor = _mm512_set1_ps(inverse_temperature);
    __m512 total = _mm512_setzero_ps(), value[2];
    for (; i + 32 <= count; i += 32) {
        load32(x + i, value);
        for (const __m512 logit : value) {
            const __m512 y = _mm512_mul_ps(_mm512_sub_ps(logit, top), factor);
            total = _mm512_mask_add_ps(total, _mm512_cmp_ps_mask(y, _mm512_set1_ps(-87.0f), _CMP_GE_OQ), total, exp512(y));
        }
    }
    sum = _mm512_reduce_add_ps(total);
#endif
    for (; i < count; ++i) sum += weight_of(to_float(x[i]), best, inverse_temperature);
    return sum;
}

// sums[row][s]: segment_sum of columns s * segment .. (s + 1) * segment - 1.
template <typename T>
static void segment_sums(const T *logits, int64_t rows, int64_t columns, int64_t stride, const float *best,
                         const float *inverse_temperature, int64_t segment, double *sums) {
    const int64_t segments = (columns + segment - 1) / segment;
#pragma omp parallel for schedule(static)
    for (int64_t item = 0; item < rows * segments; ++item) {
        const int64_t row = item / segments, start = item % segments * segment;
        sums[item] = segment_sum(logits + row * stride + start, std::min(segment, columns - start), best[row], inverse_temperature[row]);
    }
}

// Of a row whose segments' sums are known, the first column at which the cumulative weight passes `uniform` of its total.
template <typename T>
static int64_t find_token(const T *x, int64_t columns, float best, float inverse_temperature, int64_t segment, const double *sums,
                          double uniform) {
    double target = 0;
    int64_t last_weighty = 0;
    for (int64_t s = 0; s < (columns + segment - 1) / segment; ++s) {
        target += sums[s];
        if (sums[s] > 0) last_weighty = s;
    }
    target *= uniform;
    // Sums in another order may differ in the last bit: stay on the last segment, and token, that can be drawn.
    int64_t s = 0;
    double before = 0;
    while (s < last_weighty && before + sums[s] <= target) before += sums[s++];
    int64_t last = s * segment;
    for (int64_t i = s * segment; i < std::min(columns, (s + 1) * segment); ++i) {
        const float weight = weight_of(to_float(x[i]), best, inverse_temperature);
        if (!(weight > 0)) continue;
        last = i;
        if ((before += weight) > target) break;
    }
    return last;
}

// tokens[row]: the winner where the inverse temperature is 0, else find_token; -1 where the largest logit is not finite.
// best, sums: memory for [rows] and [rows][segments].
template <typename T>
static void choose(const T *logits, int64_t rows, int64_t columns, int64_t stride, const float *inverse_temperature, const double *uniforms,
                   int64_t segment, float *best, double *sums, int64_t *tokens) {
    const int64_t segments = (columns + segment - 1) / segment;
    const bool is_few = rows < omp_get_max_threads();
    if (is_few) {
        row_argmax(logits, rows, columns, stride, best, tokens);
        segment_sums(logits, rows, columns, stride, best, inverse_temperature, segment, sums);
    }
    // A row at a time, so that the second pass finds it in the cache.
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T *x = logits + row * stride;
        const float inverse = inverse_temperature[row];
        if (!is_few) argmax(x, columns, best[row], tokens[row]);
        if (!std::isfinite(best[row])) {
            tokens[row] = -1;
        } else if (inverse > 0) {
            if (!is_few) segment_sums(x, 1, columns, stride, best + row, &inverse, segment, sums + row * segments);
            tokens[row] = find_token(x, columns, best[row], inverse, segment, sums + row * segments, uniforms[row]);
        }
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
extern "C" void choose_f32(const float *x, int64_t rows, int64_t columns, int64_t stride, const float *inverse_temperature,
                           const double *uniforms, int64_t segment, float *best, double *sums, int64_t *tokens) {
    choose(x, rows, columns, stride, inverse_temperature, uniforms, segment, best, sums, tokens);
}
extern "C" void choose_bf16(const bf16 *x, int64_t rows, int64_t columns, int64_t stride, const float *inverse_temperature,
                            const double *uniforms, int64_t segment, float *best, double *sums, int64_t *tokens) {
    choose(x, rows, columns, stride, inverse_temperature, uniforms, segment, best, sums, tokens);
}
