/* SPDX-License-Identifier: Apache-2.0 */
/*! \file probe_device_pair_sharing.cc */
#include "cuda/probe_device_pair_sharing.h"

#include <array>
#include <memory>
#include <sstream>
#include <thread>

#include "core/session_server.h"
#include "core/thread_signals.h"
#include "core/worker_handshake.h"
#include "cuda/backend_factory.h"
#include "cuda/cuda_endpoint.h"
#include "cuda/device_support_report.h"

namespace tvm_ipc::cuda {

namespace {

struct Found {
  SharingMode mode = SharingMode::kNone;
  std::string reason;
};

/*! \brief The timeout of a pair. A device takes seconds when the process first uses it. */
constexpr double kSeconds = 60;

Found Try(int first, int second) {
  const std::array<int, 2> devices = {first, second};
  SessionServerOptions options;
  options.backend = &Cuda();
  options.num_ranks = 2;
  options.timeout_seconds = kSeconds;
  options.arena_bytes = kLeastArena;
  SessionServer server(options);
  std::array<Found, 2> found;
  std::array<std::unique_ptr<Rank>, 2> ranks;
  std::array<std::thread, 2> threads;
  for (size_t i = 0; i < 2; ++i) {
    threads[i] = StartThread("a rank that tries a device", [&, i] {
      try {
        const int rank = static_cast<int>(i);
        ranks[i] = Join(Invitation::Unpack(server.invitation()), Cuda(), rank, 2, 1, devices[i]);
        const auto& endpoint = static_cast<const CudaEndpoint&>(ranks[i]->endpoint());
        found[i] = {endpoint.regions().mode(), endpoint.regions().reasons()};
      } catch (const Error& error) {
        found[i].reason = error.what();
        server.AbortClosed();  // end the wait of the other rank
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // Destroy both ranks at the same time: freeing memory waits for the rank that maps it.
  for (size_t i = 0; i < 2; ++i)
    threads[i] = StartThread("the end of a rank", [&, i] { ranks[i].reset(); });
  for (std::thread& thread : threads) thread.join();
  Found& worse = found[1].mode == SharingMode::kNone ? found[1] : found[0];
  while (!worse.reason.empty() && worse.reason.back() == '\n') worse.reason.pop_back();
  return worse;
}

std::string Describe(int first, int second) {
  Found found;
  LinkKind link = LinkKind::kNone;
  try {
    link = LinkBetween(first, second);
    found = Try(first, second);
  } catch (const Error& error) {
    found.reason = error.what();
  }
  return Text("{\"rung\": ", Quoted(NameOf(found.mode)), ", \"link\": ", Quoted(NameOf(link)),
              ", \"reason\": ", Quoted(found.reason), "}");
}

}  // namespace

std::string Probe(const std::vector<int>& devices) {
  std::ostringstream json;
  json << "{\"pairs\": [";
  for (size_t i = 0; i < devices.size(); ++i) {
    json << (i == 0 ? "[" : ", [");
    for (size_t j = 0; j < devices.size(); ++j) {
      json << (j == 0 ? "" : ", ") << Describe(devices[i], devices[j]);
    }
    json << "]";
  }
  json << "]}";
  return json.str();
}

}  // namespace tvm_ipc::cuda
