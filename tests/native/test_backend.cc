/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_backend.cc
 * \brief The table of backends, and that a session runs one that shares no memory as it runs the
 *        others: here the hub carries all data.
 */
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "backends.h"
#include "core/handle_allgather_via_session_server.h"
#include "expect.h"
#include "ranks.h"

namespace tvm_ipc {
namespace {

/*! \brief Sums floats and gathers bytes between all ranks, and can do nothing else. */
class CourierEndpoint final : public Endpoint {
 public:
  explicit CourierEndpoint(Rank& rank, int* ends) : rank_(rank), ends_(ends) {}
  ~CourierEndpoint() final { ++*ends_; }

  const std::shared_ptr<Heap>& heap() const final { return none_; }
  void Run(const Call& call) final {
    if (call.collective == Collective::kAllReduce) return AllReduce(call.send, call.recv);
    if (call.collective == Collective::kAllGather) return AllGather(call.send, call.recv);
    FailUnsupported(Name(call.collective));
  }
  void Send(const Buffer&, int) final { Refuse(); }
  void Receive(const Buffer&, int) final { Refuse(); }
  void Copy(const Buffer& source, const Buffer& target) final {
    memcpy(target.data, source.data, source.bytes());
  }
  void Synchronise() final {}

 private:
  void AllReduce(const Buffer& send, const Buffer& recv) {
    std::vector<float> sum(send.count);
    for (const std::string& bytes : ExposeAll("allreduce", send)) {
      for (size_t i = 0; i < sum.size(); ++i) {
        float value;
        memcpy(&value, bytes.data() + i * sizeof(value), sizeof(value));
        sum[i] += value;
      }
    }
    memcpy(recv.data, sum.data(), recv.bytes());
  }
  void AllGather(const Buffer& send, const Buffer& recv) {
    size_t at = 0;
    for (const std::string& bytes : ExposeAll("allgather", send)) {
      memcpy(recv.begin() + at, bytes.data(), bytes.size());
      at += bytes.size();
    }
  }
  [[noreturn]] void Refuse() { Fail(kind::kValue, "couriers carry sums only"); }
  std::vector<std::string> ExposeAll(const std::string& what, const Buffer& send) {
    Exported mine;
    mine.bytes.assign(reinterpret_cast<char*>(send.begin()), send.bytes());
    std::vector<std::string> all;
    for (Exported& one : AllGatherHandles(rank_, what, std::move(mine))) {
      all.push_back(std::move(one.bytes));
    }
    return all;
  }

  Rank& rank_;
  int* ends_;
  std::shared_ptr<Heap> none_;
};

class CourierBackend final : public Backend {
 public:
  const char* name() const final { return "courier"; }
  Capabilities capabilities() const final { return {1, false}; }
  std::vector<File> Prepare(const Control&) const final { return {}; }
  std::unique_ptr<Endpoint> Start(Rank& rank) const final {
    return std::make_unique<CourierEndpoint>(rank, &ends[rank.id()]);
  }
  bool Reduces(ElementType type, ReduceKind kind) const final {
    return type == ElementType{2, 32, 1} && kind == ReduceKind::kSum;
  }
  std::vector<std::string> instruction_sets() const final { return {"portable"}; }
  std::string instruction_set() const final { return "portable"; }
  bool UseInstructionSet(const std::string&) const final { return true; }

  mutable int ends[kMaxRanks] = {};
};

void Do(Rank& rank, const Order& order) {
  const int n = rank.num_ranks();
  std::vector<float> mine(1 + order.seed * 97), sum(mine.size());
  for (size_t i = 0; i < mine.size(); ++i) mine[i] = static_cast<float>(rank.id() + i % 7);
  const ElementType type{2, 32, 1};
  const Buffer send{mine.data(), mine.size(), type}, recv{sum.data(), sum.size(), type};
  On(rank).AllReduce(send, ReduceKind::kSum, kWorld, Strategy::kAuto, 0, recv);
  for (size_t i = 0; i < sum.size(); ++i) {
    EXPECT(sum[i] == static_cast<float>(n * (n - 1) / 2 + n * static_cast<int>(i % 7)));
  }
  std::vector<float> all(mine.size() * static_cast<size_t>(n));
  On(rank).AllGather(send, kWorld, 0, Buffer{all.data(), all.size(), type});
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT(all[i] == static_cast<float>(i / mine.size() + i % mine.size() % 7));
  }
  rank.endpoint().Copy(send, recv);
  EXPECT(sum == mine);
  if (order.action == 1) rank.endpoint().Send(send, (rank.id() + 1) % n);
  if (order.action == 2) On(rank).ReduceScatter(send, ReduceKind::kSum, kWorld, 0, recv);
}

/*! \brief Errors come home and a session recovers, whatever moves its data. */
void TestSessionOf(const Backend& backend) {
  SessionServerOptions options;
  options.num_ranks = 3;
  options.timeout_seconds = 60;
  options.arena_bytes = 4 << 20;
  options.backend = &backend;
  Ranks ranks(Ranks::Kind::kThreads, options, 1, Do);
  for (uint64_t seed = 0; seed < 20; ++seed) EXPECT_NO_ERROR(ranks.Round(0, seed));
  if (std::string(backend.name()) == "courier") {
    for (const auto& [action, message] :
         {std::pair(1, "couriers carry sums only"),
          std::pair(
              2, "reduce_scatter: the backend of this session does not support this operation")}) {
      const std::vector<RankReport> reports = ranks.Round(action, 3);
      EXPECT(!reports.empty());
      EXPECT(reports[0].message == message, reports[0].message);
      EXPECT_NO_ERROR(ranks.Round(0, 4));
    }
  }
}

void TestTable() {
  EXPECT(&FindBackend("auto") == Backends().front());
  for (const Backend* backend : Backends()) EXPECT(&FindBackend(backend->name()) == backend);
  const Error error = ErrorOf([] { FindBackend("courier"); });
  EXPECT(error.what() ==
             std::string("there is no backend courier; there are: auto, shm, mpi, cuda, nccl"),
         error.what());
}

}  // namespace
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc;
  TestTable();
  for (const Backend* backend : Backends()) {
    constexpr int32_t kCPU = 1;  // others want a device
    if (backend->capabilities().device_type == kCPU) TestSessionOf(*backend);
  }
  const CourierBackend courier;
  TestSessionOf(courier);
  for (int rank = 0; rank < 3; ++rank) EXPECT(courier.ends[rank] == 1, "a rank's part did not end");
  std::printf("passed\n");
  return 0;
}
