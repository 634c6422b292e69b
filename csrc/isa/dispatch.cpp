#include "isa/dispatch.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "core/lookups.h"
#include "core/tuning.h"
#include "isa/packers.h"
#include "isa/tables.h"

namespace isthmus {
namespace {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);  // leaves zeros where the leaf does not exist
  return r;
}

constexpr bool bit(uint64_t word, int n) { return (word >> n & 1) != 0; }

// Which register states the operating system saves.
uint64_t saved_states() {
  if (!bit(cpuid(1, 0).c, 27)) return 0;  // OSXSAVE
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Linux gives the 8 KB of tile registers only to processes that ask (since 5.16); threads started later
// inherit it.
bool request_tiles() {
#ifdef ISTHMUS_EMULATE_AMX
  return true;
#else
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  const unsigned d = cpuid(7, 0).d;
  const bool there = (saved_states() & 0x60000) == 0x60000 && bit(d, 22) && bit(d, 24) && bit(d, 25);
  return there && syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;  // BF16 TILE INT8
#endif
}

struct Cpu {
  bool avx2 = false, avx2vnni = false, avx512 = false, avx512bf16 = false, amx = false;
};

Cpu detect() {
  const Registers one = cpuid(1, 0), seven = cpuid(7, 0), seven_1 = cpuid(7, 1);
  const uint64_t states = saved_states();
  const bool ymm = (states & 0x6) == 0x6, zmm = (states & 0xe6) == 0xe6;
  Cpu cpu;
  cpu.avx2 =
      ymm && bit(one.c, 12) && bit(one.c, 29) && bit(seven.b, 5) && bit(seven.b, 8);  // FMA F16C AVX2 BMI2
  cpu.avx2vnni = cpu.avx2 && bit(seven_1.a, 4);
  cpu.avx512 = cpu.avx2 && zmm && bit(seven.b, 16) && bit(seven.b, 17) && bit(seven.b, 30) &&
               bit(seven.b, 31) && bit(seven.c, 11);  // F DQ BW VL VNNI
  cpu.avx512bf16 = cpu.avx512 && bit(seven_1.a, 5);
  cpu.amx = cpu.avx512bf16 && bit(seven.c, 1) && request_tiles();  // AVX512_VBMI
  return cpu;
}

// Rows of x from which AVX-512 takes the GEMM without a matrix unit. Its GEMV's later passes over a strip
// find it in the second cache, while the first one streams. GEMM / GEMV in time, Zen 4, both threads, weights
// from memory, Q4_K / Q6_K / Q8_0: 1.52 / 1.56 / 1.35 at 16 rows, 1.12 / 1.12 / 1.21 at 48; from the second
// cache they cross at 30. AVX2 keeps AMX's switch: 1.08 / 1.07 / 0.89 at 16.
constexpr int kAvx512GemmMinRows = 48;

struct Isa {
  const char* name;
  const KernelTable& (*table)();
  bool runnable;
  int gemm_min_rows;  // see int8_gemm_min_rows()
  bool wide = false;  // has the vectors of permuting_packer
};

constexpr int kIsas = 5;
struct Isas {
  Isa all[kIsas];
  const char* runnable[kIsas];
  int count = 0;

  Isas() : Isas(detect()) {}
  explicit Isas(const Cpu& cpu)
      : all{{"scalar", scalar_table, true, kGemmMinRows},
            {"avx2", avx2_table, cpu.avx2, kGemmMinRows},
            {"avx2vnni", avx2vnni_table, cpu.avx2vnni, kGemmMinRows},
            {"avx512", cpu.avx512bf16 ? avx512bf16_table : avx512_table, cpu.avx512, kAvx512GemmMinRows,
             true},
            {"amx", amx_table, cpu.amx, kGemmMinRows, true}} {
    for (const Isa& isa : all) {
      if (isa.runnable) runnable[count++] = isa.name;
    }
  }
};

const Isas& isas() {
  static const Isas found;
  return found;
}

// The one of that name. Throws as isa_table does.
const Isa& find(const char* name) {
  static const Isa oracle{"scalar-bf16", scalar_bf16_table, true, kGemmMinRows};
  if (std::strcmp(name, oracle.name) == 0) return oracle;
  std::string known;
  for (const Isa& isa : isas().all) {
    if (std::strcmp(isa.name, name) == 0 && isa.runnable) return isa;
    if (std::strcmp(isa.name, name) == 0) {
      throw std::invalid_argument("instruction set " + std::string(name) +
                                  " is not available on this machine; the best one here is " +
                                  isas().runnable[isas().count - 1]);
    }
    known += std::string(known.empty() ? "" : ", ") + isa.name;
  }
  throw std::invalid_argument("unknown instruction set '" + std::string(name) + "', expected one of " +
                              known);
}

const Isa* in_use = nullptr;

const Isa& current() {
  if (in_use == nullptr) in_use = &find(isas().runnable[isas().count - 1]);
  return *in_use;
}

}  // namespace

const char* const* runnable_isas(int* count) {
  *count = isas().count;
  return isas().runnable;
}

const KernelTable& isa_table(const char* name) { return find(name).table(); }

const KernelTable& kernels() { return current().table(); }

void use_isa(const char* name) { in_use = &find(name); }

PackStrip strip_packer(int format) {
  return current().wide && permutes_bytes ? permuting_packer(format) : nullptr;
}

int int8_gemm_min_rows() { return current().gemm_min_rows; }

}  // namespace isthmus
