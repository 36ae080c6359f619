/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file communication_backend.h
 * \brief The interface of a backend, which moves data between the workers of a session. The core
 *        starts and ends sessions and handles errors and deaths, for all backends alike.
 *
 * A backend is a folder that includes core/ only, and a line in backends.cc.
 */
#ifndef TVM_IPC_CORE_COMMUNICATION_BACKEND_H_
#define TVM_IPC_CORE_COMMUNICATION_BACKEND_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/collective_call.h"
#include "core/element_type_and_reduce_kind.h"
#include "core/error.h"
#include "core/file_descriptor_and_memory_file.h"
#include "core/heap_interface.h"
#include "core/machine_name_and_memory.h"
#include "core/shared_memory_layout.h"

namespace tvm_ipc {

class Rank;
class AsyncQueue;

/*! \brief A tensor that a rank has exposed to a team: see core/exposed_buffers.h. */
struct ExposedBuffer {
  TeamId team = kWorld;
  uint32_t number = 0;
  /*! \brief The session, the recoveries it had at the time, and the rank that exposed it. */
  std::shared_ptr<const void> session;
  uint32_t generation = 0;
  int rank = 0;
  Buffer memory;
  /*! \brief Owns the memory. */
  std::shared_ptr<const void> keep;
  /*! \brief A bit for each team index: whether that member's buffer has crossed an emulated link.
   */
  uint64_t arrived = 0;
};

/*! \brief A buffer that a peer has exposed, mapped into this process. */
struct PeerMemory {
  void* data;
  /*! \brief Keeps it mapped. */
  std::shared_ptr<const void> keep;
};

/*! \brief The number of streams of a rank on which programs can run kernels. */
constexpr int64_t kMaxStreams = 64;

/*!
 * \brief A backend in one worker. Its destructor ends the worker's part.
 *
 * Every function reports failures by throwing Error, and never modifies its inputs. After an error
 * outputs may be partly written, and peers may read inputs until the error reaches them. Several
 * threads may run operations of different teams at the same time.
 */
class Endpoint {
 public:
  virtual ~Endpoint() = default;

  /*! \brief Return the memory that programs get as "ipc_memory"; null if there is none. Peers map
   *         it if `Capabilities::peer_memory` is true. */
  virtual const std::shared_ptr<Heap>& heap() const = 0;
  /*!
   * \brief Return the name of the mode in which ranks map each other's memory; empty if the backend
   *        has only one.
   * \param why Receives one line for each better mode: why it cannot be used.
   */
  virtual std::string SharingModeName(std::string* why) const { return ""; }

  /*!
   * \brief Run a collective. Check its arguments first (core/check_collective_arguments.h); call
   *        `FailUnsupported` if there is no kernel for it.
   */
  virtual void Run(const Call& call) = 0;
  /*! \brief Return when the buffer may be written again. */
  virtual void Send(const Buffer& send, int receiver) = 0;
  virtual void Receive(const Buffer& recv, int sender) = 0;

  /*! \brief Copy within this worker's memory, as many bytes as the smaller buffer has. */
  virtual void Copy(const Buffer& source, const Buffer& target) = 0;
  /*!
   * \brief Return when everything that the calling thread has started is done. Throw errors that
   *        become known only then.
   */
  virtual void Synchronise() = 0;
  /*! \brief Like Synchronise, for everything that this worker still runs. Called before a command
   *         is reported as done. */
  virtual void Settle() {}
  /*!
   * \brief Throw the error that the device has already reported, if any. Does not wait.
   *
   * Called after a program has raised: a failed kernel leaves its results unwritten, so the
   * program's own error may only be a consequence.
   */
  virtual void CheckReports() {}
  /*! \brief Adopt the session's generation, the number of recoveries. Called before each command.
   */
  virtual void Follow(uint32_t generation) {}
  /*! \brief Called after each command: wait if other users of its results would not wait
   *         themselves. */
  virtual void FinishCommand() {}
  /*! \brief Make the rank's queue of asynchronous operations. Null, the default, runs them on a
   *         thread; backends whose operations only start on a stream (core/current_stream_hooks.h)
   * need their own queue. */
  virtual std::unique_ptr<AsyncQueue> MakeAsyncQueue();
  /*! \brief Write an int64, ordered after the operations that the calling thread has started. */
  virtual void WriteNumber(int64_t number, const Buffer& recv) {
    memcpy(recv.data, &number, sizeof(number));
  }

  /*! \brief Fill a buffer with zeros, ordered after the operations that the calling thread has
   *         started. */
  virtual void Clear(const Buffer& recv) { memset(recv.data, 0, recv.bytes()); }

  // Optional operations: the default reports that the backend does not support them.

  /*! \brief Send what the calling thread enqueues from now on to a stream of the rank; 0 is the
   *         one on which its program began. */
  virtual void SetStream(int64_t stream) { FailWithoutStreams("set_stream"); }
  /*! \brief Make the calling thread's stream wait for everything on another stream so far. */
  virtual void WaitStream(int64_t stream) { FailWithoutStreams("wait_stream"); }
  /*! \brief Return the calling thread to stream 0, which then waits for all others; return whether
   *         it was on another one. Called after each command. */
  virtual bool LeaveStreams() { return false; }

