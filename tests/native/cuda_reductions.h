/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_reductions.h
 * \brief A reduction by the CUDA kernels, compared bit for bit with what CPUs give.
 */
#ifndef TVM_IPC_TESTS_CUDA_REDUCTIONS_H_
#define TVM_IPC_TESTS_CUDA_REDUCTIONS_H_

#include <algorithm>
#include <string>
#include <vector>

#include "cuda_ranks.h"
#include "shm/select_kernels_by_instruction_set.h"

namespace tvm_ipc {
namespace kernels {

struct NamedType {
  const char* name;
  ElementType type;
};
const NamedType kTypes[] = {
    {"float16", {2, 16, 1}}, {"bfloat16", {4, 16, 1}}, {"float32", {2, 32, 1}},
    {"float64", {2, 64, 1}}, {"int8", {0, 8, 1}},      {"uint8", {1, 8, 1}},
    {"int16", {0, 16, 1}},   {"uint16", {1, 16, 1}},   {"int32", {0, 32, 1}},
    {"uint32", {1, 32, 1}},  {"int64", {0, 64, 1}},    {"uint64", {1, 64, 1}},
    {"bool", {6, 8, 1}},
};

inline uint64_t Mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/*! \brief Elements of any bits; of floats most are of a moderate size, and some are special. */
inline void Fill(uint8_t* data, uint64_t count, const NamedType& type, uint64_t seed) {
  const size_t width = type.type.bytes();
  const bool floating = type.type.code == 2 || type.type.code == 4;
  const int mantissa = type.type.code == 4 ? 7 : width == 2 ? 10 : width == 4 ? 23 : 52;
  const uint64_t sign = 1ull << (8 * width - 1);
  const uint64_t infinity = sign - (1ull << mantissa);
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t bits = Mixed(seed * 1000003 + i);
    const uint64_t choice = Mixed(bits) % 64;
    if (floating && choice >= 8) {
      // Exponents near that of 1.
      const uint64_t one = (infinity >> 1) & ~((1ull << mantissa) - 1);
      bits = (bits & (sign | ((1ull << mantissa) - 1))) |
             (one - (bits >> 60) % 4 * (1ull << mantissa));
    } else if (floating && choice == 0) {
      bits = infinity | (bits & sign) | (bits % 2 << (mantissa - 1));
    } else if (floating && choice == 1) {
      bits &= sign;
    } else if (floating && choice == 2) {
      bits &= sign | ((1ull << mantissa) - 1);
    }
    if (type.type.code == 6) bits = choice < 32 ? 0 : bits;
    std::memcpy(data + i * width, &bits, width);
  }
}

/*! \brief One reduction, as all members know it. */
struct Case {
  NamedType type;
  uint32_t kind = kSum;
  uint64_t count = 0;
  /*! \brief By which kernel. */
  Path path = Path::kPush;
  Operation operation = kAllReduce;
  bool in_place = false;
  /*! \brief Elements by which tensors begin later than 16-byte aligned; different on each rank. */
  uint32_t shift = 0;
  Launch launch{1, 1, 1};
  uint64_t seed = 0;
  /*! \brief Whether members may be left reading the input; then it is left alone. */
  bool leave_early = false;

