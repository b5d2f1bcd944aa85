// The instruction set of this CPU, chosen once; `infer_set_isa` changes it for tests.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "isa.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace infer_native {
namespace {

// Best first; the files of other architectures are not compiled.
const std::vector<const Isa*>& usable() {
  static const std::vector<const Isa*> isas = [] {
    std::vector<const Isa*> found;
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&AVX512_VNNI);
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(&AVX2);
#elif defined(__aarch64__) && defined(__linux__)
    if ((getauxval(AT_HWCAP) & (1UL << 20)) != 0) found.push_back(&NEON_DOTPROD);  // HWCAP_ASIMDDP
#elif defined(__aarch64__)
    found.push_back(&NEON_DOTPROD);
#endif
    found.push_back(&SCALAR);
    return found;
  }();
  return isas;
}

std::atomic<const Isa*>& active() {
  static std::atomic<const Isa*> isa{usable().front()};
  return isa;
}

struct Free {
  void operator()(void* pointer) const { std::free(pointer); }
};

}  // namespace

const Isa& active_isa() { return *active().load(std::memory_order_relaxed); }

void* scratch(int64_t bytes) {
  thread_local std::unique_ptr<void, Free> buffer;
  thread_local int64_t size = 0;
  if (bytes > size) {
    buffer.reset();
    size = 0;
    const int64_t wanted = (bytes + bytes / 2 + 4095) / 4096 * 4096;
    buffer.reset(std::aligned_alloc(64, static_cast<size_t>(wanted)));
    if (!buffer) throw std::bad_alloc();
    size = wanted;
  }
  return buffer.get();
}

void linear_lut4(const float* x, int64_t m, const Lut4Weight& weight, const float* bias, float* y) {
  active_isa().linear_lut4(x, m, weight, bias, y);
}

void linear_int8(const float* x, int64_t m, const Int8Weight& weight, InputGrid given, const float* bias, float* y) {
  active_isa().linear_int8(x, m, weight, given, bias, y);
}

void linear_int8_weight(const float* x, int64_t m, const Int8Weight& weight, const float* bias, float* y) {
  active_isa().linear_int8_weight(x, m, weight, bias, y);
}

}  // namespace infer_native

using namespace infer_native;

const char* infer_isa() { return active_isa().name; }

int infer_set_isa(const char* name) {
  for (const Isa* isa : usable())
    if (std::strcmp(isa->name, name) == 0) {
      active().store(isa);
      return 0;
    }
  return 1;
}

const char* infer_isas() {
  static const std::string names = [] {
    std::string joined;
    for (const Isa* isa : usable()) joined += (joined.empty() ? "" : ",") + std::string(isa->name);
    return joined;
  }();
  return names.c_str();
}
