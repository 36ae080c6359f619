/* SPDX-License-Identifier: Apache-2.0 */
/*! \file map_peer_regions.cc */
#include "cuda/map_peer_regions.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <utility>

#include "core/handle_allgather_via_session_server.h"
#include "core/rank_runtime_state.h"

namespace tvm_ipc::cuda {

namespace {

/*! \brief The number of bytes that each rank writes into each region as a test. */
constexpr size_t kProbeBytes = 64 << 10;

/*! \brief A heap in an arena, whose memory lives as long as the heap. */
class MemoryHeap final : public Heap {
 public:
  MemoryHeap(std::shared_ptr<Memory> memory, size_t start)
      : memory_(std::move(memory)),
        // The arena does not grow: device memory is always backed by pages.
        arena_(std::make_shared<Arena>(
            memory_->bytes() - start, [](size_t, size_t) { return true; }, [](size_t, size_t) {})),
        inner_(arena_, Pointer<uint8_t>(memory_->base() + start)) {}

  void* Allocate(size_t bytes) final { return inner_.Allocate(bytes); }
  void Free(void* data, size_t bytes) final { inner_.Free(data, bytes); }
  void Trim() final {}
  ArenaStats stats() const final { return inner_.stats(); }
  int64_t Offset(const void* data) const final { return inner_.Offset(data); }

 private:
  std::shared_ptr<Memory> memory_;
  std::shared_ptr<Arena> arena_;
  ArenaHeap inner_;
};

/*! \brief What every rank sends after a step: whether it succeeded, and the rank's limits. */
struct Word {
  uint32_t good = 0;
  kernels::Limits limits{0, 0};
};

}  // namespace

/*! \brief The search for the best sharing mode that works for all ranks, from the best one down. */
class RegionMapper {
 public:
  RegionMapper(Rank& rank, const std::shared_ptr<Device>& device,
               const std::shared_ptr<const Kernels>& kernels, size_t arena_bytes,
               kernels::Limits* limits)
      : rank_(rank),
        device_(device),
        kernels_(kernels),
        arena_bytes_(std::max(WholePages(arena_bytes), kLeastArena)),
        limits_(limits),
        stream_(device) {}

  std::unique_ptr<Regions> Map() {
    std::ostringstream reasons;
    for (const SharingMode mode : {SharingMode::kFiles, SharingMode::kLegacy, SharingMode::kHost}) {
      std::string why;
      std::unique_ptr<Regions> regions = Try(mode, &why);
      if (regions != nullptr) {
        regions->reasons_ = reasons.str();
        return regions;
      }
      reasons << NameOf(mode) << ": " << why << '\n';
    }
    throw CannotConnect(Text("there is no memory that all ranks of the session can map:\n",
                             reasons.str(), "the backend nccl needs none"));
  }

 private:
  std::unique_ptr<Regions> Try(SharingMode mode, std::string* why) {
    std::unique_ptr<Regions> regions(new Regions());
    regions->mode_ = mode;
    regions->me_ = rank_.id();
    const std::string name = Text("the cuda backend's memory (", NameOf(mode), ")");
    std::vector<Exported> all;
    if (!Agree(name + ": made", why, [&] { return MakeOwn(mode, *regions); }, &all)) return nullptr;
    if (!Agree(name + ": mapped", why, [&] { return MapAll(mode, *regions, std::move(all)); })) {
      return nullptr;
    }
    if (!Agree(name + ": written", why, [&] { return WritePatterns(*regions); })) return nullptr;
    if (!Agree(name + ": read", why, [&] { return CheckPatterns(*regions); })) return nullptr;
    return regions;
  }

  /*!
   * \brief Run a step and exchange its result with all ranks. Return whether it succeeded on all.
   * \param why Receives the error of the first rank on which it failed.
   */
  template <typename Step>
  bool Agree(const std::string& name, std::string* why, const Step& step,
             std::vector<Exported>* exposed = nullptr) {
    Exported mine;
    Word word;
    std::string reason;
    try {
      mine = step();
      word.good = 1;
    } catch (const Error& error) {
      // The next sharing mode would run out of memory, too.
      if (error.kind() == std::string(kind::kMemory)) throw;
      reason = error.what();
    }
    word.limits = *limits_;
    Exported sent{AsBytes(word) + (word.good ? mine.bytes : reason), std::move(mine.files)};
    std::vector<Exported> all = AllGatherHandles(rank_, name, std::move(sent));
    bool good = true;
    for (size_t r = 0; r < all.size(); ++r) {
      Word theirs;
      memcpy(&theirs, all[r].bytes.data(), sizeof(theirs));
      limits_->blocks = std::min(limits_->blocks, theirs.limits.blocks);
      limits_->threads = std::min(limits_->threads, theirs.limits.threads);
      all[r].bytes.erase(0, sizeof(theirs));
      if (!theirs.good && good) *why = Text("rank ", r, ": ", all[r].bytes);
      good = good && theirs.good;
    }
    if (exposed != nullptr) *exposed = std::move(all);
    return good;
  }

