// Every instruction set of the CPU (or of the emulator) against plain C++: prints what differs, exits 1 when anything does.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "linear/groupwise_weight.h"

using namespace infer_native;

namespace {

float number() { return static_cast<float>(std::rand() % 20001 - 10000) / 777; }

struct Case {
  int64_t rows, columns, m;
  std::vector<float> x, multiplier, scale, bias;
  std::vector<int8_t> codes, group_scale;  // a scale for each 16 columns; of 64 they have the first ones
  std::vector<uint8_t> stream;

  Case(int64_t rows, int64_t columns, int64_t m)
      : rows(rows), columns(columns), m(m), x(m * columns), multiplier(columns), scale(rows), bias(rows), codes(rows * columns),
        group_scale(rows * columns / GROUP * FINE_SCALES), stream(rows * columns / 2) {
    for (float& v : x) v = number();
    for (float& v : multiplier) v = 0.1f + std::fabs(number());
    for (float& v : scale) v = 0.1f + std::fabs(number());
    for (float& v : bias) v = number();
    for (int8_t& v : codes) v = static_cast<int8_t>(std::rand() % 255 - 127);
    for (int8_t& v : group_scale) v = static_cast<int8_t>(std::rand() % 255 - 127);
    for (uint8_t& v : stream) v = static_cast<uint8_t>(std::rand());
    if (m > 5) x[5 * columns + columns / 2] = NAN;
    if (m > 8) x[8 * columns] = INFINITY;
  }

  // Dynamic, static, weight-only and balanced int8, then lut4 with one and with four scales to a group where whole
  // groups allow it, one after the other.
  std::vector<float> run() const {
    const int64_t blocks = packed_blocks(rows), quads = (columns + 3) / 4, groups = columns / GROUP;
    std::vector<float> y(6 * m * rows), block_scale(blocks * 16);
    std::vector<int8_t> packed(blocks * quads * 64);
    std::vector<int32_t> row_sum(blocks * 16);
    pack_int8(codes.data(), scale.data(), rows, columns, packed.data(), block_scale.data(), row_sum.data());
    const Int8Weight weight{packed.data(), block_scale.data(), rows, columns, row_sum.data()};
    const float step = 0.05f;
    linear_int8(x.data(), m, weight, {}, bias.data(), y.data());
    linear_int8(x.data(), m, weight, {&step}, nullptr, y.data() + m * rows);
    linear_int8_weight(x.data(), m, weight, bias.data(), y.data() + 2 * m * rows);
    linear_int8(x.data(), m, weight, {nullptr, multiplier.data()}, bias.data(), y.data() + 3 * m * rows);
    for (int64_t scales = 1, place = 4; columns % GROUP == 0 && scales <= FINE_SCALES; scales += 3, ++place) {
      float table[16];
      for (int i = 0; i < 16; ++i) table[i] = (i - 7.3f) / 9;
      std::vector<uint8_t> lut(blocks * groups * 512);
      std::vector<int8_t> lut_scale(blocks * groups * scales * 16), lut_table(blocks * 16);
      std::vector<float> row_scale(blocks * 16);
      pack_lut4(stream.data(), 4, table, 1, group_scale.data(), scale.data(), rows, columns, scales, lut.data(),
                lut_scale.data(), lut_table.data(), row_scale.data());
      linear_lut4(x.data(), m, {lut.data(), lut_scale.data(), lut_table.data(), row_scale.data(), rows, columns, scales},
                  bias.data(), y.data() + place * m * rows);
    }
    return y;
  }
};

// A form of groupwise codes; 4 bits without a zero point are indices into a table.
struct Form {
  int64_t group, bits, zero;
  bool minimum, packed_scales;

