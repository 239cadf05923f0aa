// One decoding step of a Llama-shaped model in float32: newest tokens in, next tokens and their log-probs out.
//
// Compiled at first use by native.py, which also packs the weights and lays out the cache. Weights lie in panels of 32
// outputs, [panel][input][32], so that a product reads them once, in order. Keys and values lie in blocks of 32 tokens,
// for each layer and key-value head, keys as [width][32] and values as [width / 32][32 tokens][32]: scores and mixtures
// are the same small product as the layers'. A page is such blocks of all layers. Columns beyond a row's own never enter a
// sum, and each sum has one order, whatever the number of rows or threads.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#if defined(__AVX512F__)
constexpr int LANES = 16, TILE = 12;
#elif defined(__AVX2__)
constexpr int LANES = 8, TILE = 6;
#else
constexpr int LANES = 4, TILE = 6;
#endif
constexpr int PANEL = 32;
constexpr int64_t DEPTH = 64;            // inputs of a stretch of a panel, which stays in the first cache: 8 KB
constexpr int64_t LOGITS = 1 << 22;      // of one pass over the head, unless fewer than LEAST_ROWS rows would go in
constexpr int64_t LEAST_ROWS = 48, UNIT_ROWS = 64, BLOCK_ROWS = 4 * TILE;
constexpr float LOWEST = -87.0f;         // e to this is the least normal number; below it is 0
constexpr double LEAST_LOGPROB = -1e4;   // of a token that is never drawn, as an entropy counts it

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static Vector load(const float* from) { return *reinterpret_cast<const Loose*>(from); }
static void store(float* to, Vector values) { *reinterpret_cast<Loose*>(to) = values; }

extern "C" {
struct Layer {
  const float *attention_norm, *qkv, *qkv_bias, *query_norm, *key_norm, *output, *ffn_norm, *gate_up, *down;
};
struct Model {
  int64_t layers, hidden, heads, kv_heads, width, ffn, vocab, threads;
  float epsilon, scaling;
  const Layer* layer;
  const float *embedding, *norm, *head, *cosines, *sines;  // the last two: [position][width / 2]
};
struct Row {  // pages of the prompts' common beginning and of the rest of the row's prompt, in order; lists of its own
  float *prefix, *prompt;
  int64_t prefix_tokens, prompt_tokens;
  float* const* own;
  int64_t own_tokens;
};
}

static int64_t panels(int64_t columns) { return (columns + PANEL - 1) / PANEL; }
static int64_t padded(int64_t columns) { return panels(columns) * PANEL; }

// Sums of M rows with one panel, on top of `out` where `add`: as many columns at a time as registers hold. A layer's
// weights come from memory, once a step, so each tile asks for what comes next: where it is alone, the same inputs
// further on, else its share, a line of 16 from `ahead` on every `step`, lest the first of many waits for all of it.
template <int M, bool ALONE>
static void tile(const float* rows, int64_t stride, const float* panel, int64_t depth, float* out, bool add,
                 const float* ahead, int64_t step) {
  constexpr int WIDE = M <= 3 ? std::min(4, PANEL / LANES) : 2;  // few rows alone would wait for their own sums
  for (int at = 0; at < PANEL; at += WIDE * LANES) {
    Vector sums[M][WIDE];
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < WIDE; ++v) sums[m][v] = add ? load(out + m * PANEL + at + v * LANES) : Vector{};
    const float* weights = panel + at;
    for (int64_t k = 0; k < depth; ++k, weights += PANEL) {
      Vector columns[WIDE];
      for (int v = 0; v < WIDE; ++v) {
        columns[v] = load(weights + v * LANES);
        if (ALONE) __builtin_prefetch(weights + depth * PANEL + v * LANES, 0, 2);
      }
      if (!ALONE && !at) __builtin_prefetch(ahead + k * step, 0, 2);
      for (int m = 0; m < M; ++m)
        for (int v = 0; v < WIDE; ++v) sums[m][v] += rows[m * stride + k] * columns[v];
    }
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < WIDE; ++v) store(out + m * PANEL + at + v * LANES, sums[m][v]);
  }
}

