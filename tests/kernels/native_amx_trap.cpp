// Runs the tile instructions of AMX on a CPU without them: each is trapped, decoded from its bytes, and done by the twin.
#include <csignal>
#include <cstring>
#include <ucontext.h>

#include "amx/tile_twin.h"
#include "isa.h"

namespace infer_native {
namespace {

constexpr int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                               REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
enum Prefix { NONE, P66, F3, F2 };

// An instruction under a VEX prefix of three bytes.
struct Instruction {
  const uint8_t* at;
  const greg_t* registers;
  int length, opcode, prefix, reg, rm, vector;
  bool memory;
  char* address = nullptr;  // without the index
  int64_t stride = 0;

  Instruction(const uint8_t* code, const greg_t* values) : at(code), registers(values) {
    const bool wide = (at[2] & 0x84) != 0;
    if (at[0] != 0xc4 || (at[1] & 31) != 2 || wide) fail();
    opcode = at[3], prefix = at[2] & 3, vector = ~(at[2] >> 3) & 15;
    reg = at[4] >> 3 & 7, rm = at[4] & 7, memory = at[4] >> 6 != 3, length = 5;
    if (memory) read_address();
  }
  void fail() const { TileTwin::require(false, "an unknown instruction"); }
  int64_t value(int number) const { return registers[REGISTERS[number]]; }

  void read_address() {
    const int mode = at[4] >> 6, high_index = (at[1] & 0x40) ? 0 : 8, high_base = (at[1] & 0x20) ? 0 : 8;
    int base = rm + high_base;
    bool has_base = true;
    if (rm == 4) {
      const int sib = at[length++], index = (sib >> 3 & 7) + high_index;
      base = (sib & 7) + high_base;
      has_base = mode != 0 || (sib & 7) != 5;
      if (index != 4) stride = value(index) << (sib >> 6);
    } else if (mode == 0 && rm == 5) {
      has_base = false;
    }
    int32_t displacement = 0;
    if (mode == 1) displacement = static_cast<int8_t>(at[length++]);
    else if (mode == 2 || !has_base) std::memcpy(&displacement, at + length, 4), length += 4;
    const bool relative = mode == 0 && rm == 5;
    address = reinterpret_cast<char*>((has_base ? value(base) : relative ? reinterpret_cast<int64_t>(at + length) : 0) + displacement);
  }

  void run() const {
    if (opcode == 0x49 && prefix == NONE && memory) return configure();
    if (opcode == 0x49 && prefix == NONE && reg == 0 && rm == 0) return TileTwin::release();
    if (opcode == 0x49 && prefix == F2 && !memory) return TileTwin::zero(reg);
    if (opcode == 0x4b && prefix == F2 && memory) return TileTwin::load(reg, address, stride);
    if (opcode == 0x4b && prefix == F3 && memory) return TileTwin::store(reg, address, stride);
    if (opcode == 0x5e && prefix == F2) return TileTwin::dot_bytes<int8_t, int8_t>(reg, rm, vector);
    if (opcode == 0x5e && prefix == F3) return TileTwin::dot_bytes<int8_t, uint8_t>(reg, rm, vector);
    if (opcode == 0x5e && prefix == P66) return TileTwin::dot_bytes<uint8_t, int8_t>(reg, rm, vector);
    if (opcode == 0x5c && prefix == F3) return TileTwin::dot_bfloat16(reg, rm, vector);
    fail();
  }
  void configure() const {
    TileConfig config;
    std::memcpy(&config, address, sizeof config);
    TileTwin::configure(config);
  }
};

void trapped(int, siginfo_t*, void* context) {
  greg_t* const registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
  const Instruction found(reinterpret_cast<const uint8_t*>(registers[REG_RIP]), registers);
  found.run();
  registers[REG_RIP] += found.length;
}

}  // namespace

// In place of the question to CPU and kernel.
const char* amx_name() {
  static const bool ready = [] {
    struct sigaction action = {};
    action.sa_sigaction = trapped;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    return sigaction(SIGILL, &action, nullptr) == 0;
  }();
  return ready ? "amx" : nullptr;
}

}  // namespace infer_native
