// What a decode step feeds the model and the sampler, from what is kept of each sequence (`InputBatch`).

#include "common.h"

// As `layers.sampler.uniforms`: two rounds of SplitMix64.
static inline uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

static inline double uniform(uint64_t seed, uint64_t index) {
    const uint64_t golden = 0x9E3779B97F4A7C15;
    return (double)(mix(mix(seed + golden) + index * golden + golden) >> 32) * 0x1p-32;
}

// As `layers.sampler.inverse_temperatures`.
static inline float inverse_of(double temperature) {
    return temperature > 0 ? (float)std::min(std::max(1 / temperature, (double)FLT_MIN), (double)FLT_MAX) : 0.0f;
}

// rows: the `count` rows that decode. All that follows up to temperature has one entry a row, block_tables `columns`. The
// rest is written, one entry for each of `rows`.
extern "C" void decode_inputs(const int64_t *rows, int64_t count, const int64_t *last_token, const int64_t *num_computed,
                              const int64_t *num_tokens, const int64_t *num_prompt, const int32_t *block_tables, int64_t columns,
                              int64_t block_size, const uint64_t *seeds, const double *temperature, int64_t *input_ids,
                              int64_t *positions, int64_t *slots, int32_t *seq_lens, int32_t *tables, float *inverse,
                              double *uniforms) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t row = rows[i], position = num_computed[row];
        const int32_t *blocks = block_tables + row * columns;
        input_ids[i] = last_token[row];
        positions[i] = position;
        slots[i] = blocks[position / block_size] * block_size + position % block_size;
        seq_lens[i] = (int32_t)(position + 1);
        std::memcpy(tables + i * columns, blocks, (position / block_size + 1) * sizeof(int32_t));
        inverse[i] = inverse_of(temperature[row]);
        uniforms[i] = uniform(seeds[row], (uint64_t)(num_tokens[row] - num_prompt[row]));
    }
}