  Exported MakeOwn(SharingMode mode, Regions& regions) {
    std::shared_ptr<OwnMemory> own =
        Allocate(mode, device_, kArenaStart + arena_bytes_, CountOf(rank_.id()));
    stream_.Zero(own->base(), kArenaStart);
    regions.room_ = std::make_shared<MemoryHeap>(own, kArenaStart);
    regions.heap_ = regions.room_;
    if (mode == SharingMode::kHost) {
      regions.heap_ = std::make_shared<MemoryHeap>(AllocatePlain(device_, arena_bytes_), 0);
    }
    Exported exported = own->Export();
    regions.own_ = std::move(own);
    return exported;
  }

  Exported MapAll(SharingMode mode, Regions& regions, std::vector<Exported> all) {
    for (int r = 0; r < rank_.num_ranks(); ++r) {
      if (r == rank_.id()) {
        regions.bases_.push_back(regions.own_->base());
        continue;
      }
      try {
        regions.mapped_.push_back(Import(mode, device_, std::move(all[r]), CountOf(r)));
      } catch (const Error& error) {
        throw Error(error.kind(), Text("the memory of rank ", r, ": ", error.what()));
      }
      regions.bases_.push_back(regions.mapped_.back()->base());
    }
    return {};
  }

  /*! \brief Return the seed of the pattern that rank `from` writes into the region of `to`. */
  static uint64_t SeedOf(int from, int to) {
    return 1 + static_cast<uint64_t>(from) * kernels::kMaxMembers + static_cast<uint64_t>(to);
  }
  static Address PlaceOf(const Regions& regions, int from, int to) {
    return regions.base(to) + kArenaStart + static_cast<size_t>(from) * kProbeBytes;
  }

  Exported WritePatterns(const Regions& regions) {
    for (int to = 0; to < rank_.num_ranks(); ++to) {
      Launch(kernels_->write_pattern,
             {Pointer<uint64_t>(PlaceOf(regions, rank_.id(), to)), kProbeBytes / sizeof(uint64_t),
              SeedOf(rank_.id(), to), nullptr});
    }
    stream_.Wait();
    return {};
  }

  /*! \brief Check, on this rank, the patterns that all ranks have written into all regions. */
  Exported CheckPatterns(const Regions& regions) {
    const Address counters = regions.base(rank_.id()) + kChannelStart;  // still zero
    const size_t n = static_cast<size_t>(rank_.num_ranks());
    static_assert(kernels::kMaxMembers * sizeof(uint32_t) <= sizeof(kernels::ChannelMemory));
    std::ostringstream wrong;
    for (size_t to = 0; to < n; ++to) {
      std::vector<uint32_t> counts(n);
      for (size_t from = 0; from < n; ++from) {
        const int writer = static_cast<int>(from);
        const int owner = static_cast<int>(to);
        Launch(kernels_->check_pattern,
               {Pointer<uint64_t>(PlaceOf(regions, writer, owner)), kProbeBytes / sizeof(uint64_t),
                SeedOf(writer, owner), Pointer<uint32_t>(counters) + from});
      }
      stream_.Copy(AddressOf(counts.data()), counters, n * sizeof(uint32_t));
      stream_.Zero(counters, n * sizeof(uint32_t));
      for (size_t from = 0; from < n; ++from) {
        if (counts[from] == 0) continue;
        wrong << (wrong.str().empty() ? "" : ", ") << counts[from] << " of "
              << kProbeBytes / sizeof(uint64_t) << " words that rank " << from
              << " wrote into the memory of rank " << to;
      }
    }
    if (!wrong.str().empty()) {
      Fail(kind::kRuntime, "it is mapped, but data does not pass: wrong are ", wrong.str());
    }
    return {};
  }

  void Launch(Kernel kernel, kernels::PatternArgs args) {
    const Here here(*device_);
    void* arguments[] = {&args};
    const unsigned blocks = std::min(limits_->blocks, 8u);
    const unsigned threads = std::min(limits_->threads, 256u);
    device_->driver().cuLaunchKernel("to try memory of ranks", kernel, blocks, 1, 1, threads, 1, 1,
                                     0, stream_.get(), arguments, nullptr);
  }

  std::shared_ptr<std::atomic<int32_t>> CountOf(int rank) {
    return {rank_.segments(), &rank_.control().ranks[rank].mapped};
  }

  Rank& rank_;
  const std::shared_ptr<Device>& device_;
  const std::shared_ptr<const Kernels>& kernels_;
  size_t arena_bytes_;
  kernels::Limits* limits_;
  OwnStream stream_;
};

std::unique_ptr<Regions> Regions::Make(Rank& rank, const std::shared_ptr<Device>& device,
                                       const std::shared_ptr<const Kernels>& kernels,
                                       size_t arena_bytes, kernels::Limits* limits) {
  return RegionMapper(rank, device, kernels, arena_bytes, limits).Map();
}

int64_t Regions::OffsetOf(const void* data, size_t bytes) const {
  const Address start = AddressOf(data);
  const Address base = bases_[me_];
  if (start < base + kArenaStart || start + bytes > base + own_->bytes()) return -1;
  return static_cast<int64_t>(start - base);
}

}  // namespace tvm_ipc::cuda
