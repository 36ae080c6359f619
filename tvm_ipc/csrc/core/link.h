/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file link.h
 * \brief A link that is slower than the memory of this machine, to try programs for one.
 */
#ifndef TVM_IPC_CORE_LINK_H_
#define TVM_IPC_CORE_LINK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace tvm_ipc {

/*!
 * \brief What a rank receives comes late, as over a link with this latency and bandwidth.
 *
 * Whoever receives sleeps meanwhile, so no core is used while data travel. Several threads may
 * receive at once, each over a link of its own.
 */
class EmulatedLink {
 public:
  /*! \brief Seconds and bytes a second; 0 of all is no link. Jitter is the most that comes on top.
   */
  void Set(double latency, double bandwidth, double jitter);
  bool on() const { return on_.load(std::memory_order_acquire); }
  /*! \brief Wait as long as so many bytes take. */
  void Travel(size_t bytes);
  /*!
   * \brief Wait until bytes that a peer has shown are here.
   *
   * They travel on their own, one transfer after the other in the order of these calls: from when
   * they were shown, or from when the one before has left the link.
   * \param shown By `Now`.
   */
  void Arrive(size_t bytes, int64_t shown);

  /*! \brief Nanoseconds, the same in all processes of the machine. */
  static int64_t Now();

 private:
  double Jitter();

  std::atomic<bool> on_{false};
  std::atomic<double> latency_{0};
  std::atomic<double> seconds_per_byte_{0};
  std::atomic<double> jitter_{0};
  std::atomic<uint64_t> drawn_{0};
  std::mutex mutex_;
  /*! \brief When the last transfer that somebody asked for has left the link. */
  int64_t free_ = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_LINK_H_
