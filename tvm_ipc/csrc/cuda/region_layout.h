/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file region_layout.h
 * \brief The layout of a rank's region, the memory that its peers map:
 *
 *   team slots[kTeamSlots] | channels | arena ......
 *
 * The layout is the same on every rank, except for the size of the arena.
 */
#ifndef TVM_IPC_CUDA_REGION_LAYOUT_H_
#define TVM_IPC_CUDA_REGION_LAYOUT_H_

#include <cstddef>

#include "cuda/kernels/kernel_arguments_and_peer_memory.h"
#include "driver/cuda_driver_api.h"

namespace tvm_ipc::cuda {

/*! \brief The maximum number of teams of a rank, including the world and its group. Each has a team
 *         slot. */
constexpr int kTeamSlots = 16;

constexpr size_t kPage = 2 << 20;
constexpr size_t WholePages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

constexpr size_t kChannelStart = kTeamSlots * sizeof(kernels::TeamSlotMemory);
constexpr size_t kArenaStart = WholePages(kChannelStart + sizeof(kernels::ChannelMemory));
/*! \brief The minimum size of an arena, for the probe and for scratch buffers. */
constexpr size_t kLeastArena = 4 << 20;

template <typename T>
T* Pointer(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT: the driver's addresses are integers
}
template <typename T>
Address AddressOf(T* pointer) {
  return reinterpret_cast<Address>(pointer);
}

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_REGION_LAYOUT_H_
