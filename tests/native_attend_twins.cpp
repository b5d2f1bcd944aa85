// Attention and the row functions of every instruction set of the CPU (or of the emulator) against plain C++, whose sums
// have another order: prints what lies too far away, exits 1 when anything does.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "attend.h"
#include "isa.h"

using namespace infer_native;

namespace {

float number() { return static_cast<float>(std::rand() % 20001 - 10000) / 7000; }

struct Case {
  Number cache;
  int64_t query_heads, kv_heads, head_dim, page, cached, fresh;  // tokens of the first sequence; a second one is new
  int64_t window;
  float softcap;
  bool sinks;
};

const char* title(Number cache) {
  const char* const names[] = {"float32", "float16", "bfloat16", "int8"};
  return names[static_cast<int>(cache)];
}

int64_t page_bytes(const Case& c) {
  const int64_t values = 2 * c.page * c.head_dim;
  const int64_t head = c.cache == Number::INT8 ? values + 8 * c.page : c.cache == Number::FLOAT32 ? 4 * values : 2 * values;
  return c.kv_heads * head;
}

// What was cached is written by a first call, so that the cache of each instruction set is its own.
std::vector<float> run(const Case& c) {
  std::srand(5);
  const int64_t blocks = (c.cached + c.fresh + c.page - 1) / c.page, other = c.fresh + 3;
  const int64_t other_blocks = (other + c.page - 1) / c.page, most = std::max(blocks, other_blocks);
  std::vector<uint8_t> pages((blocks + other_blocks) * page_bytes(c), 0x7f);  // NaN in every format but int8
  std::vector<int32_t> table(2 * most, 0);
  for (int64_t i = 0; i < blocks; ++i) table[i] = static_cast<int32_t>(blocks - 1 - i);
  for (int64_t i = 0; i < other_blocks; ++i) table[most + i] = static_cast<int32_t>(blocks + i);
  std::vector<float> sinks(c.query_heads);
  for (float& v : sinks) v = number();

  std::vector<float> out;
  const auto call = [&](int64_t before, int64_t first, int64_t second) {
    const int64_t tokens = first + second, rotary = c.head_dim / 2;
    std::vector<float> q(tokens * c.query_heads * c.head_dim), k(tokens * c.kv_heads * c.head_dim), v(k.size());
    std::vector<float> cos(tokens * rotary), sin(tokens * rotary);
    for (auto* values : {&q, &k, &v, &cos, &sin})
      for (float& value : *values) value = number();
    std::vector<int64_t> slots(tokens);
    for (int64_t t = 0; t < tokens; ++t) {
      const bool is_first = t < first;
      const int64_t place = is_first ? before + t : t - first;
      slots[t] = table[(is_first ? 0 : most) + place / c.page] * c.page + place % c.page;
    }
    const int32_t start[] = {0, static_cast<int32_t>(first), static_cast<int32_t>(tokens)};
    const int32_t lens[] = {static_cast<int32_t>(before + first), static_cast<int32_t>(second)};
    out.assign(q.size(), NAN);
    const int64_t wide = c.query_heads * c.head_dim, narrow = c.kv_heads * c.head_dim;
    AttendArgs args{{q.data(), wide, c.head_dim},
                    {k.data(), narrow, c.head_dim},
                    {v.data(), narrow, c.head_dim},
                    {out.data(), wide, c.head_dim},
                    Number::FLOAT32,
                    pages.data(),
                    page_bytes(c),
                    c.cache,
                    slots.data(),
                    table.data(),
                    start,
                    lens,
                    tokens,
                    2,
                    most,
                    c.query_heads,
                    c.kv_heads,
                    c.head_dim,
                    c.page,
                    1 / std::sqrt(static_cast<float>(c.head_dim)),
                    c.window,
                    c.softcap};
    args.sinks = c.sinks ? sinks.data() : nullptr;
    args.cos = cos.data(), args.sin = sin.data(), args.rotary_dim = rotary;
    attend(args);
  };
  if (c.cached > 0) call(0, c.cached, 0);
  call(c.cached, c.fresh, other);
  return out;
}

std::vector<float> rows() {
  std::srand(7);
  const int64_t width = 2 * STRETCH + 37;
  const RowKernels& kernels = active_isa().rows;
  std::vector<float> a(width), b(width), found;
  for (auto* values : {&a, &b})
    for (float& v : *values) v = number();
  std::vector<float> y(width);
  const auto keep = [&] { found.insert(found.end(), y.begin(), y.end()); };
  kernels.rms_norm(a.data(), b.data(), 1.0f, 1e-6f, width, y.data()), keep();
  kernels.layer_norm(a.data(), b.data(), a.data(), 1e-6f, width, y.data()), keep();
  for (const int64_t kind : {SILU, GELU_TANH, GELU_ERF, RELU, SIGMOID, TANH})
    kernels.activate(kind, a.data(), b.data(), width, y.data()), keep();
  kernels.rotate(a.data(), b.data(), a.data(), 62, width, y.data()), keep();
  y.assign(width, 0.0f);
  const bool clean = kernels.block_tops(a.data(), width, y.data());
  found.push_back(clean), keep();
  found.push_back(kernels.weights(a.data(), 1.5f, 0.7f, width, y.data())), keep();
  return found;
}

bool near(const std::vector<float>& wanted, const std::vector<float>& got, float tolerance) {
  for (size_t i = 0; i < wanted.size(); ++i)
    if (!(std::fabs(wanted[i] - got[i]) <= tolerance * (1 + std::fabs(wanted[i])))) return false;
  return wanted.size() == got.size();
}

}  // namespace

int main() {
  int differing = 0, compared = 0;
  std::istringstream names(infer_isas());
  for (std::string name; std::getline(names, name, ',');) {
    infer_set_isa("scalar");
    const std::vector<float> wanted = rows();
    infer_set_isa(name.c_str());
    if (++compared && !near(wanted, rows(), 1e-5f) && ++differing) std::printf("%s: other rows\n", name.c_str());
    for (const Number cache : {Number::FLOAT32, Number::FLOAT16, Number::BFLOAT16, Number::INT8})
      for (const int64_t fresh : {1, 2, 21})
        for (const auto& [query_heads, kv_heads, head_dim, page] :
             {std::array<int64_t, 4>{4, 4, 64, 16}, {9, 3, 64, 16}, {8, 1, 24, 5}, {32, 8, 128, 32}})
          for (const int64_t cached : {0, 45}) {
            const Case given{cache, query_heads, kv_heads, head_dim, page, cached, fresh, fresh == 2 ? 19 : 0,
                             cached && fresh > 2 ? 5.0f : 0.0f, kv_heads == 3};
            infer_set_isa("scalar");
            const std::vector<float> expected = run(given);
            infer_set_isa(name.c_str());
            // One step of a rounded key or value: ties fall either way where sums differ in their last bit.
            const float tolerance = cache == Number::FLOAT32 ? 1e-5f : cache == Number::FLOAT16 ? 1e-3f : 1e-2f;
            if (++compared && !near(expected, run(given), tolerance) && ++differing)
              std::printf("%s, %s, %ld/%ld heads of %ld, %ld tokens after %ld: other values\n", name.c_str(), title(cache),
                          static_cast<long>(query_heads), static_cast<long>(kv_heads), static_cast<long>(head_dim),
                          static_cast<long>(fresh), static_cast<long>(cached));
          }
  }
  std::printf("%d compared\n", compared);
  return differing != 0 || std::string(infer_isas()) == "scalar";
}