  std::string Text() const {
    return ExpectationText(type.name, " kind ", kind, ", ", count, " elements, path ",
                           static_cast<int>(path), ", operation ", operation, ", in place ",
                           in_place, ", shift ", shift, ", ", launch.blocks, " x ", launch.threads,
                           ", seed ", seed);
  }
};

inline const char* NameOf(Path path) {
  return path == Path::kPush ? "push_" : path == Path::kPull ? "pull_" : "push_slices_";
}

/*! \brief What the reduction gives, by the CPU's kernels. */
inline std::vector<uint8_t> Expected(const Case& one, int size) {
  const size_t width = one.type.type.bytes();
  std::vector<std::vector<uint8_t>> inputs(size, std::vector<uint8_t>(one.count * width));
  std::vector<const void*> sources;
  for (int i = 0; i < size; ++i) {
    Fill(inputs[i].data(), one.count, one.type, one.seed * 64 + i);
    sources.push_back(inputs[i].data());
  }
  std::vector<uint8_t> result(one.count * width);
  const ReduceFn reduce = FindReduce(one.type.type, static_cast<ReduceKind>(one.kind));
  EXPECT(reduce != nullptr, one.Text());
  reduce(result.data(), sources.data(), size, one.count, false);
  return result;
}

inline Header HeaderOf(const Case& one) {
  Header header;
  header.operation = one.operation;
  header.mode = Mode(one.kind, 3, 0);
  header.type = one.type.type.code | one.type.type.bits << 8 | 1 << 16;
  header.root = one.operation == kReduce ? static_cast<int32_t>(one.seed % 2) : -1;
  header.count = one.count;
  header.path = static_cast<uint32_t>(one.path);
  return header;
}

/*!
 * \brief Do it as this member, and compare. The input is overwritten on return: whoever still
 *        reads it gets something else.
 * \param half Which half of the region is used; what may be read after the end needs the other.
 */
inline void Reduce(Members& members, int place, Stream& stream, const Case& one, int half = 0) {
  const size_t width = one.type.type.bytes();
  const uint64_t bytes = one.count * width;
  const int size = members.size();
  const bool scatters = one.operation == kReduceScatter;
  const uint64_t part = scatters ? one.count / size : one.count;
  uint8_t* const area = members.region(place) + half * (Members::kScratch / 2);
  uint8_t* const send = area + 4096 + (one.shift == 0 ? 0 : (one.shift + place) % 16 * width);
  EXPECT(2 * bytes + (64 << 10) < Members::kScratch / 2, one.Text());
  Fill(send, one.count, one.type, one.seed * 64 + place);
  uint8_t* recv = area + (16 << 10) + (bytes + 4095) / 4096 * 4096 + one.shift * width;
  if (one.in_place) recv = scatters ? send + place * part * width : send;

  ReduceArgs args{};
  args.team = members.Args(place);
  args.header = HeaderOf(one);
  args.header.input = send - members.region(place);
  args.header.scratch = Members::kScratch;
  args.send = send;
  args.recv = recv;
  args.scratch = members.region(place) + Members::kScratch;
  args.leaves_early = one.leave_early;
  const bool wanted = one.operation != kReduce || place == args.header.root;
  if (!wanted) args.recv = nullptr;
  const uint64_t result_bytes = part * width;
  uint8_t edges[2][8];
  if (!one.in_place) {
    std::memset(recv - 8, 0x5a, 16 + result_bytes);
    std::memcpy(edges, recv - 8, 8);
  }
  stream.Launch(std::string("tvm_ipc_") + NameOf(one.path) + one.type.name, args, one.launch);
  EXPECT(members.error(place).code == kNoError, one.Text(), ": member ", place, ": code ",
         members.error(place).code);
  if (!one.in_place && !one.leave_early) std::memset(send, 0xa5, bytes);
  if (wanted) {
    const std::vector<uint8_t> expected = Expected(one, size);
    const uint8_t* mine = expected.data() + (scatters ? place * result_bytes : 0);
    for (uint64_t i = 0; i < result_bytes; i += width) {
      EXPECT(std::memcmp(mine + i, recv + i, width) == 0, one.Text(), ": member ", place, " of ",
             size, ", element ", i / width);
    }
    if (!one.in_place) {
      EXPECT(std::memcmp(recv - 8, edges, 8) == 0, one.Text(), ": before the result");
      EXPECT(std::memcmp(recv + result_bytes, edges, 8) == 0, one.Text(), ": after the result");
    }
  }
  if (one.in_place) std::memset(send, 0xa5, bytes);
}

}  // namespace kernels
}  // namespace tvm_ipc
#endif  // TVM_IPC_TESTS_CUDA_REDUCTIONS_H_
