/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce.cc
 * \brief The choice of an instruction set, and of a function in its table.
 */
#include "shm/reduce.h"

#include <atomic>

#include "shm/reduce_table.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace tvm_ipc {
namespace {

/*! \brief The table by its name, if this machine can run it. */
const ReduceTable* TableFor(const std::string& name) {
#if defined(__x86_64__)
  // The builtin also asks whether the operating system saves the registers.
  __builtin_cpu_init();
  if (name == kAvx512Table.name) {
    bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    return has && TableFor(kAvx2Table.name) != nullptr ? &kAvx512Table : nullptr;
  }
  if (name == kAvx2Table.name) {
    // Not every compiler knows "f16c" in the builtin; its registers are those of AVX.
    unsigned a = 0, b = 0, c = 0, d = 0;
    bool f16c = __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
    return __builtin_cpu_supports("avx2") && f16c ? &kAvx2Table : nullptr;
  }
#endif
  return name == kPortableTable.name ? &kPortableTable : nullptr;
}

const ReduceTable* BestTable() {
  for (const char* name : {"avx512", "avx2"}) {
    if (const ReduceTable* table = TableFor(name)) return table;
  }
  return &kPortableTable;
}

// The tables are constant, so the pointer needs no ordering with anything.
std::atomic<const ReduceTable*> current{nullptr};

const ReduceTable* Table() {
  const ReduceTable* table = current.load(std::memory_order_relaxed);
  if (table != nullptr) return table;
  const ReduceTable* best = BestTable();
  // Unless another thread was first.
  return current.compare_exchange_strong(table, best, std::memory_order_relaxed) ? best : table;
}

// Codes of DLPack.
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kBFloat = 4, kBool = 6;

/*! \brief The ReduceType, or -1. */
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

ReduceFn FindReduce(ElementType type, ReduceKind kind) {
  int row = RowOf(type);
  int column = static_cast<int>(kind);
  if (row < 0 || column >= kNumReduceKinds) return nullptr;
  return Table()->rows[row].kinds[column];
}

void CopyBytes(void* dst, const void* src, size_t bytes, bool stream) {
  Table()->copy(dst, src, bytes, stream);
}

const char* InstructionSet() { return Table()->name; }

bool UseInstructionSet(const std::string& name) {
  const ReduceTable* table = name == "auto" ? BestTable() : TableFor(name);
  if (table == nullptr) return false;
  current.store(table, std::memory_order_relaxed);
  return true;
}

}  // namespace tvm_ipc
