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

// Codes of 4 bits, of bytes, then in planes of 5 bits, with a float scale for each `group` columns.
std::vector<float> groupwise(const Case& given, int64_t group) {
  const int64_t rows = given.rows, columns = given.columns, m = given.m, blocks = packed_blocks(rows);
  std::vector<float> y(3 * m * rows), ones(rows, 1.0f), unused(blocks * 16);
  float table[16];
  for (int i = 0; i < 16; ++i) table[i] = static_cast<float>(i - 8);
  for (int64_t form = 0; form < 3; ++form) {
    const int64_t layout = group + (form == 1 ? int64_t{1} << 32 : form == 2 ? int64_t{5} << 39 | int64_t{16} << 42 : 0);
    std::vector<uint8_t> codes(blocks * columns / GROUP * GroupwiseLayout(layout, columns).group_bytes());
    std::vector<int8_t> scale(blocks * columns / GROUP * 16), entries(blocks * 16);
    if (form == 2)
      pack_planes(given.stream.data(), 5, 0, 5, rows * 4 / 5, columns, codes.data());
    else if (form == 1)
      pack_int8(given.codes.data(), ones.data(), rows, columns, reinterpret_cast<int8_t*>(codes.data()), unused.data());
    else
      pack_lut4(given.stream.data(), 4, table, 1, given.group_scale.data(), ones.data(), rows, columns, 1, codes.data(),
                scale.data(), entries.data(), unused.data());
    const GroupwiseLayout place(layout, columns);
    std::vector<float> record(blocks * place.record_bytes / 4);
    for (int64_t b = 0; b < blocks; ++b) {
      float* const here = record.data() + b * place.record_bytes / 4;
      for (int64_t i = 0; i < 16; ++i) here[i] = 1;
      for (int64_t i = 0; i < columns / group * 16; ++i) here[place.scale / 4 + i] = 0.01f * static_cast<float>(i % 23);
    }
    const GroupwiseWeight weight{codes.data(), reinterpret_cast<const uint8_t*>(record.data()), entries.data(), rows, columns, layout};
    linear_groupwise(given.x.data(), m, weight, given.bias.data(), y.data() + form * m * rows);
  }
  return y;
}

bool close(float a, float b) { return std::fabs(a - b) <= 1e-5f * (1 + std::fabs(a)) || (std::isnan(a) && std::isnan(b)); }

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
    const std::vector<float> wanted_groupwise = groups ? groupwise(given, 32) : std::vector<float>();
    std::istringstream names(infer_isas());
    for (std::string name; std::getline(names, name, ',');) {
      if (name == "scalar") continue;
      infer_set_isa(name.c_str());
      const std::vector<float> got = given.run(), found = groups ? groupwise(given, 32) : std::vector<float>();
      for (size_t i = 0; i < found.size(); ++i)
        if (!close(wanted_groupwise[i], found[i])) {
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
