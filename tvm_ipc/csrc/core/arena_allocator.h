/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file arena_allocator.h
 * \brief Allocator of the peer-mapped arena in a rank's segment.
 *
 * It uses best fit, prefers the lowest offset and joins free neighbours. Offsets are a
 * deterministic function of the sequence of calls, so ranks that make the same calls get the same
 * offsets. No collective relies on that: a rank may hold a tensor longer than its peers do, so
 * offsets are sent with each operation.
 *
 * The address range is reserved, and mapped by every peer, at the start. Growing commits pages
 * without notifying peers. A page is committed before an offset in it is returned, and an offset is
 * published (release) after that. So a peer that has seen an offset (acquire) finds pages there.
 */
#ifndef TVM_IPC_CORE_ARENA_ALLOCATOR_H_
#define TVM_IPC_CORE_ARENA_ALLOCATOR_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <utility>

namespace tvm_ipc {

/*! \brief The memory scope of arenas; the name is upstream's. */
constexpr const char* kIpcMemory = "ipc_memory";

struct ArenaStats {
  size_t limit = 0;
  /*! \brief Bytes that are backed by pages. */
  size_t committed = 0;
  size_t in_use = 0;
  size_t peak_in_use = 0;
  size_t largest_free = 0;
  uint64_t allocations = 0;
  uint64_t growths = 0;
};

class Arena {
 public:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kGrowBytes = 2 << 20;

  /*! \brief Allocates pages for [offset, offset + bytes); false when the system has none left. */
  using Commit = std::function<bool(size_t offset, size_t bytes)>;
  /*! \brief Frees the pages of [offset, offset + bytes). */
  using Release = std::function<void(size_t offset, size_t bytes)>;

  Arena(size_t limit, Commit commit, Release release);

  /*! \brief Allocate a block; return its offset. Throw kind::kMemory beyond the limit. */
  size_t Allocate(size_t bytes);
  /*! \brief Free a block; any thread may call this. */
  void Free(size_t offset, size_t bytes);
  /*! \brief Return the unused pages at the end to the system. */
  void Trim();
  ArenaStats stats() const;

 private:
  static size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
  void Grow(size_t bytes);
  void AddFree(size_t offset, size_t bytes);
  void RemoveFree(std::map<size_t, size_t>::iterator block);

  mutable std::mutex mutex_;
  Commit commit_;
  Release release_;
  std::map<size_t, size_t> free_by_offset_;
  std::set<std::pair<size_t, size_t>> free_by_size_;
  ArenaStats stats_;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_ARENA_ALLOCATOR_H_
