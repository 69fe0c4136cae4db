// Fused kernels of the decode step on CPU: norm, attention over the KV cache, gated MLP, sampling.
//
// Every row (a token, a head of a token) is computed by itself with one order of operations, so its bits depend
// neither on the other rows nor on how many tokens of its sequence are new. Vectors are the compiler's own, 16
// floats wide: it splits them on machines with narrower ones. Compiled by native.py, which also has the signatures.
//
// Shapes: N rows, M features, S sequences, H query heads, K KV heads, G query heads a KV head, D head size,
// B block length, V vocabulary.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 16, B = 64, BUCKET = 128, MOST_ROWS = 4;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

struct BFloat16 {
    uint16_t bits;
};

inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Floats load(const BFloat16* p) {
    Halves h;
    std::memcpy(&h, p, sizeof h);
    return (Floats)(__builtin_convertvector(h, Words) << 16);
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

inline void store(BFloat16* p, Floats v) {
    Words w = (Words)v;
    w = v == v ? (w + 0x7fff + ((w >> 16) & 1)) >> 16 : Words{} + 0x7fc0;  // to nearest even
    Halves h = __builtin_convertvector(w, Halves);
    std::memcpy(p, &h, sizeof h);
}

/// As the value reads after it was stored as T.
template <class T>
inline Floats rounded(Floats v) {
    T stored[LANES];
    store(stored, v);
    return load(stored);
}
template <>
inline Floats rounded<float>(Floats v) {
    return v;
}

/// The first n lanes, the others `fill`.
template <class T>
inline Floats load_some(const T* p, int n, float fill = 0) {
    if (n >= LANES) return load(p);
    T some[LANES] = {};
    std::memcpy(some, p, n * sizeof(T));
    Floats v = load(some);
    for (int i = n; i < LANES; i++) v[i] = fill;
    return v;
}

template <class T>
inline void store_some(T* p, Floats v, int n) {
    if (n >= LANES) return store(p, v);
    T some[LANES];
    store(some, v);
    std::memcpy(p, some, n * sizeof(T));
}

inline float sum(Floats v) {
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) v[i] += v[i + width];
    return v[0];
}

inline float highest(Floats v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = std::max(most, v[i]);
    return most;
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }

/// Polynomial of Cephes' expf; 0 below -87, infinite above 88.
inline Floats exponential(Floats x) {
    const Floats wanted = x;
    x = x < -87.0f ? Floats{} - 87.0f : x;
    x = x > 88.0f ? Floats{} + 88.0f : x;
    const Floats shift = Floats{} + 12582912.0f;  // adding it rounds to whole numbers
    const Floats n = (x * 1.44269504088896341f + shift) - shift;
    const Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    y = y * (Floats)exponent;
    y = wanted > 88.0f ? Floats{} + std::numeric_limits<float>::infinity() : y;
    return wanted < -87.0f ? Floats{} : y;
}

// ---------------------------------------------------------------- norm, MLP

/// hidden += delta, if there is one, its rows `stride` apart; out = weight * hidden / rms(hidden). All [N, M].
template <class T>
void rms_norm(T* hidden, const T* delta, int64_t stride, const T* weight, float eps, T* out, int64_t rows,
              int64_t features) {
    for (int64_t row = 0; row < rows; row++, hidden += features, out += features) {
        Floats squares{};
        for (int64_t i = 0; i < features; i += LANES) {
            const int n = int(std::min<int64_t>(LANES, features - i));
            Floats x = load_some(hidden + i, n);
            if (delta) {
                x = rounded<T>(x + load_some(delta + row * stride + i, n));
                store_some(hidden + i, x, n);
            }
            squares += x * x;
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / float(features) + eps);
        for (int64_t i = 0; i < features; i += LANES) {
            const int n = int(std::min<int64_t>(LANES, features - i));
            store_some(out + i, rounded<T>(load_some(hidden + i, n) * scale) * load_some(weight + i, n), n);
        }
    }
}

