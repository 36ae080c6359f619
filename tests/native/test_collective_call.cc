/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_collective_call.cc
 * \brief What follows from the list of collectives: names, checks of arguments, descriptors, and
 *        how many bytes arrive.
 */
#include <string>
#include <vector>

#include "core/check_collective_arguments.h"
#include "expect.h"

namespace tvm_ipc {
namespace {

constexpr ElementType kFloat{2, 32, 1};
constexpr ElementType kHalf{2, 16, 1};
float memory[64];

Buffer At(size_t first, size_t count, ElementType type = kFloat) {
  return {memory + first, count, type};
}

Call With(Collective collective, const Buffer& send, const Buffer& recv, int root = 0) {
  Call call(collective);
  call.send = send;
  call.recv = recv;
  call.root = root;
  return call;
}

/*! \brief The error of a member of three, without the name of the collective; empty if none. */
std::string ErrorOf(const Call& call, int index) {
  try {
    Check(call, 3, index);
  } catch (const Error& error) {
    const std::string name = Text(Name(call.collective), ": ");
    EXPECT(std::string(error.what()).substr(0, name.size()) == name, error.what());
    return std::string(error.what()).substr(name.size());
  }
  return "";
}

void Refused(const Call& call, int index, const std::string& message) {
  const std::string error = ErrorOf(call, index);
  EXPECT(error.substr(0, message.size()) == message, Name(call.collective), ": ", error);
}

void TestSizes() {
  using C = Collective;
  for (C equal : {C::kAllReduce, C::kReduce, C::kPermute, C::kAllToAll}) {
    Refused(With(equal, At(0, 6), At(6, 7)), 0,
            "send has 6 x float32, recv has 7 x float32; they must be equal");
    Refused(With(equal, At(0, 6), At(6, 6, kHalf)), 0,
            "send has 6 x float32, recv has 6 x float16; they must be equal");
  }
  Refused(With(C::kBroadcast, At(0, 2), At(2, 3)), 0, "send has 2 elements, recv has 3");
  Refused(With(C::kBroadcast, At(0, 2), At(2, 2, kHalf)), 0, "send is float32, recv is float16");
  Refused(With(C::kReduceScatter, At(0, 7), At(8, 2)), 1,
          "send has 7 x float32, recv has 2 x float32; send must have 3 times as many of the same"
          " type");
  Refused(With(C::kScatter, At(0, 7), At(8, 2)), 0,
          "7 elements cannot be divided evenly among 3 workers");
  Refused(With(C::kScatter, At(0, 9), At(9, 2)), 0, "a part of send has 3 elements, recv has 2");
  Refused(With(C::kScatter, At(0, 9), At(9, 3, kHalf)), 0, "send is float32, recv is float16");
  for (C gathers : {C::kAllGather, C::kGather}) {
    Refused(With(gathers, At(0, 2), At(2, 7)), 0, "recv has 7 elements, needed are 3 x 2");
    Refused(With(gathers, At(0, 2), At(2, 6, kHalf)), 0, "send is float32, recv is float16");
  }
}

void TestRoots() {
  using C = Collective;
  for (C rooted : {C::kReduce, C::kBroadcast, C::kScatter, C::kGather}) {
    for (int root : {-1, 3}) {
      Refused(With(rooted, At(0, 2), At(2, 2), root), 0,
              Text("there is no root ", root, " in a team of 3"));
    }
    const bool sends = rooted == C::kBroadcast || rooted == C::kScatter;
    const Call one_sided = sends ? With(rooted, {}, At(0, 2), 1) : With(rooted, At(0, 2), {}, 1);
    Refused(one_sided, 1,
            sends ? "the root has nothing to send" : "the root has nowhere to receive");
    EXPECT(ErrorOf(one_sided, 0).empty(), "other members have one tensor");
  }
}

void TestOverlaps() {
  using C = Collective;
  for (C equal : {C::kAllReduce, C::kReduce, C::kBroadcast}) {
    Refused(With(equal, At(0, 6), At(1, 6)), 0, "send and recv overlap in part");
    EXPECT(ErrorOf(With(equal, At(0, 6), At(0, 6)), 0).empty());
  }
  for (C larger : {C::kReduceScatter, C::kScatter}) {
    Refused(With(larger, At(0, 6), At(3, 2), 1), 1, "send and recv overlap, but not at");
    EXPECT(ErrorOf(With(larger, At(0, 6), At(2, 2), 1), 1).empty());
  }
  for (C larger : {C::kAllGather, C::kGather}) {
    Refused(With(larger, At(3, 2), At(0, 6), 1), 1, "send and recv overlap, but not at");
    EXPECT(ErrorOf(With(larger, At(2, 2), At(0, 6), 1), 1).empty());
  }
  Refused(With(C::kAllToAll, At(0, 6), At(0, 6)), 0, "send and recv overlap, but peers read");
  Refused(With(C::kPermute, At(0, 6), At(0, 6)), 0, "send and recv overlap, but peers read");
}

void TestNumbers() {
  Call permute = With(Collective::kPermute, At(0, 2), At(2, 2));
  Refused(permute, 0, "0 sources for a team of 3");
  const std::vector<int64_t> sources{-1, 0, 3};
  permute.layout = sources;
  Refused(permute, 0, "there is no source 3 in a team of 3");
  Call exchange = With(Collective::kAllToAll, At(0, 7), At(8, 7));
  Refused(exchange, 0, "7 elements cannot be divided evenly among 3 workers");
  const std::vector<int64_t> four(4, 1), parts{0, 1, 2, 0, 0, 3, 1, 1, -1},
      right{0, 1, 2, 0, 0, 3, 1, 1, 0};
  exchange.layout = four;
  Refused(exchange, 0, "there are 4 parts; 3 workers have 9");
  exchange.layout = parts;
  Refused(exchange, 0, "the part of worker 2 for worker 2 has -1 elements");
  exchange.layout = right;
  Refused(exchange, 0, "send has 7 elements and recv 7; by the parts worker 0 gives 3 and takes 1");
  exchange = With(Collective::kAllToAll, At(0, 3), At(8, 1));
  exchange.layout = right;
  EXPECT(ErrorOf(exchange, 0).empty());
  const Descriptor mine = DescriptorOf(exchange, 0);
  EXPECT(mine.count == 8 && mine.layout_hash == HashOf(right), "the count is that of all parts");
}

void TestDescriptors() {
  Call call = With(Collective::kReduce, At(0, 6), {}, 2);
  call.kind = ReduceKind::kMax;
  call.flags = kNoExitBarrier;
  Descriptor mine = DescriptorOf(call, 5);
  EXPECT(mine.op == OpName("reduce") && mine.reduces && mine.kind == ReduceKind::kMax);
  EXPECT(mine.root == 5 && mine.count == 6 && mine.flags == 1 && mine.strategy == -1);
  mine = DescriptorOf(With(Collective::kBroadcast, {}, At(0, 4, kHalf)), 1);
  EXPECT(mine.count == 4 && mine.type == kHalf && !mine.reduces, "what all members know");
  call = With(Collective::kAllReduceLayerNorm, At(0, 6), At(6, 6));
  call.weight = At(12, 3);
  mine = DescriptorOf(call, 1);
  EXPECT(mine.op == OpName("allreduce_layer") && mine.reduces && mine.root == -1);
  EXPECT(mine.strategy == static_cast<int8_t>(Strategy::kAuto) && mine.layout_hash != 0);
}

void TestBytes() {
  using C = Collective;
  const Buffer three = At(0, 3), nine = At(0, 9);
  EXPECT(BytesArriving(With(C::kAllReduce, nine, nine), 3, 0) == 48, "twice two thirds");
  EXPECT(BytesArriving(With(C::kAllReduceRmsNorm, nine, nine), 3, 0) == 48);
  EXPECT(BytesArriving(With(C::kReduceScatter, nine, three), 3, 0) == 24);
  EXPECT(BytesArriving(With(C::kReduce, nine, nine), 3, 0) == 36);
  EXPECT(BytesArriving(With(C::kReduce, nine, {}), 3, 0) == 0, "only the root receives");
  EXPECT(BytesArriving(With(C::kAllToAll, nine, nine), 3, 0) == 24);
  EXPECT(BytesArriving(With(C::kAllGather, three, nine), 3, 0) == 24);
  EXPECT(BytesArriving(With(C::kGather, three, nine), 3, 0) == 24);
  EXPECT(BytesArriving(With(C::kGather, three, {}), 3, 0) == 0);
  EXPECT(BytesArriving(With(C::kBroadcast, {}, nine), 3, 0) == 36);
  EXPECT(BytesArriving(With(C::kScatter, {}, three), 3, 0) == 12);
  EXPECT(BytesArriving(With(C::kPermute, nine, nine), 3, 0) == 36);
  int64_t numbers[6] = {1, 2, 3, 4, 5, 6};  // of two groups from each member
  Call ragged = With(C::kRaggedAllToAll, nine, nine);
  ragged.row = 3;
  ragged.counts = ragged.recv_counts = {numbers, 6, {0, 64, 1}};
  EXPECT(BytesArriving(ragged, 3, 1) == 2 * 48 + (1 + 2 + 5 + 6) * 3 * 4,
         "counts, and rows of others");
}

void TestNames() {
  EXPECT(FindCollective("reduce_scatter") == Collective::kReduceScatter);
  EXPECT(FindCollective("gather_to_worker0") == Collective::kGather);
  EXPECT(!FindCollective("gather_to").has_value());
}

}  // namespace
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc;
  TestSizes();
  TestRoots();
  TestOverlaps();
  TestNumbers();
  TestDescriptors();
  TestBytes();
  TestNames();
  std::printf("passed\n");
  return 0;
}