using Tile = void (*)(const float*, int64_t, const float*, int64_t, float*, bool, const float*, int64_t);
template <bool ALONE, int... M>
static Tile chosen(int64_t count, std::integer_sequence<int, M...>) {
  static constexpr Tile all[] = {tile<M + 1, ALONE>...};
  return all[count - 1];
}
// Products of any number of rows with a panel, to out[row][32]: a stretch of it after the other, which all rows meet in
// the first cache.
static void multiply(const float* rows, int64_t count, int64_t stride, const float* panel, int64_t depth, float* out,
                     bool add) {
  constexpr auto sizes = std::make_integer_sequence<int, TILE>();
  const int64_t tiles = (count + TILE - 1) / TILE, step = (PANEL + tiles - 1) / tiles;
  for (int64_t start = 0; start < depth; start += DEPTH) {
    const int64_t size = std::min(DEPTH, depth - start);
    const float *here = panel + start * PANEL, *ahead = here + size * PANEL;
    for (int64_t at = 0; at < count; at += TILE, ahead += size * step) {
      const int64_t many = std::min<int64_t>(TILE, count - at);
      (tiles == 1 ? chosen<true>(many, sizes) : chosen<false>(many, sizes))(
          rows + at * stride + start, stride, here, size, out + at * PANEL, add || start, ahead, step);
    }
  }
}

// e^x for x <= 88: 2^n e^r with |r| <= ln(2) / 2, of e^r the Taylor series to r^7, whose rest is 5e-9.
static Vector exponential(Vector x) {
  const Vector n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const Vector r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  Vector sum = r * (1.0f / 5040) + 1.0f / 720;
  for (const float factor : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) sum = sum * r + factor;
  const Whole bits = reinterpret_cast<Whole>(sum) + (__builtin_convertvector(n, Whole) << 23);
  return x < LOWEST ? Vector{} : reinterpret_cast<Vector>(bits);
}

static float total(Vector values) {
  float sum = 0;
  for (int lane = 0; lane < LANES; ++lane) sum += values[lane];
  return sum;
}

// Largest of `count` numbers, a whole number of vectors.
static float largest(const float* values, int64_t count) {
  Vector most = load(values);
  for (int64_t i = LANES; i < count; i += LANES) {
    const Vector next = load(values + i);
    most = next > most ? next : most;
  }
  float result = most[0];
  for (int lane = 1; lane < LANES; ++lane) result = std::max(result, most[lane]);
  return result;
}

// x * weight / sqrt(mean of x^2 + epsilon).
static void rms_norm(const float* x, const float* weight, int64_t size, float epsilon, float* out) {
  Vector sums{};
  int64_t at = 0;
  for (; at + LANES <= size; at += LANES) sums += load(x + at) * load(x + at);
  float squares = total(sums);
  for (; at < size; ++at) squares += x[at] * x[at];
  const float factor = 1.0f / std::sqrt(squares / size + epsilon);
  for (int64_t i = 0; i < size; ++i) out[i] = weight[i] * (x[i] * factor);
}

enum After { SET, ADD, GATE };
// out = rows @ weights + bias; added to `out`; or, of panels of 16 gates and 16 ups, silu(gate) * up.
static void product(const float* rows, int64_t count, int64_t stride, const float* packed, int64_t depth,
                    int64_t columns, const float* bias, float* out, int64_t out_stride, After after, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
  for (int64_t p = 0; p < panels(columns); ++p) {
    float sums[BLOCK_ROWS * PANEL];
    for (int64_t at = 0; at < count; at += BLOCK_ROWS) {
      const int64_t many = std::min<int64_t>(BLOCK_ROWS, count - at);
      multiply(rows + at * stride, many, stride, packed + p * depth * PANEL, depth, sums, false);
      for (int64_t m = 0; m < many; ++m) {
        const float* from = sums + m * PANEL;
        float* to = out + (at + m) * out_stride + p * (after == GATE ? PANEL / 2 : PANEL);
        if (after == GATE)
          for (int i = 0; i < PANEL / 2; i += LANES) {
            const Vector gate = load(from + i), least = Vector{} - 88.0f;
            store(to + i, gate / (1.0f + exponential(-(gate < least ? least : gate))) * load(from + PANEL / 2 + i));
          }
        else
          for (int i = 0; i < PANEL; i += LANES) {
            const Vector sum = load(from + i);
            store(to + i, after == ADD ? load(to + i) + sum : bias ? sum + load(bias + p * PANEL + i) : sum);
          }
      }
    }
  }
}