/// out [N, M] = silu(gate) * up, from both [N, 2 * M] side by side, rows `stride` apart.
template <class T>
void gated(const T* both, int64_t stride, T* out, int64_t rows, int64_t features) {
    for (int64_t row = 0; row < rows; row++, both += stride, out += features)
        for (int64_t i = 0; i < features; i += LANES) {
            const int n = int(std::min<int64_t>(LANES, features - i));
            const Floats gate = load_some(both + i, n), up = load_some(both + features + i, n);
            store_some(out + i, rounded<T>(gate / (1.0f + exponential(-gate))) * up, n);
        }
}

// ---------------------------------------------------------------- attention

/// scores [R, B] of R query rows [R, D] and the keys [D, B] of a block.
template <class T, int R>
void score(const float* queries, const T* keys, int size, float* scores, int64_t stride) {
    Floats sums[R][B / LANES] = {};
    for (int d = 0; d < size; d++, keys += B) {
        Floats key[B / LANES];
        for (int j = 0; j < B / LANES; j++) key[j] = load(keys + j * LANES);
        for (int r = 0; r < R; r++)
            for (int j = 0; j < B / LANES; j++) sums[r][j] += queries[r * size + d] * key[j];
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < B / LANES; j++) store(scores + r * stride + j * LANES, sums[r][j]);
}

/// out [R, D], C vectors of each row, += weights [R, B] x the first `count` values [B, D] of a block.
template <class T, int R, int C>
void weigh(const float* weights, int64_t stride, const T* values, int count, int size, float* out) {
    Floats sums[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) sums[r][c] = load(out + r * size + c * LANES);
    for (int b = 0; b < count; b++, values += size) {
        Floats value[C];
        for (int c = 0; c < C; c++) value[c] = load(values + c * LANES);
        for (int r = 0; r < R; r++)
            for (int c = 0; c < C; c++) sums[r][c] += weights[r * stride + b] * value[c];
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) store(out + r * size + c * LANES, sums[r][c]);
}

template <class T, int R>
void weigh_all(const float* weights, int64_t stride, const T* values, int count, int size, float* out) {
    int d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES) weigh<T, R, 4>(weights, stride, values + d, count, size, out + d);
    for (; d + 2 * LANES <= size; d += 2 * LANES) weigh<T, R, 2>(weights, stride, values + d, count, size, out + d);
    for (; d < size; d += LANES) weigh<T, R, 1>(weights, stride, values + d, count, size, out + d);
}

/// In place: exponentials of `length` scores less their maximum; what they sum to. The rest of the block is masked.
float soften(float* scores, int64_t length) {
    const int64_t end = (length + B - 1) / B * B;
    std::fill(scores + length, scores + end, -std::numeric_limits<float>::infinity());
    Floats most = load(scores), total{};
    for (int64_t i = LANES; i < end; i += LANES) most = larger(most, load(scores + i));
    const float peak = highest(most);
    for (int64_t i = 0; i < end; i += LANES) {
        const Floats weight = exponential(load(scores + i) - peak);
        store(scores + i, weight);
        total += weight;
    }
    return sum(total);
}

template <class T>
struct Blocks {
    std::vector<const T*> keys, values;
};

/// R query rows [R, D] over the first `length` tokens of a sequence: out [R, D].
template <class T, int R>
void attend_rows(const float* queries, const Blocks<T>& blocks, int64_t length, int size, float* scores, float* mean,
                 T* out) {
    const int64_t count = (length + B - 1) / B, stride = count * B;
    for (int64_t i = 0; i < count; i++) score<T, R>(queries, blocks.keys[i], size, scores + i * B, stride);
    float totals[R];
    for (int r = 0; r < R; r++) totals[r] = soften(scores + r * stride, length);
    std::fill(mean, mean + R * size, 0.0f);
    for (int64_t i = 0; i < count; i++)
        weigh_all<T, R>(scores + i * B, stride, blocks.values[i], int(std::min<int64_t>(B, length - i * B)), size, mean);
    for (int r = 0; r < R; r++)
        for (int d = 0; d < size; d += LANES) store(out + r * size + d, load(mean + r * size + d) / totals[r]);
}

