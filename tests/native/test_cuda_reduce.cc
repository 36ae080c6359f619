/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_cuda_reduce.cc
 * \brief The CUDA kernels that reduce have the bits of the CPU's: all types and kinds, numbers of
 *        ranks and elements, ways to move data, and alignments.
 */
#include "cuda_reductions.h"

namespace tvm_ipc {
namespace kernels {
namespace {

bool Fits(Path path, uint64_t count, uint64_t width, Operation operation, int size) {
  if (path == Path::kPush) return count * width <= PushBytes(size) && operation != kReduceScatter;
  if (path == Path::kPull) return true;
  if (operation == kReduce) return false;
  if (operation == kReduceScatter) return count / size * width <= SliceBytes(size);
  return SliceOf(count, width, size) * width <= SliceBytes(size);
}

/*! \brief Mixed cases one after the other on one team. */
void EveryTypeAndKind(int size) {
  std::vector<Case> cases;
  uint64_t seed = size * 1000;
  const uint64_t counts[] = {0, 1, 5, 17, 64, 333};
  for (const NamedType& type : kTypes) {
    for (uint32_t kind = kSum; kind <= kTreeSum; ++kind) {
      if (FindReduce(type.type, static_cast<ReduceKind>(kind)) == nullptr) continue;
      for (Path path : {Path::kPush, Path::kPushSlices, Path::kPull}) {
        for (Operation operation : {kAllReduce, kReduceScatter, kReduce}) {
          Case one;
          one.type = type;
          one.kind = kind;
          one.path = path;
          one.operation = operation;
          one.seed = ++seed;
          one.count = counts[seed % 6];
          if (operation == kReduceScatter) one.count *= size;
          one.in_place = seed / 3 % 2;
          one.shift = seed / 2 % 3;
          if (kSanitized && seed % (2 * size) != 0) continue;
          if (Fits(path, one.count, type.type.bytes(), operation, size)) cases.push_back(one);
        }
      }
    }
  }
  Members members(size);
  members.Run([&](int place, Stream& stream) {
    for (const Case& one : cases) Reduce(members, place, stream, one);
  });
}

/*! \brief Blocks and threads of all numbers do the same. */
void LaunchesOfAllSizes(int size) {
  Members members(size);
  const Launch launches[] = {{1, 2, 1}, {2, 1, 1}, {3, 1, 1}, {2, 3, 1}, {4, 2, 1}};
  members.Run([&](int place, Stream& stream) {
    uint64_t seed = 7;
    for (const Launch& launch : launches) {
      for (Path path : {Path::kPush, Path::kPushSlices, Path::kPull}) {
        for (uint64_t count : {0, 2, 250}) {
          Case one;
          one.type = kTypes[seed % 4];
          one.path = path;
          one.count = count;
          one.launch = launch;
          one.in_place = seed % 2;
          one.seed = ++seed;
          Reduce(members, place, stream, one);
        }
      }
    }
  });
}

/*! \brief Where the tail was left unwritten by others, and the smallest that is divided. */
void Tails(int size, const NamedType& type, uint64_t count) {
  Members members(size);
  if (kSanitized) count = count % 40000 + 8;
  members.Run([&](int place, Stream& stream) {
    for (Path path : {Path::kPush, Path::kPushSlices, Path::kPull}) {
      if (!Fits(path, count, type.type.bytes(), kAllReduce, size)) continue;
      Case one;
      one.type = type;
      one.count = count;
      one.path = path;
      one.seed = count + size;
      Reduce(members, place, stream, one);
    }
  });
}

/*! \brief As many as fit in a slot, and what is chosen beyond. */
void FullSlots(int size) {
  Members members(size);
  EXPECT(ChooseAllReduce(PushBytes(size) / 4, 4, size, 1) == Path::kPush);
  EXPECT(ChooseAllReduce(PushBytes(size) / 4 + 1, 4, size, 1) == Path::kPull);
  const uint64_t slices = SliceBytes(size) / 16 * 16 * size / 4;
  EXPECT(ChooseAllReduce(slices, 4, size, 2) == Path::kPushSlices);
  EXPECT(ChooseAllReduce(slices + 4, 4, size, 2) == Path::kPull);
  members.Run([&](int place, Stream& stream) {
    for (int round = 0; round < 3; ++round) {
      Case one;
      one.type = kTypes[2];
      one.count = PushBytes(size) / 4;
      one.seed = round;
      Reduce(members, place, stream, one);
      one.path = Path::kPushSlices;
      one.count = slices;
      Reduce(members, place, stream, one);
    }
  });
}

void PartsOfOneRank() {
  Stream stream;
  for (const NamedType& type : kTypes) {
    for (uint32_t kind = kSum; kind <= kTreeSum; ++kind) {
      if (FindReduce(type.type, static_cast<ReduceKind>(kind)) == nullptr) continue;
      for (int size : {1, 2, 5, 16}) {
        Case one;
        one.type = type;
        one.kind = kind;
        one.count = 77;
        one.seed = size * 10 + kind;
        const size_t width = type.type.bytes();
        std::vector<std::vector<uint8_t>> parts(size, std::vector<uint8_t>(100 * width));
        PartsArgs args{};
        args.size = size;
        args.kind = kind;
        args.count = one.count;
        for (int i = 0; i < size; ++i) {
          uint8_t* part = parts[i].data() + i % 3 * width;
          Fill(part, one.count, type, one.seed * 64 + i);
          args.parts[i] = part;
        }
        args.recv = const_cast<void*>(args.parts[size / 2]);
        stream.Launch(std::string("tvm_ipc_parts_") + type.name, args, {2, 2, 1});
        EXPECT(std::memcmp(args.recv, Expected(one, size).data(), one.count * width) == 0,
               one.Text(), ", ", size, " parts");
      }
    }
  }
}

}  // namespace
}  // namespace kernels
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc::kernels;  // NOLINT
  for (int size : {1, 2, 3, 4, 5, 7, 8, 16}) {
    if (!kSanitized || size == 3 || size == 8) EveryTypeAndKind(size);
  }
  for (int size : {2, 3, 8}) LaunchesOfAllSizes(size);
  Tails(4, kTypes[0], 2880 * 402);
  Tails(8, kTypes[1], 7168 * 149);
  Tails(8, kTypes[0], 5120 * 205);
  Tails(8, kTypes[2], 36);
  for (int size : {2, 5, 16}) FullSlots(size);
  PartsOfOneRank();
  std::printf("ok\n");
}
