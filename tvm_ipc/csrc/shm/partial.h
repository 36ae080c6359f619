/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file partial.h
 * \brief A reduction in two parts: each group of sources is folded into a partial, and the partials
 *        are finished together. What is rounded is rounded once, at the end.
 */
#ifndef TVM_IPC_SHM_PARTIAL_H_
#define TVM_IPC_SHM_PARTIAL_H_

#include <cstddef>

#include "core/element.h"
#include "shm/reduce.h"

namespace tvm_ipc {

/*!
 * \brief Partials of 16-bit floats are float32; of an average of integers, a wider integer; of
 *        everything else, of the type itself, whose sums and products wrap as the whole would.
 *
 * An average is a sum until it is finished, which divides it once. NaN is as in reduce.h, in each
 * of the two parts. With one group of sources the result has the bits of `ReduceFn`.
 */
class Partial {
 public:
  /*! \brief Throws if there is no such reduction. */
  Partial(const char* operation, ElementType type, ReduceKind kind);

  /*! \brief Bytes of an element of a partial. */
  size_t width() const { return width_; }
  /*! \brief dst = a partial of the sources, in their order. */
  void Fold(void* dst, const void* const* sources, int num_sources, size_t count) const;
  /*! \brief dst = the result of the partials, in their order, of so many sources in all. */
  void Finish(void* dst, const void* const* partials, int num_partials, size_t count,
              int num_sources) const;

 private:
  enum class Way { kSame, kFloat, kWord, kTwoWords };

  void FinishFloats(void* dst, const void* const* partials, int num_partials, size_t count,
                    int num_sources) const;
  void Divide(void* dst, size_t count, int num_sources) const;

  ElementType type_;
  ReduceKind kind_;
  Way way_;
  size_t width_;
  /*! \brief Of the elements of a partial, where these are what the table has. */
  ReduceFn reduce_ = nullptr;
  void (*widen_)(float* dst, const void* src, size_t count) = nullptr;
  void (*narrow_)(void* dst, const float* src, size_t count) = nullptr;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_SHM_PARTIAL_H_