/// One head [D] of one token: norm over it and rotary position, each if there is one. Rounded as T after each.
template <class T>
void prepare(const T* x, int size, const T* norm, float eps, const float* cos, const float* sin, float* out) {
    for (int d = 0; d < size; d += LANES) store(out + d, load(x + d));
    if (norm) {
        Floats squares{};
        for (int d = 0; d < size; d += LANES) squares += load(out + d) * load(out + d);
        const float scale = 1.0f / std::sqrt(sum(squares) / float(size) + eps);
        for (int d = 0; d < size; d += LANES)
            store(out + d, rounded<T>(rounded<T>(load(out + d) * scale) * load(norm + d)));
    }
    if (!cos) return;
    float turned[512];
    const int half = size / 2;
    for (int d = 0; d < half; d++) turned[d] = out[d] * cos[d] + out[d + half] * sin[d];
    for (int d = half; d < size; d++) turned[d] = out[d] * cos[d] + out[d - half] * sin[d];
    for (int d = 0; d < size; d += LANES) store(out + d, rounded<T>(load(turned + d)));
}

struct Heads {
    int32_t query_heads, kv_heads, size;
    float scale, eps;
    const void *query_norm, *key_norm;  // [D] each, or null
};

struct Plan {
    int64_t sequences;
    const int64_t *starts, *counts;  // [S]: length before this step, new tokens
    const int64_t *rows, *ends;      // rows of each sequence's blocks, level by level; ends[s] = end of its rows
    const int64_t *keys, *values;    // addresses of the layer's blocks [C, K, D, B] and [C, K, B, D], by level
    const float *cos, *signed_sin;   // [positions, D] each, or null
};

/// Store the new keys and values, and attend. qkv: [N, (H + 2 K) D], rows `stride` apart; out: [N, H D].
template <class T>
void attend(const Heads& heads, const Plan& plan, const T* qkv, int64_t stride, T* out) {
    const int size = heads.size, groups = heads.query_heads / heads.kv_heads;
    const int64_t block = int64_t(size) * B;
    std::vector<float> queries(groups * size), fresh(size), mean(MOST_ROWS * size), scores;
    Blocks<T> blocks;
    for (int64_t s = 0, first = 0; s < plan.sequences; first = plan.ends[s], s++) {
        const int64_t levels = plan.ends[s] - first;
        scores.resize(std::max<size_t>(scores.size(), MOST_ROWS * levels * B));
        blocks.keys.resize(levels), blocks.values.resize(levels);
        for (int64_t t = 0; t < plan.counts[s]; t++, qkv += stride, out += heads.query_heads * size) {
            const int64_t position = plan.starts[s] + t, offset = position % B, level = position / B;
            const float* cos = plan.cos ? plan.cos + position * size : nullptr;
            const float* sin = plan.cos ? plan.signed_sin + position * size : nullptr;
            for (int k = 0; k < heads.kv_heads; k++) {
                for (int64_t i = 0; i <= level; i++) {
                    const int64_t place = (plan.rows[first + i] * heads.kv_heads + k) * block;
                    blocks.keys[i] = reinterpret_cast<const T*>(plan.keys[i]) + place;
                    blocks.values[i] = reinterpret_cast<const T*>(plan.values[i]) + place;
                }
                const T *key = qkv + (heads.query_heads + k) * size, *value = key + heads.kv_heads * size;
                prepare(key, size, static_cast<const T*>(heads.key_norm), heads.eps, cos, sin, fresh.data());
                T* column = const_cast<T*>(blocks.keys[level]) + offset;
                for (int d = 0; d < size; d += LANES) {
                    T lanes[LANES];
                    store(lanes, load(&fresh[d]));
                    for (int i = 0; i < LANES; i++) column[(d + i) * B] = lanes[i];
                }
                std::memcpy(const_cast<T*>(blocks.values[level]) + offset * size, value, size * sizeof(T));
                for (int g = 0; g < groups; g++) {
                    float* query = &queries[g * size];
                    prepare(qkv + (k * groups + g) * size, size, static_cast<const T*>(heads.query_norm), heads.eps,
                            cos, sin, query);
                    for (int d = 0; d < size; d += LANES) store(query + d, load(query + d) * heads.scale);
                }
                for (int g = 0; g < groups;) {
                    const int rows = std::min(MOST_ROWS, groups - g);
                    const auto function = rows == 4   ? attend_rows<T, 4>
                                          : rows == 3 ? attend_rows<T, 3>
                                          : rows == 2 ? attend_rows<T, 2>
                                                      : attend_rows<T, 1>;
                    function(&queries[g * size], blocks, position + 1, size, scores.data(), mean.data(),
                             out + (k * groups + g) * size);
                    g += rows;
                }
            }
        }
    }
}

