/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file emulated_link.h
 * \brief Emulation of a link that is slower than this machine's memory, for experiments.
 */
#ifndef TVM_IPC_CORE_EMULATED_LINK_H_
#define TVM_IPC_CORE_EMULATED_LINK_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>

namespace tvm_ipc {

/*!
 * \brief Delays what a rank receives, as a link with a latency and a bandwidth would.
 *
 * The receiver sleeps meanwhile, so a transfer uses no core. Several threads may receive at the
 * same time, each over its own link.
 */
class EmulatedLink {
 public:
  /*! \brief Set seconds, bytes per second and the maximum additional seconds; all 0 for no link. */
  void Set(double latency, double bandwidth, double jitter);
  bool on() const { return on_.load(std::memory_order_acquire); }
  /*! \brief Wait as long as the transfer of `bytes` takes. */
  void Travel(size_t bytes);
  /*!
   * \brief Wait until bytes that a peer has exposed have arrived.
   *
   * Transfers run in the background, one after the other in the order of these calls. Each begins
   * when its bytes were exposed, or when the previous transfer has left the link.
   * \param exposed The time of exposure, from `Now`.
   */
  void Arrive(size_t bytes, int64_t exposed);

  /*! \brief Return the time in nanoseconds, from a clock that all processes of the machine share.
   */
  static int64_t Now();

 private:
  double Jitter();

  std::atomic<bool> on_{false};
  std::atomic<double> latency_{0};
  std::atomic<double> seconds_per_byte_{0};
  std::atomic<double> jitter_{0};
  std::atomic<uint64_t> drawn_{0};
  std::mutex mutex_;
  /*! \brief The time when the last transfer leaves the link. */
  int64_t free_ = 0;
};

}  // namespace tvm_ipc
#endif  // TVM_IPC_CORE_EMULATED_LINK_H_
