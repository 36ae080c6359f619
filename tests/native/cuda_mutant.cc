/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_mutant.cc
 * \brief A few operations of each kind by ranks that dawdle, with the mistake whose number is the
 *        first argument: tests/cuda/test_kernel_mutations.py has put all of them into a copy of the
 *        kernels. Ends well only without one.
 */
#include <cstdlib>

/*! \brief Which mistake is made; 0: none. */
inline int mutant = 0;

#define TVM_IPC_KERNEL_DEVICE "../../../../tests/native/cuda_cpu_device.h"
#include "cuda/kernels/messages_exposure_probe_device_code.h"  // NOLINT
#include "cuda/kernels/reduce_large_inputs_by_pull.h"          // NOLINT
#include "cuda_reductions.h"                                   // NOLINT

namespace tvm_ipc {

ReduceFn FindReduce(ElementType, ReduceKind) {
  return [](void* result, const void* const* sources, int size, size_t count, bool) {
    for (size_t i = 0; i < count; ++i) {
      uint32_t sum = 0;
      for (int k = 0; k < size; ++k) sum += static_cast<const uint32_t*>(sources[k])[i];
      static_cast<uint32_t*>(result)[i] = sum;
    }
  };
}

namespace kernels {

TVM_IPC_KERNEL(tvm_ipc_push_int32, ReduceArgs, Push<Int32>)
TVM_IPC_KERNEL(tvm_ipc_push_slices_int32, ReduceArgs, PushSlices<Int32>)
TVM_IPC_KERNEL(tvm_ipc_pull_int32, ReduceArgs, Pull<Int32>)
TVM_IPC_KERNEL(tvm_ipc_send, MessageArgs, Send)
TVM_IPC_KERNEL(tvm_ipc_receive, MessageArgs, Receive)

namespace {

const NamedType kType = kTypes[8];

void Reductions(int size, Launch launch, int rounds) {
  Members members(size, 5);
  members.Run(
      [&](int place, Stream& stream) {
        for (int round = 1; round <= rounds; ++round) {
          if (Mixed(round * 16 + place) % 4 == 0) usleep(Mixed(round + place) % 2000);
          Case one;
          one.type = kType;
          one.path = static_cast<Path>(1 + round % 3);
          one.operation = round / 3 % 2 == 0        ? kAllReduce
                          : one.path == Path::kPush ? kReduce
                                                    : kReduceScatter;
          one.count = 30 * size;
          one.launch = launch;
          one.seed = round;
          // The same memory again and again: whoever is left reading it reads something else.
          Reduce(members, place, stream, one);
        }
      },
      300);
  members.ExpectNoError();
}

/*! \brief One member does not wait for those who read its input, and leaves it as it is. */
void LeavesEarly(int size) {
  Members members(size, 5);
  members.Run(
      [&](int place, Stream& stream) {
        for (int round = 0; round < 12; ++round) {
          Case one;
          one.type = kType;
          one.path = Path::kPull;
          one.operation = kReduceScatter;
          one.count = 30 * size;
          one.seed = round;
          one.leave_early = place == 0;
          Reduce(members, place, stream, one, 0);
          one.operation = kAllReduce;
          one.leave_early = false;
          Reduce(members, place, stream, one, 1);
        }
      },
      300);
  members.ExpectNoError();
}

/*! \brief Only the root waits for data: others are kept from running ahead by the headers. */
void ReducesToOne(int size) {
  Members members(size, 5);
  members.Run([&](int place, Stream& stream) {
    for (int round = 0; round < 30; ++round) {
      Case one;
      one.type = kType;
      one.operation = kReduce;
      one.count = 30;
      one.seed = 2 * round;
      if (place == 0) usleep(500);
      Reduce(members, place, stream, one);
    }
  });
  members.ExpectNoError();
}

void Messages() {
  Members members(2, 5);
  members.Run(
      [&](int place, Stream& stream) {
        std::vector<uint8_t> data(kLanes * kPacketBytes * 2 + 5);
        MessageArgs args{};
        args.guard = members.GuardOf(place, &members.channels(place).failed);
        args.header.operation = kSend;
        args.send_queue = &members.channels(0).out[1];
        args.receive_queue = &members.channels(1).in[0];
        args.send = args.recv = data.data();
        for (int round = 0; round < 12; ++round) {
          args.bytes = round % 4 == 3 ? data.size() : 1000;
          args.header.count = args.bytes;
          std::memset(data.data(), place == 0 ? round : 0xff, data.size());
          if (place == 1) usleep(1000);
          stream.Launch(place == 0 ? "tvm_ipc_send" : "tvm_ipc_receive", args,
                        {LanesOf(args.bytes), 1, 1});
          for (uint64_t i = 0; i < args.bytes; ++i) EXPECT(data[i] == round, i, " of ", round);
        }
      },
      100);
  members.ExpectNoError();
}

/*! \brief Words of long ago, with the number of an epoch that comes back. */
void Wrap() {
  Members members(2, 5);
  Case large;
  large.type = kType;
  large.count = 4000;
  // One block waits for headers, and of the other one thread for what the small ones wrote.
  large.launch = {2, 2, 1};
  Case small = large;
  small.count = 1;
  uint64_t seed = 0;
  const auto run = [&](uint32_t epoch, const std::vector<Case>& cases, uint32_t late) {
    for (int place = 0; place < 2; ++place) members.team_slot(place).epoch = epoch - 1;
    ++seed;
    members.Run([&](int place, Stream& stream) {
      if (place == 1) usleep(late);
      for (Case one : cases) {
        one.seed = seed;
        Reduce(members, place, stream, one);
      }
    });
  };
  run(10, {large}, 0);
  run((1u << 30) - 1, {small, small, small}, 0);
  run(10, {large}, 50000);
  members.ExpectNoError();
}

}  // namespace
}  // namespace kernels
}  // namespace tvm_ipc

int main(int argc, char** argv) {
  using namespace tvm_ipc::kernels;  // NOLINT
  mutant = argc > 1 ? std::atoi(argv[1]) : 0;
  Reductions(3, {2, 2, 1}, 24);
  Reductions(2, {1, 1, 1}, 24);
  ReducesToOne(3);
  LeavesEarly(3);
  Messages();
  Wrap();
  std::printf("ok\n");
}
