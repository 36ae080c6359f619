/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file ragged_rows.h
 * \brief The numbers of rows in a ragged all-to-all, which each member knows only of its own input.
 *
 * A member has `Call::counts.count` numbers: the same number of them for each member, in the order
 * of the team. It sends to a member as many rows as the sum of that member's numbers. With more
 * than one number, a sender tells the receiver how its rows are split further, such as among the
 * experts that the receiver has. `Call::recv_counts` has the numbers of each sender for this
 * member.
 */
#ifndef TVM_IPC_CORE_RAGGED_ROWS_H_
#define TVM_IPC_CORE_RAGGED_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/collective_call.h"

namespace tvm_ipc {

/*! \brief The most numbers in the counts of one member: half of a staging buffer. */
constexpr size_t kMaxRaggedCounts = kStageBytes / 2 / sizeof(int64_t);

/*! \brief Throw unless the counts of this member, in host memory, fit its input. */
void CheckSentRows(const Call& call, const int64_t* counts, int size);
/*! \brief Throw unless the rows that a member receives fit its output; its `counts` are those that
 *         it has received, in host memory. */
void CheckReceivedRows(const Call& call, const int64_t* counts, int index);

/*!
 * \brief Return the split sizes (`Call::layout` of an all-to-all) of the counts of all members.
 * \param counts The numbers of all members in host memory, member after member.
 */
std::vector<int64_t> SplitSizes(const Call& call, const std::vector<int64_t>& counts, int size);
/*! \brief Return the numbers of each sender for a member, from the counts of all members. */
std::vector<int64_t> ReceivedCounts(const Call& call, const std::vector<int64_t>& counts, int size,
                                    int index);
/*! \brief Return the sum of some of the numbers, in elements. */
int64_t ElementsOf(const Call& call, const int64_t* counts, size_t numbers);

/*! \brief Return the number of bytes that a member has received from others, counts included. */
size_t RaggedBytesArriving(const Call& call, size_t size, size_t index);

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_RAGGED_ROWS_H_
