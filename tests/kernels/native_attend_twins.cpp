// Attention of every instruction set of the CPU (or of the emulator) against plain C++, within the roundings that a fused
// product and another order of summation change: prints what differs, exits 1 when anything does.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "attend/attend_encoder.h"
#include "linear/linear.h"

using namespace infer_native;

namespace {

float number() { return static_cast<float>(std::rand() % 2001 - 1000) / 500; }

std::vector<float> numbers(int64_t count) {
  std::vector<float> found(count);
  for (float& v : found) v = number();
  return found;
}

struct Case {
  Number cache;
  int64_t query_heads, kv_heads, dim, page, window;
  float softcap;
  bool sinks, rotary;
  Number type = Number::FLOAT32;  // of queries, keys, values and results; or BFLOAT16
};

std::vector<uint16_t> halves(const std::vector<float>& numbers) {
  std::vector<uint16_t> found(numbers.size());
  for (size_t i = 0; i < numbers.size(); ++i) {
    uint32_t bits;
    std::memcpy(&bits, &numbers[i], 4);
    found[i] = static_cast<uint16_t>(bits >> 16);
  }
  return found;
}

// Sequences of so many tokens: the first call brings what is old (tiles of queries), the second the new ones (decoding,
// over several chunks; few rows; tiles; nothing at all).
const std::vector<int64_t> LENGTHS = {300, 37, 90, 5}, NEW = {1, 3, 41, 0};

std::vector<float> called(const Case& given, std::vector<uint8_t>& pages, int64_t page_bytes, bool second) {
  std::vector<int32_t> starts = {0}, lengths;
  std::vector<int64_t> slots;
  const int64_t count = static_cast<int64_t>(LENGTHS.size()), blocks = (LENGTHS[0] + given.page - 1) / given.page;
  std::vector<int32_t> table(count * blocks);
  for (int64_t b = 0; b < count; ++b) {
    for (int64_t i = 0; i < blocks; ++i) table[b * blocks + i] = static_cast<int32_t>(i * count + (b + i) % count);
    const int64_t old = LENGTHS[b] - NEW[b], begin = second ? old : 0, end = second ? LENGTHS[b] : old;
    for (int64_t t = begin; t < end; ++t) slots.push_back(table[b * blocks + t / given.page] * given.page + t % given.page);
    starts.push_back(static_cast<int32_t>(slots.size()));
    lengths.push_back(static_cast<int32_t>(end));
  }
  const int64_t tokens = static_cast<int64_t>(slots.size()), wide = given.query_heads * given.dim, narrow = given.kv_heads * given.dim;
  std::vector<float> query = numbers(tokens * wide), key = numbers(tokens * narrow), value = numbers(tokens * narrow);
  std::vector<float> sinks = numbers(given.query_heads), cos = numbers(tokens * given.dim), sin = numbers(tokens * given.dim);
  std::vector<float> out(tokens * wide, NAN);
  AttendArgs args{};
  args.query = {query.data(), wide, given.dim}, args.out = {out.data(), wide, given.dim};
  args.key = {key.data(), narrow, given.dim}, args.value = {value.data(), narrow, given.dim};
  args.type = Number::FLOAT32, args.pages = pages.data(), args.page_bytes = page_bytes, args.cache_type = given.cache;
  args.slot_mapping = slots.data(), args.block_table = table.data(), args.query_start = starts.data(), args.seq_lens = lengths.data();
  args.tokens = tokens, args.sequences = count, args.blocks = blocks, args.query_heads = given.query_heads;
  args.kv_heads = given.kv_heads, args.head_dim = given.dim, args.page = given.page;
  args.scale = 1 / std::sqrt(static_cast<float>(given.dim)), args.window = given.window, args.softcap = given.softcap;
  if (given.sinks) args.sinks = sinks.data();
  if (given.rotary) args.cos = cos.data(), args.sin = sin.data(), args.rotary_dim = given.dim / 4 * 2;
  if (given.type == Number::FLOAT32) {
    attend(args);
    return out;
  }
  std::vector<uint16_t> query16 = halves(query), key16 = halves(key), value16 = halves(value), out16 = halves(out);
  args.type = given.type, args.query.data = query16.data(), args.key.data = key16.data(), args.value.data = value16.data();
  args.out.data = out16.data();
  attend(args);
  for (size_t i = 0; i < out.size(); ++i) {
    const uint32_t bits = uint32_t{out16[i]} << 16;
    std::memcpy(&out[i], &bits, 4);
  }
  return out;
}

std::vector<float> paged(const Case& given) {
  std::srand(1);
  const int64_t size = given.cache == Number::FLOAT32 ? 4 : given.cache == Number::INT8 ? 1 : 2;
  const int64_t steps = given.cache == Number::INT8 ? 4 : 0, blocks = (LENGTHS[0] + given.page - 1) / given.page;
  const int64_t page_bytes = 2 * given.kv_heads * given.page * (given.dim * size + steps);
  std::vector<uint8_t> pages(blocks * LENGTHS.size() * page_bytes, 0x7f);  // of floats NaN
  std::vector<float> found = called(given, pages, page_bytes, false), more = called(given, pages, page_bytes, true);
  found.insert(found.end(), more.begin(), more.end());
  return found;
}

// An encoder's attention, with an added mask that hides every third key.
std::vector<float> unpaged(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, bool causal) {
  std::srand(2);
  const int64_t batches = 2, wide = heads * dim, narrow = kv_heads * dim;
  std::vector<float> query = numbers(batches * tokens * wide), key = numbers(batches * tokens * narrow);
  std::vector<float> value = numbers(batches * tokens * narrow), out(batches * tokens * wide, NAN), mask = numbers(batches * tokens);
  for (int64_t i = 2; i < batches * tokens; i += 3) mask[i] = -INFINITY;
  AttendAllArgs args{};
  args.query = {query.data(), wide, dim}, args.key = {key.data(), narrow, dim}, args.value = {value.data(), narrow, dim};
  args.out = {out.data(), wide, dim}, args.batches = batches, args.tokens = tokens, args.query_heads = heads;
  args.kv_heads = kv_heads, args.head_dim = dim, args.scale = 1 / std::sqrt(static_cast<float>(dim)), args.causal = causal;
  args.mask = {mask.data(), true, tokens, 0};
  std::atomic<int64_t> next{0};
  attend_all_in_team(args, next);
  return out;
}

// Of INT8 a number that lies between two codes may take either.
int64_t differs(const std::string& isa, const std::string& what, const std::vector<float>& wanted, const std::vector<float>& got,
                double most) {
  double error = 0, size = 0;
  for (size_t i = 0; i < got.size(); ++i) error += std::pow(double(got[i]) - wanted[i], 2), size += std::pow(double(wanted[i]), 2);
  const double off = std::sqrt(error / size);
  if (size > 0 && off <= most) return 0;  // a NaN is neither
  std::printf("%s, %s: relative error %g, at most %g\n", isa.c_str(), what.c_str(), off, most);
  return 1;
}

// Instruction sets that are compared with "scalar".
std::vector<std::string> others() {
  std::vector<std::string> found;
  std::istringstream names(infer_isas());
  for (std::string name; std::getline(names, name, ',');)
    if (name != "scalar") found.push_back(name);
  return found;
}

}  // namespace

