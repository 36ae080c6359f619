/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file layout.h
 * \brief What lies where in a rank's region, the memory that its peers map:
 *
 *   seats[kSeats] | channels | arena ......
 *
 * The same on every rank, but for how large the arena is.
 */
#ifndef TVM_IPC_CUDA_LAYOUT_H_
#define TVM_IPC_CUDA_LAYOUT_H_

#include <cstddef>

#include "cuda/kernels/interface.h"
#include "driver/driver.h"

namespace tvm_ipc::cuda {

/*! \brief How many teams a rank can be in, the world and its group among them: each has a seat. */
constexpr int kSeats = 16;

constexpr size_t kPage = 2 << 20;
constexpr size_t WholePages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

constexpr size_t kChannelStart = kSeats * sizeof(kernels::SeatMemory);
constexpr size_t kArenaStart = WholePages(kChannelStart + sizeof(kernels::ChannelMemory));
/*! \brief Arenas have this much at least, for the probe and for scratch. */
constexpr size_t kLeastArena = 4 << 20;

template <typename T>
T* Pointer(Address address) {
  return reinterpret_cast<T*>(address);  // NOLINT: the driver has addresses as numbers
}
template <typename T>
Address AddressOf(T* pointer) {
  return reinterpret_cast<Address>(pointer);
}

}  // namespace tvm_ipc::cuda
#endif  // TVM_IPC_CUDA_LAYOUT_H_
