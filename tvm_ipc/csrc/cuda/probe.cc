/* SPDX-License-Identifier: Apache-2.0 */
/*! \file probe.cc */
#include "cuda/probe.h"

#include <array>
#include <memory>
#include <sstream>
#include <thread>

#include "core/hub.h"
#include "core/join.h"
#include "core/process.h"
#include "cuda/backend.h"
#include "cuda/endpoint.h"
#include "cuda/info.h"

namespace tvm_ipc::cuda {

namespace {

struct Found {
  Rung rung = Rung::kNone;
  std::string reason;
};

/*! \brief How long a pair may take: a device that is new to the process takes seconds. */
constexpr double kSeconds = 60;

Found Try(int first, int second) {
  const std::array<int, 2> devices = {first, second};
  HubOptions options;
  options.backend = &Cuda();
  options.num_ranks = 2;
  options.timeout_seconds = kSeconds;
  options.arena_bytes = kLeastArena;
  Hub hub(options);
  std::array<Found, 2> found;
  std::array<std::unique_ptr<Rank>, 2> ranks;
  std::array<std::thread, 2> threads;
  for (size_t i = 0; i < 2; ++i) {
    threads[i] = StartThread("a rank that tries a device", [&, i] {
      try {
        const int rank = static_cast<int>(i);
        ranks[i] = Join(Invitation::Unpack(hub.invitation()), Cuda(), rank, 2, 1, devices[i]);
        const auto& endpoint = static_cast<const CudaEndpoint&>(ranks[i]->endpoint());
        found[i] = {endpoint.regions().rung(), endpoint.regions().reasons()};
      } catch (const Error& error) {
        found[i].reason = error.what();
        hub.AbortClosed();  // the other one need not wait
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  // What ends memory waits for those that map it: both at once.
  for (size_t i = 0; i < 2; ++i)
    threads[i] = StartThread("the end of a rank", [&, i] { ranks[i].reset(); });
  for (std::thread& thread : threads) thread.join();
  Found& worse = found[1].rung == Rung::kNone ? found[1] : found[0];
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
  return Text("{\"rung\": ", Quoted(NameOf(found.rung)), ", \"link\": ", Quoted(NameOf(link)),
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
