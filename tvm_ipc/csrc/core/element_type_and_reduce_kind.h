/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file element_type_and_reduce_kind.h
 * \brief Element types and reductions.
 */
#ifndef TVM_IPC_CORE_ELEMENT_TYPE_AND_REDUCE_KIND_H_
#define TVM_IPC_CORE_ELEMENT_TYPE_AND_REDUCE_KIND_H_

#include <cstddef>
#include <cstdint>
#include <string>

namespace tvm_ipc {

/*! \brief An element type, with the codes of DLPack. */
struct ElementType {
  uint8_t code = 0;
  uint8_t bits = 0;
  uint16_t lanes = 1;

  size_t bytes() const { return (static_cast<size_t>(bits) * lanes + 7) / 8; }
  bool operator==(const ElementType& o) const {
    return code == o.code && bits == o.bits && lanes == o.lanes;
  }
  bool operator!=(const ElementType& o) const { return !(*this == o); }
};

/*! \brief Return the name that NumPy and TVM use, for example "bfloat16". */
std::string Name(ElementType type);

/*! \brief A reduction; the values of the first five are upstream's. kBand, kBor and kBxor are
 *         bitwise and, or and exclusive or of integers. kTreeSum adds floats as a balanced binary
 *         tree over the ranks; of other types it is kSum. */
enum class ReduceKind : uint8_t {
  kSum = 0,
  kProd = 1,
  kMin = 2,
  kMax = 3,
  kAvg = 4,
  kBand = 5,
  kBor = 6,
  kBxor = 7,
  kTreeSum = 8
};
const char* Name(ReduceKind kind);

constexpr int kNumReduceKinds = 9;

inline bool IsBitwise(ReduceKind kind) {
  return kind >= ReduceKind::kBand && kind <= ReduceKind::kBxor;
}
/*! \brief Return the name of a type that every backend reduces this way, for messages. */
inline const char* SupportedTypeOf(ReduceKind kind) {
  return IsBitwise(kind) ? "int32" : "float32";
}

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_ELEMENT_TYPE_AND_REDUCE_KIND_H_