// ---------------------------------------------------------------- sampling

/// One token a row by inverse CDF, from buckets of 128 tokens summed in double; temperature 0 takes the likeliest.
/// Its log-prob is that of the full softmax at the temperature (1 for 0). logits: [N, V], rows `stride` apart.
template <class T>
void draw(const T* logits, int64_t stride, int64_t rows, int64_t vocab, const float* temperatures,
          const double* uniforms, int32_t* tokens, float* logprobs) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const int64_t num_buckets = (vocab + BUCKET - 1) / BUCKET;
    std::vector<double> edges(num_buckets);
    for (int64_t row = 0; row < rows; row++, logits += stride) {
        const bool greedy = temperatures[row] == 0;
        const float temperature = greedy ? 1.0f : temperatures[row];
        Floats most = Floats{} + lowest;
        for (int64_t i = 0; i < vocab; i += LANES)
            most = larger(most, load_some(logits + i, int(std::min<int64_t>(LANES, vocab - i)), lowest));
        const float top = highest(most), peak = top / temperature;
        const auto weights = [&](int64_t i) {
            return exponential(load_some(logits + i, int(std::min<int64_t>(LANES, vocab - i)), lowest) / temperature -
                               peak);
        };
        double total = 0;
        for (int64_t bucket = 0; bucket < num_buckets; bucket++) {
            Floats sums{};
            const int64_t end = std::min(vocab, (bucket + 1) * BUCKET);
            for (int64_t i = bucket * BUCKET; i < end; i += LANES) sums += weights(i);
            edges[bucket] = total += sum(sums);
        }
        const double target = std::min(uniforms[row] * total, std::nextafter(total, 0.0));
        int64_t bucket = 0, token = 0;
        while (bucket + 1 < num_buckets && edges[bucket] <= target) bucket++;
        double below = bucket ? edges[bucket - 1] : 0;
        const int64_t end = std::min(vocab, (bucket + 1) * BUCKET);
        bool found = false;
        for (int64_t i = bucket * BUCKET; i < end && !found; i += LANES) {
            const Floats weight = weights(i);
            for (int lane = 0; lane < LANES && i + lane < end && !found; lane++) {
                if (weight[lane] > 0) token = i + lane;  // rounding may leave the target past the last one
                found = (below += weight[lane]) > target;
            }
        }
        if (greedy)
            for (token = 0; token < vocab - 1; token++)
                if (load_some(logits + token, 1)[0] == top) break;
        const float scaled = load_some(logits + token, 1)[0] / temperature;
        tokens[row] = int32_t(token);
        logprobs[row] = float(double(scaled) - double(peak) - std::log(total));
    }
}

}  // namespace

#define EXPORT(T, SUFFIX)                                                                                            \
    extern "C" void rms_norm_##SUFFIX(T* hidden, const T* delta, int64_t stride, const T* weight, float eps, T* out, \
                                      int64_t rows, int64_t features) {                                              \
        rms_norm(hidden, delta, stride, weight, eps, out, rows, features);                                           \
    }                                                                                                                \
    extern "C" void gated_##SUFFIX(const T* both, int64_t stride, T* out, int64_t rows, int64_t features) {          \
        gated(both, stride, out, rows, features);                                                                    \
    }                                                                                                                \
    extern "C" void attend_##SUFFIX(const Heads* heads, const Plan* plan, const T* qkv, int64_t stride, T* out) {    \
        attend(*heads, *plan, qkv, stride, out);                                                                     \
    }                                                                                                                \
    extern "C" void draw_##SUFFIX(const T* logits, int64_t stride, int64_t rows, int64_t vocab,                      \
                                  const float* temperatures, const double* uniforms, int32_t* tokens,                \
                                  float* logprobs) {                                                                 \
        draw(logits, stride, rows, vocab, temperatures, uniforms, tokens, logprobs);                                 \
    }

EXPORT(float, fp32)
EXPORT(BFloat16, bf16)
