// Permission to use the tile registers of AMX, which Linux grants to a process on request; requested once.
#include "amx/tile_config.h"
#include "isa.h"

#if defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace infer_native {
namespace {

#if defined(INFER_AMX_EMULATED)
const char* found() { return "amx_emulated"; }
#elif defined(__linux__) && !defined(INFER_AMX_ABSENT)
bool has_instructions() {
  constexpr unsigned BFLOAT16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25, ALL = BFLOAT16 | TILE | INT8;
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 && (edx & ALL) == ALL;
}

const char* found() {
  constexpr long REQUEST_STATE = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return has_instructions() && syscall(SYS_arch_prctl, REQUEST_STATE, TILE_DATA) == 0 ? "amx" : nullptr;
}
#else
const char* found() { return nullptr; }
#endif

}  // namespace

const char* amx_name() {
  static const char* const name = found();
  return name;
}

}  // namespace infer_native
