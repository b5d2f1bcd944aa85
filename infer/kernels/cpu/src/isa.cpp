// Choice of the instruction set, once per process; `infer_set_isa` changes it for tests.
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "isa.h"
#include "thread_buffer.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace infer_native {

#if defined(__x86_64__)
// Returns whether this is an AMD CPU of family 19h; by CPUID, as compilers before gcc 11 do not know the family's name.
static bool is_amd_family_19h() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (__get_cpuid(0, &eax, &ebx, &ecx, &edx) == 0 || ebx != signature_AMD_ebx || ecx != signature_AMD_ecx || edx != signature_AMD_edx)
    return false;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (eax >> 8 & 0xf) + (eax >> 20 & 0xff) == 0x19;
}

// Zen 4, family 19h with AVX-512: up to 1.6 times the bandwidth of one thread. Zen 5 and Intel's CPUs gain by the prefetch.
const bool hardware_follows_streams = is_amd_family_19h() && __builtin_cpu_supports("avx512f");
#else
const bool hardware_follows_streams = false;
#endif

namespace {

#if defined(__x86_64__)
const Isa& amx(const char* name) {
  static const Isa isa = [&] {
    Isa made = AVX512_VNNI;
    made.name = name, made.base = &AVX512_VNNI;
    made.linear_lut4 = AMX_LINEAR.linear_lut4, made.linear_int8 = AMX_LINEAR.linear_int8;
    made.staged_lut4 = AMX_LINEAR.staged_lut4, made.staged_int8 = AMX_LINEAR.staged_int8;
    return made;
  }();
  return isa;
}

const Isa& avx_vnni() {
  static const Isa isa = [] {
    Isa made = AVX_VNNI;
    made.rows = AVX2.rows;
    return made;
  }();
  return isa;
}
#endif

// Returns the instruction sets of this CPU that were compiled in, best first.
const std::vector<const Isa*>& usable() {
  static const std::vector<const Isa*> isas = [] {
    std::vector<const Isa*> found;
#if defined(__x86_64__)
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (&AVX512_VNNI != nullptr && avx512 && __builtin_cpu_supports("avx512vnni")) {
      const char* name = amx_name();
      const bool real = name != nullptr && std::strcmp(name, "amx") == 0;
      if (real) found.push_back(&amx(name));
      found.push_back(&AVX512_VNNI);
      if (name != nullptr && !real) found.push_back(&amx(name));
    }
    if (&AVX2 != nullptr && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
      if (&AVX_VNNI != nullptr && has_avx_vnni()) found.push_back(&avx_vnni());
      found.push_back(&AVX2);
    }
#elif defined(__aarch64__) && defined(__linux__)
    if (&NEON_DOTPROD != nullptr && (getauxval(AT_HWCAP) & (1UL << 20)) != 0) found.push_back(&NEON_DOTPROD);  // HWCAP_ASIMDDP
#elif defined(__aarch64__)
    if (&NEON_DOTPROD != nullptr) found.push_back(&NEON_DOTPROD);
#endif
    if (&SCALAR != nullptr) found.push_back(&SCALAR);
    return found;
  }();
  return isas;
}

std::atomic<const Isa*>& active() {
  static std::atomic<const Isa*> isa{usable().front()};
  return isa;
}

}  // namespace

const Isa& active_isa() { return *active().load(std::memory_order_relaxed); }

const Isa& vector_isa() {
  const Isa& isa = active_isa();
  return isa.base != nullptr ? *isa.base : isa;
}

void* scratch(int64_t bytes) {
  thread_local ThreadBuffer buffer;
  return buffer.of(bytes);
}

void* scale_scratch(int64_t bytes) {
  thread_local ThreadBuffer buffer;
  return buffer.of(bytes);
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

void linear_groupwise(const float* x, int64_t m, const GroupwiseWeight& weight, const float* bias, float* y) {
  active_isa().linear_groupwise(x, m, weight, bias, y);
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