  int64_t layout() const {
    const int64_t integers = bits == 8 || zero < 0 ? 0 : bits << 39 | zero << 42;
    const int64_t type = static_cast<int64_t>(packed_scales ? ScaleType::INT6 : ScaleType::FLOAT32) << 33;
    return group + (bits == 8 ? int64_t{1} << 32 : 0) + type + (static_cast<int64_t>(minimum) << 36) + integers;
  }
};

constexpr Form FORMS[] = {{16, 4, -1, false, false}, {32, 4, -1, true, false}, {64, 4, -1, false, false}, {32, 4, 8, false, false},
                          {64, 4, 7, true, false},   {16, 4, 0, true, false},  {32, 4, 0, true, true},    {32, 5, 0, true, true},
                          {32, 5, 16, false, false}, {16, 6, 32, false, false}, {32, 8, 0, false, false}};

// Returns records of 16 rows: factors and super-scales of 1, floats or bytes as scales and minima.
std::vector<float> records(const Form& form, int64_t blocks, int64_t columns) {
  const GroupwiseLayout place(form.layout(), columns);
  std::vector<float> record(blocks * place.record_bytes / 4, 1.0f);
  for (int64_t b = 0; b < blocks; ++b) {
    float* const here = record.data() + b * place.record_bytes / 4;
    for (int64_t i = place.scale / 4; i < place.record_bytes / 4; ++i) here[i] = 0.01f * static_cast<float>(i % 23);
    if (!form.packed_scales) continue;
    char* const bytes = reinterpret_cast<char*>(here);
    for (int64_t i = place.scale; i < place.record_bytes; ++i) bytes[i] = static_cast<char>(i * 37 % 251);
  }
  return record;
}

// Computes with codes of every form.
std::vector<float> groupwise(const Case& given) {
  const int64_t rows = given.rows, columns = given.columns, m = given.m, blocks = packed_blocks(rows);
  std::vector<float> y, ones(rows, 1.0f), unused(blocks * 16);
  float table[16];
  for (int i = 0; i < 16; ++i) table[i] = static_cast<float>(i - 8);
  for (const Form& form : FORMS) {
    if (form.packed_scales && columns % SUPER_COLUMNS != 0) continue;
    const int64_t layout = form.layout();
    if (!known_layout(layout, columns)) std::printf("no layout %ld\n", static_cast<long>(layout)), std::exit(1);
    std::vector<uint8_t> codes(blocks * columns / GROUP * GroupwiseLayout(layout, columns).group_bytes());
    std::vector<int8_t> scale(blocks * columns / GROUP * 16), entries(blocks * 16);
    if (form.bits == 5 || form.bits == 6)
      pack_planes(given.stream.data(), form.bits, 0, form.bits, rows * 4 / form.bits, columns, codes.data());
    else if (form.bits == 8)
      pack_int8(given.codes.data(), ones.data(), rows, columns, reinterpret_cast<int8_t*>(codes.data()), unused.data());
    else
      pack_lut4(given.stream.data(), 4, table, 1, given.group_scale.data(), ones.data(), rows, columns, 1, codes.data(),
                scale.data(), entries.data(), unused.data());
    const std::vector<float> record = records(form, blocks, columns);
    const GroupwiseWeight weight{codes.data(), reinterpret_cast<const uint8_t*>(record.data()), entries.data(), rows, columns, layout};
    y.resize(y.size() + m * rows);
    linear_groupwise(given.x.data(), m, weight, given.bias.data(), y.data() + y.size() - m * rows);
  }
  return y;
}

bool same(float a, float b) { return std::memcmp(&a, &b, sizeof a) == 0 || (std::isnan(a) && std::isnan(b)); }

}  // namespace

int main() {
  const int64_t cases[][3] = {{1, 64, 4},   {16, 64, 1},    {17, 128, 3},  {5, 3, 11},
                              {33, 130, 7}, {100, 512, 13}, {40, 192, 9}, {64, 1536, 40},
                              {90, 1030, 33}, {17, 2176, 50}, {20, 1088, 300}};
  int64_t differing = 0;
  for (const auto& [rows, columns, m] : cases) {
    const Case given(rows, columns, m);
    infer_set_isa("scalar");
    const std::vector<float> wanted = given.run();
    const bool groups = columns % GROUP == 0;
    const std::vector<float> wanted_groupwise = groups ? groupwise(given) : std::vector<float>();
    std::istringstream names(infer_isas());
    for (std::string name; std::getline(names, name, ',');) {
      if (name == "scalar") continue;
      infer_set_isa(name.c_str());
      const std::vector<float> got = given.run(), found = groups ? groupwise(given) : std::vector<float>();
      for (size_t i = 0; i < found.size(); ++i)
        if (!same(wanted_groupwise[i], found[i])) {
          ++differing;
          std::printf("%s groupwise: value %zu is %g, not %g\n", name.c_str(), i, found[i], wanted_groupwise[i]);
          break;
        }
      for (size_t i = 0; i < got.size(); ++i)
        if (!same(wanted[i], got[i])) {
          ++differing;
          std::printf("%s %ldx%ld, %ld rows: value %zu is %g, not %g\n", name.c_str(), static_cast<long>(rows),
                      static_cast<long>(columns), static_cast<long>(m), i, got[i], wanted[i]);
          break;
        }
    }
  }
  std::printf("checked %s\n", infer_isas());
  return differing != 0 || std::string(infer_isas()) == "scalar";
}
