/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file select_kernels_by_instruction_set.cc
 * \brief Selection of an instruction set, and of a function in its table.
 */
#include "shm/select_kernels_by_instruction_set.h"

#include <atomic>
#include <vector>

#include "core/error.h"
#include "shm/find_norm_function.h"
#include "shm/reduce_table.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tvm_ipc {
namespace {

#if defined(__x86_64__)
/*! \brief Return whether one 512-bit conversion of float16 takes longer than two 256-bit ones, as
 *         on Zen 4. */
bool ConvertsHalvesBy256() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0 || c != signature_AMD_ecx) return false;
  __get_cpuid(1, &a, &b, &c, &d);
  return ((a >> 8) & 0xf) + ((a >> 20) & 0xff) == 0x19;
}
#endif

/*! \brief Return the tables that this machine can run, the best one last. */
std::vector<ReduceTable> MachineTables() {
  std::vector<ReduceTable> tables{kPortableTable};
#if defined(__x86_64__)
  // __builtin_cpu_supports also checks whether the operating system saves the registers.
  __builtin_cpu_init();
  // Not every compiler accepts "f16c" in __builtin_cpu_supports. F16C uses the registers of AVX.
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
  if (!f16c || !__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return tables;
  tables.push_back(kAvx2Table);
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq")) {
    return tables;
  }
  tables.push_back(kAvx512Table);
  if (__builtin_cpu_supports("avx512bf16")) {
    ReduceTable table = kAvx512Table;
    table.name = "avx512bf16";
    table.rows[kReduceBFloat16] = kAvx512BFloat16Row;
    if (ConvertsHalvesBy256()) table.rows[kReduceFloat16] = kAvx2Table.rows[kReduceFloat16];
    tables.push_back(table);
  }
#endif
  return tables;
}

// Created when the library is loaded, because threads and forked children may use it first.
const std::vector<ReduceTable> machine_tables = MachineTables();

// The tables are constant, so the pointer needs no memory ordering.
std::atomic<const ReduceTable*> current{nullptr};

const ReduceTable* Table() {
  const ReduceTable* table = current.load(std::memory_order_relaxed);
  if (table != nullptr) return table;
  const ReduceTable* best = &machine_tables.back();
  // If another thread was first, keep its table.
  return current.compare_exchange_strong(table, best, std::memory_order_relaxed) ? best : table;
}

// Codes of DLPack.
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6;

/*! \brief Return the ReduceType of an element type, or -1. */
int RowOf(ElementType type) {
  if (type.lanes != 1) return -1;
  switch (type.code << 8 | type.bits) {
    case kFloat << 8 | 16:
      return kReduceFloat16;
    case kBFloat << 8 | 16:
      return kReduceBFloat16;
    case kFloat << 8 | 32:
      return kReduceFloat32;
    case kFloat << 8 | 64:
      return kReduceFloat64;
    case kInt << 8 | 8:
      return kReduceInt8;
    case kUInt << 8 | 8:
      return kReduceUInt8;
    case kInt << 8 | 16:
      return kReduceInt16;
    case kUInt << 8 | 16:
      return kReduceUInt16;
    case kInt << 8 | 32:
      return kReduceInt32;
    case kUInt << 8 | 32:
      return kReduceUInt32;
    case kInt << 8 | 64:
      return kReduceInt64;
    case kUInt << 8 | 64:
      return kReduceUInt64;
    case kBool << 8 | 8:
      return kReduceBool;
    default:
      return -1;
  }
}

}  // namespace

static_assert(kReduceColumns == kNumReduceKinds, "one column for each kind");

ReduceFn FindReduce(ElementType type, ReduceKind kind) {
  int row = RowOf(type);
  int column = static_cast<int>(kind);
  if (row < 0 || column >= kReduceColumns) return nullptr;
  return Table()->rows[row].kinds[column];
}

ReduceFn RequireReduce(const char* operation, ElementType type, ReduceKind kind) {
  if (const ReduceFn reduce = FindReduce(type, kind)) return reduce;
  Fail(kind::kType, operation, ": ", Name(kind), " of ", Name(type),
       " is not supported; cast to a type that is, such as ", SupportedTypeOf(kind));
}

/*! \brief Return the row of a type that can be normalised; throw if it cannot. */
static int NormRowOf(const char* operation, ElementType type) {
  const int row = RowOf(type);
  if (row >= 0 && row < kNumNormTypes) return row;
  Fail(kind::kType, operation, ": ", Name(type),
       " is not normalised; cast to float32, float16 or bfloat16");
}

NormFn RequireNorm(const char* operation, ElementType from, ElementType to) {
  return Table()->norms[NormRowOf(operation, from)].to[NormRowOf(operation, to)];
}

WidenFn RequireWiden(const char* operation, ElementType from) {
  return Table()->norms[NormRowOf(operation, from)].widen;
}

NarrowFn RequireNarrow(const char* operation, ElementType to) {
  return Table()->norms[NormRowOf(operation, to)].narrow;
}

void CopyBytes(void* dst, const void* src, size_t bytes, bool stream) {
  Table()->copy(dst, src, bytes, stream);
}

const char* InstructionSet() { return Table()->name; }

bool UseInstructionSet(const std::string& name) {
  if (name == "auto") {
    current.store(&machine_tables.back(), std::memory_order_relaxed);
    return true;
  }
  for (const ReduceTable& table : machine_tables) {
    if (name != table.name) continue;
    current.store(&table, std::memory_order_relaxed);
    return true;
  }
  return false;
}

}  // namespace tvm_ipc
