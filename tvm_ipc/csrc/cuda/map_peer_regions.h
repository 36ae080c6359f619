/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file map_peer_regions.h
 * \brief The regions of all ranks, as mapped on this rank. They use the best sharing mode that
 *        works between all pairs of ranks, which is tested by writing and reading data.
 */
#ifndef TVM_IPC_CUDA_MAP_PEER_REGIONS_H_
#define TVM_IPC_CUDA_MAP_PEER_REGIONS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/heap_interface.h"
#include "cuda/exportable_memory.h"
#include "cuda/kernels/choose_kernel_and_grid.h"
#include "cuda/modules.h"
#include "cuda/region_layout.h"
#include "driver/owned_streams_and_events.h"

namespace tvm_ipc {
class Rank;
}

namespace tvm_ipc::cuda {

/*! \brief The process and device of a rank, which ranks exchange first. */
struct Identity {
  int32_t pid = 0;
  int32_t ordinal = 0;
  char uuid[48] = {};

  /*! \brief Return whether both ranks are on the same device. */
  bool Shares(const Identity& other) const { return std::string(uuid) == other.uuid; }
};

class Regions {
 public:
  /*!
   * \brief Map the regions of all ranks. This is a collective call; all ranks choose the same
   *        sharing mode.
   * \param limits The limits of this rank, which are replaced by the minimum over all ranks.
   */
  static std::unique_ptr<Regions> Make(Rank& rank, const std::shared_ptr<Device>& device,
                                       const std::shared_ptr<const Kernels>& kernels,
                                       size_t arena_bytes, kernels::Limits* limits);

  SharingMode mode() const { return mode_; }
  /*! \brief Return why no better mode is used: one line for each mode that failed. */
  const std::string& reasons() const { return reasons_; }

  Address base(int rank) const { return bases_[rank]; }
  kernels::TeamSlotMemory* team_slot(int rank, int place) const {
    return Pointer<kernels::TeamSlotMemory>(bases_[rank]) + place;
  }
  kernels::ChannelMemory* channels(int rank) const {
    return Pointer<kernels::ChannelMemory>(bases_[rank] + kChannelStart);
  }
  /*! \brief Return the heap for programs. It is in the region, or in plain device memory if the
   *         region is in host memory. */
  const std::shared_ptr<Heap>& heap() const { return heap_; }
  /*! \brief Return the heap in this rank's own region; it may be the same as heap(). */
  const std::shared_ptr<Heap>& room() const { return room_; }
  /*! \brief Return the offset of [data, data + bytes) in this rank's region, or -1. */
  int64_t OffsetOf(const void* data, size_t bytes) const;

 private:
  Regions() = default;

  SharingMode mode_ = SharingMode::kNone;
  std::string reasons_;
  int me_ = 0;
  std::shared_ptr<OwnMemory> own_;
  std::vector<Address> bases_;
  std::shared_ptr<Heap> heap_;
  std::shared_ptr<Heap> room_;
  /*! \brief Destroyed first: a peer that is being destroyed too waits until no rank maps its
   *         region. */
  std::vector<std::shared_ptr<Memory>> mapped_;

  friend class RegionMapper;
};

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_MAP_PEER_REGIONS_H_
