// Sampling: the passes over a row of logits, straight from the head's type, without a float32 copy.

#include "common.h"

// Columns whose maximum is found together; the winner is then looked for among them.
static const int64_t CHUNK = 1024;

// Per row the largest logit and the first column that has it; NaN wins over everything.
template <typename T>
static void row_argmax(const T *logits, int64_t rows, int64_t columns, int64_t stride, float *best, int64_t *winners) {
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        const T *x = logits + row * stride;
        float maximum = -INFINITY;
        int has_nan = 0;
        int64_t winner = 0;
        for (int64_t start = 0; start < columns; start += CHUNK) {
            const int64_t stop = std::min(columns, start + CHUNK);
            float largest = -INFINITY;
#pragma omp simd reduction(max : largest) reduction(| : has_nan)
            for (int64_t i = start; i < stop; ++i) {
                const float value = to_float(x[i]);
                has_nan |= value != value;
                largest = value > largest ? value : largest;
            }
            if (largest > maximum) maximum = largest, winner = start;
        }
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
    row_argmax(logits, rows, columns, stride, best, tokens);
    bool draws = false;
    for (int64_t row = 0; row < rows; ++row) draws |= inverse_temperature[row] > 0;
    if (draws) segment_sums(logits, rows, columns, stride, best, inverse_temperature, segment, sums);
    const int64_t segments = (columns + segment - 1) / segment;
#pragma omp parallel for schedule(static)
    for (int64_t row = 0; row < rows; ++row) {
        if (!std::isfinite(best[row]))
            tokens[row] = -1;
        else if (inverse_temperature[row] > 0)
            tokens[row] = find_token(logits + row * stride, columns, best[row], inverse_temperature[row], segment, sums + row * segments, uniforms[row]);
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