// Attention of one key-value head's queries in rows order[first .. first + count - 1], which share their prompt.
struct Unit {
  const Model& model;
  int64_t layer, kv, shared, block;
  const std::vector<int64_t>& order;
  int64_t first, count;
  std::vector<float>&scores, &queries, &mixed;

  // Calls visit(block, tokens in it, first query, number of queries, scores) for each block of each segment.
  template <class Visit>
  void each_block(const Row* rows, Visit visit) const {
    float* at = scores.data();
    auto segment = [&](auto page, int64_t tokens, int64_t query, int64_t many) {
      for (int64_t done = 0; done < tokens; done += PANEL, at += many * PANEL)
        visit(page(done / PANEL) + (layer * model.kv_heads + kv) * block, std::min<int64_t>(PANEL, tokens - done), query,
              many, at);
    };
    const int64_t page_size = model.layers * model.kv_heads * block;
    auto in_order = [page_size](float* pages) { return [=](int64_t number) { return pages + number * page_size; }; };
    const Row& any = rows[order[first]];
    segment(in_order(any.prefix), any.prefix_tokens, 0, count * shared);
    segment(in_order(any.prompt), any.prompt_tokens, 0, count * shared);
    for (int64_t i = 0; i < count; ++i) {
      const Row& row = rows[order[first + i]];
      segment([&](int64_t number) { return row.own[number]; }, row.own_tokens + 1, i * shared, shared);
    }
  }

  // Turn a head of the row's newest token by its position, after its norm where there is one, times `scale`.
  void rotate(const Row& row, const float* head, const float* norm, float scale, float* out) const {
    const int64_t half = model.width / 2, at = (row.prefix_tokens + row.prompt_tokens + row.own_tokens) * half;
    const float *cosine = model.cosines + at, *sine = model.sines + at;
    if (norm) {
      rms_norm(head, norm, model.width, model.epsilon, out);
      head = out;
    }
    for (int64_t i = 0; i < half; ++i) {
      const float low = head[i], high = head[half + i];
      out[i] = (low * cosine[i] - high * sine[i]) * scale;
      out[half + i] = (high * cosine[i] + low * sine[i]) * scale;
    }
  }

  // Write the newest token's key and value into the row's own page.
  void remember(const Row& row, const float* state) const {
    const int64_t width = model.width, column = row.own_tokens % PANEL;
    const float *key = state + (model.heads + kv) * width, *value = key + model.kv_heads * width;
    float* keys = row.own[row.own_tokens / PANEL] + (layer * model.kv_heads + kv) * block;
    float *values = keys + width * PANEL, *turned = mixed.data();
    rotate(row, key, model.layer[layer].key_norm, 1.0f, turned);
    for (int64_t w = 0; w < width; ++w) {
      keys[w * PANEL + column] = turned[w];
      values[(w / PANEL * PANEL + column) * PANEL + w % PANEL] = value[w];
    }
  }

