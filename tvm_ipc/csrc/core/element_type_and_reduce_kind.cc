/* SPDX-License-Identifier: Apache-2.0 */
/*! \file element_type_and_reduce_kind.cc */
#include "core/element_type_and_reduce_kind.h"

namespace tvm_ipc {

namespace {

// Codes of DLPack.
constexpr uint8_t kInt = 0, kUInt = 1, kFloat = 2, kHandle = 3, kBFloat = 4, kComplex = 5,
                  kBool = 6, kFloat8First = 7;

}  // namespace

std::string Name(ElementType type) {
  // From kFloat8First on, a code names the whole type.
  static const char* const kSmallFloats[] = {
      "float8_e3m4",     "float8_e4m3",   "float8_e4m3b11fnuz", "float8_e4m3fn",
      "float8_e4m3fnuz", "float8_e5m2",   "float8_e5m2fnuz",    "float8_e8m0fnu",
      "float6_e2m3fn",   "float6_e3m2fn", "float4_e2m1fn"};
  constexpr size_t kNumSmallFloats = sizeof(kSmallFloats) / sizeof(kSmallFloats[0]);
  std::string bits = std::to_string(type.bits);
  std::string name;
  if (type.code == kInt) {
    name = "int" + bits;
  } else if (type.code == kUInt) {
    name = "uint" + bits;
  } else if (type.code == kFloat) {
    name = "float" + bits;
  } else if (type.code == kHandle) {
    name = "handle";
  } else if (type.code == kBFloat) {
    name = "bfloat" + bits;
  } else if (type.code == kComplex) {
    name = "complex" + bits;
  } else if (type.code == kBool) {
    name = type.bits == 8 ? "bool" : "bool" + bits;
  } else if (type.code - kFloat8First < static_cast<int>(kNumSmallFloats)) {
    name = kSmallFloats[type.code - kFloat8First];
  } else {
    name = "type of code " + std::to_string(type.code) + " with " + bits + " bits";
  }
  return type.lanes == 1 ? name : name + "x" + std::to_string(type.lanes);
}

const char* Name(ReduceKind kind) {
  switch (kind) {
    case ReduceKind::kSum:
      return "sum";
    case ReduceKind::kProd:
      return "prod";
    case ReduceKind::kMin:
      return "min";
    case ReduceKind::kMax:
      return "max";
    case ReduceKind::kAvg:
      return "avg";
    case ReduceKind::kBand:
      return "band";
    case ReduceKind::kBor:
      return "bor";
    case ReduceKind::kBxor:
      return "bxor";
    case ReduceKind::kTreeSum:
      return "tree_sum";
  }
  return "unknown reduction";
}

}  // namespace tvm_ipc