int main() {
  std::vector<Case> cases;
  for (const Number cache : {Number::FLOAT32, Number::FLOAT16, Number::BFLOAT16, Number::INT8}) {
    cases.push_back({cache, 4, 2, 64, 16, 0, 0, false, false});
    cases.push_back({cache, 3, 3, 20, 32, 33, 0, true, true});
    cases.push_back({cache, 8, 1, 37, 7, 0, 20, false, true});
    cases.push_back({cache, 4, 2, 64, 16, 0, 0, false, true, Number::BFLOAT16});
    cases.push_back({cache, 3, 1, 37, 32, 33, 0, true, false, Number::BFLOAT16});
  }
  const int64_t encoders[][4] = {{64, 2, 2, 32}, {13, 3, 1, 20}, {200, 2, 1, 64}, {1, 1, 1, 8}};
  int64_t differing = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    infer_set_isa("scalar");
    const std::vector<float> wanted = paged(cases[i]);
    for (const std::string& name : others()) {
      infer_set_isa(name.c_str());
      // A result of bfloat16 may be rounded to its neighbour; by its own products, queries and weights are rounded too.
      const bool codes = cases[i].cache != Number::FLOAT32, tiles = name.rfind("amx", 0) == 0 || name == "avx512_vnni";
      const double most = cases[i].type == Number::BFLOAT16 ? (tiles ? 6e-3 : 1e-3) : codes ? 3e-4 : 2e-6;
      differing += differs(name, "paged case " + std::to_string(i), wanted, paged(cases[i]), most);
    }
  }
  for (const auto& [tokens, heads, kv_heads, dim] : encoders)
    for (const bool causal : {false, true}) {
      infer_set_isa("scalar");
      const std::vector<float> wanted = unpaged(tokens, heads, kv_heads, dim, causal);
      for (const std::string& name : others()) {
        infer_set_isa(name.c_str());
        const std::string what = "encoder of " + std::to_string(tokens) + (causal ? " tokens, causal" : " tokens");
        differing += differs(name, what, wanted, unpaged(tokens, heads, kv_heads, dim, causal), 2e-6);
      }
    }
  std::printf("checked %s\n", infer_isas());
  return differing != 0 || others().empty();
}