  /*! \brief Return the number of bytes that this rank's collectives have received from others. */
  virtual uint64_t BytesReceived() const { FailUnsupported("bytes_received"); }

  /*!
   * \brief Let the other members read the tensor until all of them release it.
   * \param keep Owns the tensor's memory.
   */
  virtual ExposedBuffer Expose(const Buffer& tensor, TeamId team,
                               std::shared_ptr<const void> keep) {
    FailUnsupported("expose");
  }
  /*! \brief Return the buffer that corresponds to `exposed` on the member `shift` places after this
   *         one in the team. */
  virtual PeerMemory PeerView(ExposedBuffer& exposed, int64_t shift) {
    FailUnsupported("peer_view");
  }
  /*! \brief Synchronize the team; afterwards no member reads any of these buffers. */
  virtual void Release(TeamId team, const std::vector<const ExposedBuffer*>& exposed) {
    FailUnsupported("release");
  }
  /*!
   * \brief recv = the reduction of one buffer of each member, in team order.
   * \param parts Entry i belongs to the member i places before this one; entry 0 is its own.
   */
  virtual void ReduceSlices(ReduceKind kind, TeamId team, const std::vector<Buffer>& parts,
                            const Buffer& recv) {
    FailUnsupported("reduce_slices");
  }

 protected:
  /*! \brief Return the kernel of a call from a table of all collectives; throw if it has none. */
  template <typename Kernel, size_t count>
  static Kernel KernelOf(const Kernel (&kernels)[count], const Call& call) {
    const Kernel kernel = kernels[static_cast<size_t>(call.collective)];
    if (kernel == nullptr) FailUnsupported(Name(call.collective));
    return kernel;
  }
  [[noreturn]] static void FailWithoutStreams(const char* operation) {
    Fail(kind::kValue, operation,
         ": the workers of this session are on CPUs, which have no streams; compile the program"
         " without compute streams");
  }
  [[noreturn]] static void FailUnsupported(const char* operation) {
    Fail(kind::kValue, operation, ": the backend of this session does not support this operation");
  }
};

/*! \brief The capabilities of a backend. */
struct Capabilities {
  /*! \brief The device whose memory it works on, as a DLPack device type. */
  int32_t device_type;
  /*! \brief Whether peers map its "ipc_memory". */
  bool peer_memory;
  /*! \brief Whether operations are asynchronous, on the calling thread's stream
   * (core/current_stream_hooks.h).
   */
  bool streams = false;
};

/*! \brief A third-party library that a backend needs. */
struct LibraryFacts {
  /*! \brief The library's version number; 0 if it cannot be used, with the reason below. */
  int version = 0;
  std::string path;
  std::string reason;
};

/*!
 * \brief Thrown by `Backend::Start` on all ranks, once they have agreed that the backend cannot
 *        connect them. They may continue with another backend.
 */
class CannotConnect : public Error {
 public:
  explicit CannotConnect(const std::string& message) : Error(kind::kRuntime, message) {}
};

/*! \brief An entry in the table of backends (backends.cc). */
class Backend {
 public:
  virtual ~Backend() = default;
  /*! \brief Return the name, at most 15 letters; part of the names of its packed functions. */
  virtual const char* name() const = 0;
  virtual Capabilities capabilities() const = 0;
  /*! \brief Return why it cannot connect workers on these devices; empty if it can. Called in the
   *         controller. */
  virtual std::string Refusal(const std::vector<int>& devices) const { return ""; }
  /*! \brief Set the path of the library that it loads on first use; empty: the system's search
   *         path. */
  virtual void UseLibrary(const std::string& path) const {}
  /*! \brief Return the version and path of its library, or why it cannot be used. */
  virtual LibraryFacts FactsOfLibrary() const { return {0, "", "it needs none"}; }
  /*!
   * \brief Make the files that every worker gets when it joins. Called in the controller.
   *
   * Workers exchange handles of memory that they make themselves later (AllGatherHandles).
   */
  virtual std::vector<File> Prepare(const Control& control) const = 0;
  /*! \brief Return the default size of a rank's arena in bytes; 0 lets the ranks choose. */
  virtual size_t DefaultArena(int num_ranks) const { return DefaultArenaBytes(num_ranks); }
  /*! \brief Start in a worker that has joined the session. */
  virtual std::unique_ptr<Endpoint> Start(Rank& rank) const = 0;
  /*! \brief Describe the devices and libraries of this machine as JSON. Never throws. */
  virtual std::string Info() const { return "{}"; }
  /*! \brief Test how ranks on these devices can map each other's memory; return JSON. */
  virtual std::string Probe(const std::vector<int>& devices) const { return "{}"; }
  /*! \brief Return whether it can reduce elements of the type. */
  virtual bool Reduces(ElementType type, ReduceKind kind) const = 0;
  /*! \brief Return the instruction sets of its kernels that run on this machine, best first. By
   *         default there is no choice. */
  virtual std::vector<std::string> instruction_sets() const { return {}; }
  virtual std::string instruction_set() const { return ""; }
  /*! \brief Select an instruction set, or "auto", for this process; false if the machine lacks it.
   */
  virtual bool UseInstructionSet(const std::string& name) const { return true; }
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_COMMUNICATION_BACKEND_H_
