/* SPDX-License-Identifier: Apache-2.0 */
/*! \file ragged_rows.cc */
#include "core/ragged_rows.h"

#include "core/error.h"

namespace tvm_ipc {

void CheckSentRows(const Call& call, const int64_t* counts, int size) {
  const auto numbers = call.counts.count / static_cast<size_t>(size);
  uint64_t sum = 0;
  for (size_t i = 0; i < call.counts.count; ++i) {
    // Each is at most the number of rows, so the sum does not overflow.
    if (counts[i] >= 0 && static_cast<uint64_t>(counts[i]) <= call.rows) {
      sum += static_cast<uint64_t>(counts[i]);
      continue;
    }
    Fail(kind::kValue, Name(call.collective), ": a count for worker ", i / numbers, " is ",
         counts[i], "; send has ", call.rows, " rows, and counts are from 0 to that");
  }
  if (sum <= call.rows) return;
  Fail(kind::kValue, Name(call.collective), ": the sum of counts is ", sum, ", and send has ",
       call.rows, " rows; the sum must not be larger");
}

void CheckReceivedRows(const Call& call, const int64_t* counts, int index) {
  const int64_t elements = ElementsOf(call, counts, call.counts.count);
  if (static_cast<size_t>(elements) <= call.recv.count) return;
  const size_t row = call.row;
  Fail(kind::kValue, Name(call.collective), ": worker ", index, " of the team receives ",
       static_cast<size_t>(elements) / row, " rows, and recv has room for ", call.recv.count / row,
       "; pass a larger recv, which is the capacity of the operator");
}

std::vector<int64_t> SplitSizes(const Call& call, const std::vector<int64_t>& counts, int size) {
  const auto members = static_cast<size_t>(size);
  const size_t numbers = call.counts.count / members;
  std::vector<int64_t> sizes(members * members);
  for (size_t i = 0; i < sizes.size(); ++i) {
    sizes[i] = ElementsOf(call, &counts[i * numbers], numbers);
  }
  return sizes;
}

std::vector<int64_t> ReceivedCounts(const Call& call, const std::vector<int64_t>& counts, int size,
                                    int index) {
  const auto members = static_cast<size_t>(size);
  const size_t numbers = call.counts.count / members;
  std::vector<int64_t> received;
  for (size_t sender = 0; sender < members; ++sender) {
    const int64_t* const first =
        &counts[sender * call.counts.count + static_cast<size_t>(index) * numbers];
    received.insert(received.end(), first, first + numbers);
  }
  return received;
}

int64_t ElementsOf(const Call& call, const int64_t* counts, size_t numbers) {
  int64_t rows = 0;
  for (size_t i = 0; i < numbers; ++i) rows += counts[i];
  return rows * static_cast<int64_t>(call.row);
}

size_t RaggedBytesArriving(const Call& call, size_t size, size_t index) {
  const size_t numbers = call.counts.count / size;
  const auto* const counts = static_cast<const int64_t*>(call.recv_counts.data);
  int64_t elements = 0;
  for (size_t sender = 0; sender < size; ++sender) {
    if (sender != index) elements += ElementsOf(call, counts + sender * numbers, numbers);
  }
  const size_t exchanged = (size - 1) * call.counts.bytes();
  return exchanged + static_cast<size_t>(elements) * call.send.type.bytes();
}

}  // namespace tvm_ipc