  void run(const Row* rows, const float* qkv, int64_t stride, float* out, int64_t out_stride) const {
    const int64_t width = model.width, many = count * shared, wide = padded(width);
    int64_t cells = 0;
    for (int64_t i = 0; i < count; ++i) cells += shared * padded(rows[order[first + i]].own_tokens + 1);
    const Row& any = rows[order[first]];
    cells += many * (padded(any.prefix_tokens) + padded(any.prompt_tokens));
    if (static_cast<int64_t>(scores.size()) < cells) scores.resize(cells);
    queries.resize(many * width);
    mixed.resize(many * wide);
    for (int64_t i = 0; i < count; ++i) {
      const float* state = qkv + order[first + i] * stride;
      const Row& row = rows[order[first + i]];
      remember(row, state);
      for (int64_t q = 0; q < shared; ++q)
        rotate(row, state + (kv * shared + q) * width, model.layer[layer].query_norm, model.scaling,
               &queries[(i * shared + q) * width]);
    }
    std::fill(mixed.begin(), mixed.end(), 0.0f);
    std::vector<float> most(many, -INFINITY), sums(many, 0.0f);
    each_block(rows, [&](const float* keys, int64_t tokens, int64_t query, int64_t asking, float* to) {
      multiply(&queries[query * width], asking, width, keys, width, to, false);
      for (int64_t q = 0; q < asking; ++q) {
        std::fill(to + q * PANEL + tokens, to + (q + 1) * PANEL, -INFINITY);
        most[query + q] = std::max(most[query + q], largest(to + q * PANEL, PANEL));
      }
    });
    each_block(rows, [&](const float* keys, int64_t tokens, int64_t query, int64_t asking, float* to) {
      const float* values = keys + width * PANEL;
      for (int64_t q = 0; q < asking; ++q) {
        Vector sum{};
        for (int i = 0; i < PANEL; i += LANES) {
          const Vector weight = exponential(load(to + q * PANEL + i) - most[query + q]);
          store(to + q * PANEL + i, weight);
          sum += weight;
        }
        sums[query + q] += total(sum);
      }
      for (int64_t p = 0; p < panels(width); ++p)
        multiply(to, asking, PANEL, values + p * PANEL * PANEL, tokens, &mixed[(p * many + query) * PANEL], true);
    });
    for (int64_t q = 0; q < many; ++q) {
      float* to = out + order[first + q / shared] * out_stride + (kv * shared + q % shared) * width;
      for (int64_t w = 0; w < width; ++w) to[w] = mixed[(w / PANEL * many + q) * PANEL + w % PANEL] / sums[q];
    }
  }
};

// The first token whose cumulative weight exceeds uniform * total, never one of weight 0; -1 where logits are NaN.
static void draw(float* logits, int64_t vocab, float temperature, float uniform, int64_t* token, float* logprob,
                 float* entropy) {
  static thread_local std::vector<float> weights;
  static thread_local std::vector<double> sums;
  const int64_t size = padded(vocab);
  weights.resize(size);
  sums.clear();
  for (int64_t i = 0; i < size; i += LANES) store(logits + i, load(logits + i) / temperature);
  std::fill(logits + vocab, logits + size, -INFINITY);
  const float most = largest(logits, size);
  double whole = 0, weighted = 0;
  constexpr int64_t STRETCH = 8 * PANEL;
  for (int64_t start = 0; start < size; start += STRETCH) {
    Vector sum{}, product{};
    for (int64_t i = start; i < std::min(start + STRETCH, size); i += LANES) {
      const Vector shift = load(logits + i) - most, least = Vector{} + static_cast<float>(LEAST_LOGPROB);
      const Vector weight = exponential(shift);
      store(&weights[i], weight);
      sum += weight;
      product += weight * (shift < least ? least : shift);
    }
    sums.push_back(total(sum));
    whole += sums.back();
    weighted += total(product);
  }
  if (!(whole > 0)) return void(*token = -1);
  const double wanted = uniform * whole;
  double passed = 0;
  size_t stretch = 0;
  while (stretch + 1 < sums.size() && passed + sums[stretch] <= wanted) passed += sums[stretch++];
  // Rounding may leave a stretch short of its own sum: its last token of some weight then.
  for (int64_t i = stretch * STRETCH; i < std::min<int64_t>((stretch + 1) * STRETCH, vocab); ++i) {
    if (weights[i] == 0) continue;
    *token = i;
    if ((passed += weights[i]) > wanted) break;
  }
  const double log_whole = std::log(whole);
  *logprob = static_cast<float>(logits[*token] - most - log_whole);
  if (entropy) *entropy = static_cast<float>(log_whole - weighted / whole);
}

