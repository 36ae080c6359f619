/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file shows.h
 * \brief Shows: memory that the ranks of a team read where it lies, from when its rank shows it
 *        until all of them hide it together.
 *
 * A rank numbers what it shows to a team, from 1 on, and writes number n to its board
 * (control.h). All ranks of a team show as much in the same order, so number n of one belongs to
 * number n of the others, and a rank that wants what a peer shows waits until the peer's board has
 * that number. To show waits for nobody.
 *
 * Invariant: a place of the board is written again only when its number was hidden. To hide is a
 * step in which all ranks of the team meet and agree on the numbers, and a rank that has hidden a
 * number does not look at it any more. So nobody looks at a place, or at the memory that is shown
 * there, while either is written again.
 */
#ifndef TVM_IPC_CORE_SHOWS_H_
#define TVM_IPC_CORE_SHOWS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "core/control.h"

namespace tvm_ipc {

class Meeting;
class Rank;
struct Shown;

/*! \brief What one member of a team shows to the others. */
class Shows {
 public:
  explicit Shows(Meeting& meeting) : meeting_(meeting) {}

  /*!
   * \brief From now on the others may read the memory. Returns its number.
   * \param keep What keeps the memory, which is held until the number is hidden.
   * \param start Called with the number before anybody else can know it.
   */
  uint32_t Show(const ShownMemory& memory, std::shared_ptr<const void> keep,
                const std::function<void(uint32_t)>& start = {});
  /*! \brief What a member has shown with this number: waits for it. Throws when they disagree. */
  const ShownMemory& Of(int index, uint32_t number) const;
  /*! \brief Whether the number was shown, and not hidden. */
  bool IsOpen(uint32_t number) const {
    const uint32_t place = number % kMaxShown;
    return (open_ >> place & 1) != 0 && numbers_[place] == number;
  }
  /*!
   * \brief Meet; then nobody reads these any more, which are open.
   * \param met Called when all have met, before anything is let go of.
   * \param deadline For those who meet, where it is not the usual one.
   */
  void Hide(std::vector<uint32_t> numbers, const std::function<void()>& met = {},
            std::chrono::nanoseconds deadline = {});

  /*! \brief The session has recovered: nothing was shown. */
  void Forget();

 private:
  Board& board(int index) const;

  Meeting& meeting_;
  uint32_t last_ = 0;
  /*! \brief A bit for each place of the board: whether it was shown, and not hidden. */
  uint64_t open_ = 0;
  static_assert(kMaxShown == 64, "a bit for each");
  /*! \brief By place: which number is there, and what keeps it. */
  uint32_t numbers_[kMaxShown] = {};
  std::shared_ptr<const void> keep_[kMaxShown];
};

// What every backend asks of what a program shows.

/*! \brief Throw unless the rank has shown it, since the last recovery, and not hidden it. */
void RequireOpen(const char* operation, const Rank& rank, Meeting& meeting, const Shown& shown);
/*! \brief The numbers of what is to be hidden together, each once; throws where it cannot be. */
std::vector<uint32_t> NumbersToHide(const Rank& rank, Meeting& meeting, TeamId team,
                                    const std::vector<const Shown*>& all);
/*! \brief The place of the member so many after this one, either way and round. */
int PlaceAfter(const Meeting& meeting, int64_t shift);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_SHOWS_H_
