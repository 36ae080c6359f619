/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file backend.h
 * \brief What a backend is: it moves data between the workers of a session. How a session starts,
 *        hears of errors and deaths, and ends is the same for all of them.
 *
 * A backend is a folder, which includes core/ alone, and a line in backends.cc.
 */
#ifndef TVM_IPC_CORE_BACKEND_H_
#define TVM_IPC_CORE_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/control.h"
#include "core/element.h"
#include "core/error.h"
#include "core/file.h"
#include "core/heap.h"
#include "core/machine.h"

namespace tvm_ipc {

class Rank;
class Works;

/*! \brief Contiguous elements. */
struct Buffer {
  void* data = nullptr;
  size_t count = 0;
  ElementType type;

  size_t bytes() const { return count * type.bytes(); }
  uint8_t* begin() const { return static_cast<uint8_t*>(data); }
  bool Overlaps(const Buffer& other) const {
    return begin() < other.begin() + other.bytes() && other.begin() < begin() + bytes();
  }
};

/*!
 * \brief How many elements the members of a team give each other, the same for all of them: number
 *        i * size + j is what i gives to j. None where each gives as many to everyone.
 */
using Parts = std::vector<int64_t>;
/*! \brief By the place of a member, the place of the one it receives from, or -1 for nobody. */
using Sources = std::vector<int64_t>;

/*! \brief How an all-reduce moves its data. Upstream's numbers. */
enum class Strategy : uint8_t { kRing = 0, kOneShot = 1, kTwoShot = 2, kAuto = 3 };

/*! \brief How rows are normalised: over as many elements as there are weights. */
struct Norm {
  const Buffer& weight;
  /*! \brief LayerNorm's; RMSNorm has none. */
  const Buffer* bias;
  double epsilon;
};

/*! \brief A tensor that a rank has shown to a team: see core/shows.h. */
struct Shown {
  TeamId team = kWorld;
  uint32_t number = 0;
  /*! \brief Where and when: a session, its recoveries by then, and the rank. */
  std::shared_ptr<const void> session;
  uint32_t generation = 0;
  int rank = 0;
  Buffer memory;
  /*! \brief What keeps the memory. */
  std::shared_ptr<const void> keep;
  /*! \brief Of which members what they have shown has come over an emulated link, by place. */
  uint64_t arrived = 0;
};

/*! \brief What a peer has shown, as memory of this process. */
struct PeerMemory {
  void* data;
  /*! \brief What keeps it mapped. */
  std::shared_ptr<const void> keep;
};

/*! \brief Bits of the flags of a collective. */
constexpr uint8_t kNoExitBarrier = 1;

/*!
 * \brief A backend's part in one worker. Its end is the end of the worker's part.
 *
 * Every function throws Error and leaves the inputs as they were. Outputs may be half written after
 * an error, and peers may read inputs until they have heard of it, which is an error of theirs.
 * Several threads may be in operations of different teams at once. A root is a place in the team.
 * Parameters have the order that they have in the contract.
 */
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  /*! \brief The memory that programs get as "ipc_memory": peers map it if `peer_memory` is true.
   * Null if there is none. */
  virtual const std::shared_ptr<Heap>& heap() const = 0;
  /*! \brief The name of how ranks reach each other's memory, where there are several ways; and why
   *         it is no better one, a line for each. */
  virtual std::string Way(std::string* why) const { return ""; }

  virtual void AllReduce(const Buffer& send, ReduceKind kind, TeamId team, Strategy strategy,
                         uint8_t flags, const Buffer& recv) = 0;
  /*! \brief recv = the members' sends, in rank order. */
  virtual void AllGather(const Buffer& send, TeamId team, uint8_t flags, const Buffer& recv) = 0;
  /*! \brief recv = the root's send. Others may pass nullptr. */
  virtual void Broadcast(const Buffer* send, int root, TeamId team, uint8_t flags,
                         const Buffer& recv) = 0;
  /*! \brief recv = this member's part of the root's send. */
  virtual void Scatter(const Buffer* send, int root, TeamId team, uint8_t flags,
                       const Buffer& recv) = 0;
  /*! \brief On the root, recv = the members' sends, in rank order. */
  virtual void Gather(const Buffer& send, int root, TeamId team, uint8_t flags,
                      const Buffer* recv) = 0;
  /*! \brief Returns when the buffer may be written again. */
  virtual void Send(const Buffer& send, int receiver) = 0;
  virtual void Receive(const Buffer& recv, int sender) = 0;

  /*! \brief Copy as many bytes as both have, in memory of this worker. */
  virtual void Copy(const Buffer& source, const Buffer& target) = 0;
  /*!
   * \brief Returns when all that was started here is done. Throws what went wrong since, where that
   *        is known only then.
   */
  virtual void Synchronise() = 0;
  /*! \brief Before the controller hears that a command is done: the same, of all that runs still.
   */
  virtual void Settle() {}
  /*!
   * \brief When a program has raised: throw what the device reported before, which left results as
   *        they were. Waits for nothing that runs still.
   */
  virtual void CheckReports() {}
  /*! \brief Before a command: so often the session has recovered. All ranks are told. */
  virtual void Follow(uint32_t generation) {}
  /*! \brief After a command: wait where what others do with its results would not. */
  virtual void Rest() {}
  /*! \brief What does the rank's works, where operations only start on the calling thread's
   *         stream (core/streams.h); null leaves them to a thread, which calls operations that end.
   */
  virtual std::unique_ptr<Works> MakeWorks();
  /*! \brief Write a number, an int64, in the order of what was started here. */
  virtual void WriteNumber(int64_t number, const Buffer& recv) {
    memcpy(recv.data, &number, sizeof(number));
  }

