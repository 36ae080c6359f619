/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file region.h
 * \brief The regions of all ranks, as this rank maps them: made in the best way that all pairs of
 *        ranks can, which is tried with data.
 */
#ifndef TVM_IPC_CUDA_REGION_H_
#define TVM_IPC_CUDA_REGION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/heap.h"
#include "cuda/kernels/launch.h"
#include "cuda/layout.h"
#include "cuda/memory.h"
#include "cuda/modules.h"
#include "driver/stream.h"

namespace tvm_ipc {
class Rank;
}

namespace tvm_ipc::cuda {

/*! \brief What a rank says of itself before anything else. */
struct Identity {
  int32_t pid = 0;
  int32_t ordinal = 0;
  char uuid[48] = {};

  /*! \brief Whether they are on the same device. */
  bool Shares(const Identity& other) const { return std::string(uuid) == other.uuid; }
};

class Regions {
 public:
  /*!
   * \brief A collective call: all ranks come to the same rung.
   * \param limits This rank's; the least of all from then on.
   */
  static std::unique_ptr<Regions> Make(Rank& rank, const std::shared_ptr<Device>& device,
                                       const std::shared_ptr<const Kernels>& kernels,
                                       size_t arena_bytes, kernels::Limits* limits);

  Rung rung() const { return rung_; }
  /*! \brief Why it is not a better one; a line for each that was tried before. */
  const std::string& reasons() const { return reasons_; }

  Address base(int rank) const { return bases_[rank]; }
  kernels::SeatMemory* seat(int rank, int place) const {
    return Pointer<kernels::SeatMemory>(bases_[rank]) + place;
  }
  kernels::ChannelMemory* channels(int rank) const {
    return Pointer<kernels::ChannelMemory>(bases_[rank] + kChannelStart);
  }
  /*! \brief What programs get: in the region, or plain memory of the device where that is not. */
  const std::shared_ptr<Heap>& heap() const { return heap_; }
  /*! \brief Room in this rank's own region; the same as the heap where that lies there. */
  const std::shared_ptr<Heap>& room() const { return room_; }
  /*! \brief Where [data, data + bytes) lies in this rank's region, or -1. */
  int64_t OffsetOf(const void* data, size_t bytes) const;

 private:
  Regions() = default;

  Rung rung_ = Rung::kNone;
  std::string reasons_;
  int me_ = 0;
  std::shared_ptr<OwnMemory> own_;
  std::vector<Address> bases_;
  std::shared_ptr<Heap> heap_;
  std::shared_ptr<Heap> room_;
  /*! \brief Ends first: peers that end too wait until nobody maps theirs. */
  std::vector<std::shared_ptr<Memory>> mapped_;

  friend class Ladder;
};

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_REGION_H_
