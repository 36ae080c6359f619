/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file exposed_buffers.h
 * \brief Exposed buffers: memory that the ranks of a team read in entry, from when its rank exposes
 *        it until all of them release it together.
 *
 * A rank numbers the buffers that it exposes to a team, from 1 on, and writes number n to its
 * exposure table (shared_memory_layout.h). All ranks of a team expose the same number of buffers in
 * the same order, so number n of one corresponds to number n of the others. A rank that reads a
 * peer's buffer waits until the peer's table has that number. Exposing never waits.
 *
 * Invariant: an entry of the table is written again only after its number was released. A release
 * is a step of the team's barrier in which all ranks agree on the numbers, and a rank that has
 * released a number no longer reads it. So no rank reads an entry, or the memory it names, while
 * either is written again.
 */
#ifndef TVM_IPC_CORE_EXPOSED_BUFFERS_H_
#define TVM_IPC_CORE_EXPOSED_BUFFERS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/shared_memory_layout.h"

namespace tvm_ipc {

class TeamBarrier;
class Rank;
struct ExposedBuffer;

/*! \brief The buffers that one member of a team exposes to the others. */
class ExposedBuffers {
 public:
  explicit ExposedBuffers(TeamBarrier& barrier) : barrier_(barrier) {}

  /*!
   * \brief Let the others read the memory; return its number.
   * \param keep Owns the memory; kept until the number is released.
   * \param start Called with the number before any other rank can see it.
   */
  uint32_t Expose(const ExposedMemory& memory, std::shared_ptr<const void> keep,
                  const std::function<void(uint32_t)>& start = {});
  /*! \brief Wait for the buffer that a member exposes with this number, and return it. Throw if its
   *         type or size differs from this member's. */
  const ExposedMemory& Of(int index, uint32_t number) const;
  /*! \brief Return whether the number is exposed and not yet released. */
  bool IsOpen(uint32_t number) const {
    const uint32_t entry = number % kMaxExposed;
    return (open_ >> entry & 1) != 0 && numbers_[entry] == number;
  }
  /*!
   * \brief Release open numbers: synchronize the team, after which no member reads them.
   * \param synchronized Called after the barrier, before anything is freed.
   * \param deadline The barrier's deadline, if it is not the usual one.
   */
  void Release(std::vector<uint32_t> numbers, const std::function<void()>& synchronized = {},
               std::chrono::nanoseconds deadline = {});

  /*! \brief Forget all buffers: the session has recovered. */
  void Forget();

 private:
  ExposureTable& exposure_table(int index) const;

  TeamBarrier& barrier_;
  uint32_t last_ = 0;
  /*! \brief A bit for each entry of the table: whether it is exposed and not yet released. */
  uint64_t open_ = 0;
  static_assert(kMaxExposed == 64, "a bit for each");
  /*! \brief The number of each entry, and the owner of its memory. */
  uint32_t numbers_[kMaxExposed] = {};
  std::shared_ptr<const void> keep_[kMaxExposed];
};

// Checks of a program's exposed buffers that all backends share.

/*! \brief Throw unless this rank has exposed it since the last recovery and not released it. */
void RequireOpen(const char* operation, const Rank& rank, TeamBarrier& barrier,
                 const ExposedBuffer& exposed);
/*! \brief Return the numbers of buffers to release together; throw if they cannot be. */
std::vector<uint32_t> NumbersToRelease(const Rank& rank, TeamBarrier& barrier, TeamId team,
                                       const std::vector<const ExposedBuffer*>& all);
/*! \brief Return the index of the member `shift` places after this one; wraps in both directions.
 */
int TeamIndexAfter(const TeamBarrier& barrier, int64_t shift);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_EXPOSED_BUFFERS_H_