  // Collectives that not every backend has; a call of what it lacks is refused.

  /*! \brief recv = this member's part of what an all-reduce would give. */
  virtual void ReduceScatter(const Buffer& send, ReduceKind kind, TeamId team, uint8_t flags,
                             const Buffer& recv) {
    Lack("reduce_scatter");
  }
  /*! \brief residual_out = residual + what an all-reduce would sum; norm_out = its rows' norms. */
  virtual void AllReduceNorm(const Buffer& send, const Buffer& residual, const Norm& norm,
                             TeamId team, Strategy strategy, uint8_t flags,
                             const Buffer& residual_out, const Buffer& norm_out) {
    Lack("allreduce_norm");
  }
  /*! \brief On the member with this place, recv = what an all-reduce would give. */
  virtual void Reduce(const Buffer& send, ReduceKind kind, int root, TeamId team, uint8_t flags,
                      const Buffer* recv) {
    Lack("reduce");
  }
  /*! \brief Part i of recv = this member's part of member i's send. */
  virtual void AllToAll(const Buffer& send, const Parts& parts, TeamId team, uint8_t flags,
                        const Buffer& recv) {
    Lack("all_to_all");
  }
  /*! \brief recv = the send of the member that this one receives from, or zeros. */
  virtual void Permute(const Buffer& send, const Sources& sources, TeamId team, uint8_t flags,
                       const Buffer& recv) {
    Lack("permute");
  }
  /*!
   * \brief From now on the others of the team may read the tensor, until all of them hide it.
   * \param keep What keeps its memory.
   */
  virtual Shown Show(const Buffer& tensor, TeamId team, std::shared_ptr<const void> keep) {
    Lack("show");
  }
  /*! \brief What the member so many places after this one has shown with the same number. */
  virtual PeerMemory Peer(Shown& shown, int64_t shift) { Lack("peer"); }
  /*! \brief Meet; then nobody reads any of these any more. */
  virtual void Hide(TeamId team, const std::vector<const Shown*>& shown) { Lack("hide"); }
  /*!
   * \brief recv = the reduction of what the members have, in the order of their places.
   * \param parts Of the member so many places before this one: number 0 is this one's.
   */
  virtual void ReduceParts(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                           const Buffer& recv) {
    Lack("reduce_parts");
  }

 private:
  [[noreturn]] static void Lack(const char* operation) {
    Fail(kind::kValue, operation, ": the backend of this session does not have it");
  }
};

/*! \brief What a backend can do. */
struct Capabilities {
  /*! \brief On whose memory it works, by DLPack's number. */
  int32_t device_type;
  /*! \brief Whether it has memory that peers map ("ipc_memory"). */
  bool peer_memory;
  /*! \brief Whether operations only start there, on the calling thread's stream (core/streams.h).
   */
  bool streams = false;
};

/*! \brief A library of others that a backend needs. */
struct LibraryFacts {
  /*! \brief The library's own number; 0 if it cannot be used. */
  int version = 0;
  std::string path;
  std::string reason;
};

/*!
 * \brief What `Backend::Start` throws where the ranks found together that it cannot connect them,
 * so that all of them throw it: they may go on with another backend.
 */
class CannotConnect : public Error {
 public:
  explicit CannotConnect(const std::string& message) : Error(kind::kRuntime, message) {}
};

/*! \brief A line in the table of backends. */
class Backend {
 public:
  virtual ~Backend() = default;
  /*! \brief At most 15 letters; part of the names of its functions. */
  virtual const char* name() const = 0;
  virtual Capabilities capabilities() const = 0;
  /*! \brief In the controller: why it cannot work between workers on these devices, or nothing. */
  virtual std::string Refusal(const std::vector<int>& devices) const { return ""; }
  /*! \brief Where the library is that it loads when it is needed; empty: the system knows. */
  virtual void UseLibrary(const std::string& path) const {}
  /*! \brief What it is, or why it cannot be used. */
  virtual LibraryFacts FactsOfLibrary() const { return {0, "", "it needs none"}; }
  /*!
   * \brief In the controller, before the workers come: the files that each of them is to get.
   *
   * What workers make themselves they show each other later (ExchangeWithAll).
   */
  virtual std::vector<File> Prepare(const Control& control) const = 0;
  /*! \brief Bytes of a rank's arena where nobody says; 0 leaves it to the ranks. */
  virtual size_t DefaultArena(int num_ranks) const { return DefaultArenaBytes(num_ranks); }
  /*! \brief In a worker that has joined: start. */
  virtual std::unique_ptr<Endpoint> Start(Rank& rank) const = 0;
  /*! \brief What it finds here, as JSON; it never throws. */
  virtual std::string Info() const { return "{}"; }
  /*! \brief How ranks on these devices reach each other, tried, as JSON. */
  virtual std::string Probe(const std::vector<int>& devices) const { return "{}"; }
  /*! \brief Whether it can reduce elements of the type. */
  virtual bool Reduces(ElementType type, ReduceKind kind) const = 0;
  /*! \brief What its kernels are compiled for and run on here, the best first. */
  virtual std::vector<std::string> instruction_sets() const = 0;
  virtual std::string instruction_set() const = 0;
  /*! \brief Use one from now on in this process, or "auto"; false if the machine has it not. */
  virtual bool UseInstructionSet(const std::string& name) const = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_BACKEND_H_
