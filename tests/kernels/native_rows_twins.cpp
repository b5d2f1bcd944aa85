// The row functions between layers of every instruction set of the CPU (or of the emulator) against plain C++, whose sums
// have another order: prints what lies too far away, exits 1 when anything does.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <string>
#include <vector>

#include "isa.h"

using namespace infer_native;

namespace {

float number() { return static_cast<float>(std::rand() % 20001 - 10000) / 7000; }

// What each makes of the same two rows, one result after the other.
std::vector<float> rows() {
  std::srand(7);
  const int64_t width = 2 * MAXIMA_BLOCK + 37;
  const RowKernels& kernels = active_isa().rows;
  std::vector<float> a(width), b(width), found;
  for (auto* values : {&a, &b})
    for (float& v : *values) v = number();
  std::vector<float> y(width, NAN);
  const auto keep = [&] { found.insert(found.end(), y.begin(), y.end()); };
  kernels.rms_norm(a.data(), b.data(), 1.0f, 1e-6f, width, y.data()), keep();
  kernels.layer_norm(a.data(), b.data(), a.data(), 1e-6f, width, y.data()), keep();
  for (const int64_t kind : {SILU, GELU_TANH, GELU_ERF, RELU, SIGMOID, TANH})
    kernels.activate(kind, a.data(), b.data(), width, y.data()), keep();
  kernels.rotate(a.data(), b.data(), a.data(), 62, width, y.data()), keep();
  y.assign(width, 0.0f);
  const bool clean = kernels.block_maxima(a.data(), width, y.data());
  found.push_back(clean), keep();
  found.push_back(kernels.softmax_weights(a.data(), 1.5f, 0.7f, width, y.data())), keep();
  return found;
}

bool near(const std::vector<float>& wanted, const std::vector<float>& got) {
  for (size_t i = 0; i < wanted.size(); ++i)
    if (!(std::fabs(wanted[i] - got[i]) <= 1e-5f * (1 + std::fabs(wanted[i])))) return false;
  return wanted.size() == got.size();
}

}  // namespace

int main() {
  infer_set_isa("scalar");
  const std::vector<float> wanted = rows();
  int differing = 0;
  std::istringstream names(infer_isas());
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "scalar") continue;
    infer_set_isa(name.c_str());
    if (near(wanted, rows())) continue;
    ++differing;
    std::printf("%s: other rows\n", name.c_str());
  }
  return differing != 0 || std::string(infer_isas()) == "scalar";
}