// Extend each row by `tokens`, and draw what follows: `drawn`, `logprobs`, and `entropies` unless null. With `logits`,
// [count][vocab], these are written and nothing is drawn.
extern "C" void decode_step(const Model* model, int64_t count, Row* rows, const int64_t* tokens, const float* uniforms,
                            float temperature, int64_t* drawn, float* logprobs, float* entropies, float* logits) {
  const Model& m = *model;
  const int threads = static_cast<int>(m.threads);
  const int64_t hidden = padded(m.hidden), shared = m.heads / m.kv_heads, states = (m.heads + 2 * m.kv_heads) * m.width;
  const int64_t qkv_size = padded(states), mixed_size = padded(m.heads * m.width), ffn_size = padded(m.ffn);
  const int64_t block = (m.width + padded(m.width)) * PANEL, vocab = padded(m.vocab);
  const int64_t some = std::max(LEAST_ROWS, LOGITS / vocab);
  static thread_local std::vector<float> memory;
  memory.resize(count * (2 * hidden + qkv_size + mixed_size + ffn_size) + std::min(some, count) * vocab);
  float *x = memory.data(), *normed = x + count * hidden, *qkv = normed + count * hidden, *mixed = qkv + count * qkv_size;
  float *gated = mixed + count * mixed_size, *scaled = gated + count * ffn_size;

  std::vector<int64_t> order(count), units;
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return rows[a].prompt < rows[b].prompt; });
  for (int64_t i = 0; i < count; ++i)
    if (!i || rows[order[i]].prompt != rows[order[i - 1]].prompt || i - units.back() == UNIT_ROWS) units.push_back(i);
  units.push_back(count);

  auto norm_all = [&](const float* weight) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t r = 0; r < count; ++r) rms_norm(x + r * hidden, weight, m.hidden, m.epsilon, normed + r * hidden);
  };
  for (int64_t r = 0; r < count; ++r)
    std::copy_n(m.embedding + tokens[r] * m.hidden, m.hidden, x + r * hidden);
  for (int64_t l = 0; l < m.layers; ++l) {
    const Layer& layer = m.layer[l];
    norm_all(layer.attention_norm);
    product(normed, count, hidden, layer.qkv, m.hidden, states, layer.qkv_bias, qkv, qkv_size, SET, threads);
    const int64_t num_units = static_cast<int64_t>(units.size()) - 1;
#pragma omp parallel for num_threads(threads) schedule(dynamic) if (threads > 1)
    for (int64_t u = 0; u < m.kv_heads * num_units; ++u) {
      static thread_local std::vector<float> scores, queries, sums;
      const int64_t first = units[u % num_units], last = units[u % num_units + 1];
      Unit{m, l, u / num_units, shared, block, order, first, last - first, scores, queries, sums}.run(
          rows, qkv, qkv_size, mixed, mixed_size);
    }
    product(mixed, count, mixed_size, layer.output, m.heads * m.width, m.hidden, nullptr, x, hidden, ADD, threads);
    norm_all(layer.ffn_norm);
    product(normed, count, hidden, layer.gate_up, m.hidden, 2 * m.ffn, nullptr, gated, ffn_size, GATE,
            threads);
    product(gated, count, ffn_size, layer.down, m.ffn, m.hidden, nullptr, x, hidden, ADD, threads);
  }
  norm_all(m.norm);
  for (int64_t first = 0; first < count; first += some) {
    const int64_t many = std::min(some, count - first);
    product(normed + first * hidden, many, hidden, m.head, m.hidden, m.vocab, nullptr, scaled, vocab, SET, threads);
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1)
    for (int64_t r = 0; r < many; ++r) {
      const int64_t at = first + r;
      if (logits)
        std::copy_n(scaled + r * vocab, m.vocab, logits + at * m.vocab);
      else
        draw(scaled + r * vocab, m.vocab, temperature, uniforms[at], drawn + at, logprobs + at,
             entropies ? entropies + at : nullptr);
    }
  }
  for (int64_t r = 0; r < count; ++r) ++rows[r].own_tokens;
}

// Lay weight[outs][ins] into panels from row `first` on: with 16 `lanes` a panel, 16 to each side, the second at `offset`.
extern "C" void pack(const float* weight, int64_t outs, int64_t ins, int64_t first, int64_t lanes, int64_t offset, float* to) {
  constexpr int64_t SQUARE = 32;  // what is read and written at a time stays in the cache
  for (int64_t row = 0; row < outs; row += SQUARE)
    for (int64_t start = 0; start < ins; start += SQUARE)
      for (int64_t r = row; r < std::min(outs, row + SQUARE); ++r) {
        float* panel = to + (first + r) / lanes * ins * PANEL + (first + r) % lanes + offset;
        for (int64_t k = start; k < std::min(ins, start + SQUARE); ++k) panel[k * PANEL] = weight[r * ins + k];
      }
}
