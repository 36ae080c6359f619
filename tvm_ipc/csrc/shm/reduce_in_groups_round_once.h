/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file reduce_in_groups_round_once.h
 * \brief A reduction in two phases: each group of sources is folded into a partial result, then the
 *        partials are combined. Results are rounded once, at the end.
 */
#ifndef TVM_IPC_SHM_REDUCE_IN_GROUPS_ROUND_ONCE_H_
#define TVM_IPC_SHM_REDUCE_IN_GROUPS_ROUND_ONCE_H_

#include <cstddef>

#include "core/element_type_and_reduce_kind.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {

/*!
 * \brief Folds and finishes partial results.
 *
 * Partials of 16-bit floats are float32, and partials of an average of integers are wider integers.
 * All others have the element type, and their sums and products wrap as those of the whole
 * reduction. An average is a sum until `Finish` divides it. Both phases treat NaN as in
 * select_kernels_by_instruction_set.h. With one group of sources the result is bitwise that of
 * `ReduceFn`.
 */
class Partial {
 public:
  /*! \brief Throw if there is no such reduction. */
  Partial(const char* operation, ElementType type, ReduceKind kind);

  /*! \brief Return the bytes of an element of a partial. */
  size_t width() const { return width_; }
  /*! \brief dst = a partial of the sources, in their order. */
  void Fold(void* dst, const void* const* sources, int num_sources, size_t count) const;
  /*! \brief dst = the result of the partials, in their order. `num_sources` counts all sources. */
  void Finish(void* dst, const void* const* partials, int num_partials, size_t count,
              int num_sources) const;

 private:
  enum class Representation { kSame, kFloat, kWord, kTwoWords };

  void FinishFloats(void* dst, const void* const* partials, int num_partials, size_t count,
                    int num_sources) const;
  void Divide(void* dst, size_t count, int num_sources) const;

  ElementType type_;
  ReduceKind kind_;
  Representation representation_;
  size_t width_;
  /*! \brief The kernel for elements of a partial, if the table has one. */
  ReduceFn reduce_ = nullptr;
  void (*widen_)(float* dst, const void* src, size_t count) = nullptr;
  void (*narrow_)(void* dst, const float* src, size_t count) = nullptr;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_REDUCE_IN_GROUPS_ROUND_ONCE_H_
