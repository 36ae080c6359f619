/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file test_cuda_moves.cc
 * \brief The CUDA kernels that move bytes, send messages, show numbers and normalise rows.
 */
#include <memory>

#include "cuda_reductions.h"
#include "shm/find_norm_function.h"

namespace tvm_ipc {
namespace kernels {
namespace {

/*! \brief Byte i of what a rank gives to another in a round. */
uint8_t Byte(int from, int to, uint64_t i, uint64_t round) {
  return static_cast<uint8_t>(Mixed(round * 4096 + from * 64 + to + i * 7919));
}

/*! \brief All-to-all of unequal parts: gathers, scatters and broadcasts are cases of it. */
void MoveParts(int size, bool push, uint64_t most, Launch launch) {
  Members members(size);
  members.Run([&](int place, Stream& stream) {
    for (uint64_t round = 1; round <= 6; ++round) {
      const auto part = [&](int from, int to) -> uint64_t {
        // Nothing, one byte, odd numbers, and as much as there is.
        if (round == 1) return 0;
        if (round == 2) return from == 0 ? most : 0;  // one member gives
        return Mixed(round * 256 + from * 16 + to) % (most + 1);
      };
      const auto before = [&](int from, int to) {
        uint64_t bytes = 0;
        for (int i = 0; i < to; ++i) bytes += part(from, i);
        return bytes;
      };
      uint8_t* const send = members.region(place) + 512 + round % 3;
      std::vector<uint8_t> recv(32, 0x5a);
      MoveArgs args{};
      args.team = members.Args(place);
      args.header.operation = kAllToAll;
      args.header.count = round;
      args.header.input = send - members.region(place);
      args.send = send;
      for (int member = 0; member < size; ++member) {
        args.give_from[member] = before(place, member);
        args.give_bytes[member] = part(place, member);
        for (uint64_t i = 0; i < part(place, member); ++i) {
          send[args.give_from[member] + i] = Byte(place, member, i, round);
        }
        args.take_from[member] = before(member, place);
        args.take_to[member] = recv.size() - 16;
        args.take_bytes[member] = part(member, place);
        recv.resize(recv.size() + part(member, place), 0x5a);
      }
      args.recv = recv.data() + 16;
      for (int member = 0; member < size; ++member) args.take_to[member] -= 16;
      stream.Launch(push ? "tvm_ipc_move_push" : "tvm_ipc_move", args, launch);
      // Nobody reads it any more.
      std::memset(send, 0xa5, before(place, size));
      uint64_t at = 16;
      for (int member = 0; member < size; ++member) {
        for (uint64_t i = 0; i < part(member, place); ++i) {
          EXPECT(recv[at + i] == Byte(member, place, i, round), "from ", member, " to ", place,
                 ", byte ", i, " of ", part(member, place), ", round ", round, ", push ", push);
        }
        at += part(member, place);
      }
      for (int i = 0; i < 16; ++i) EXPECT(recv[i] == 0x5a && recv[at + i] == 0x5a, "edges");
    }
  });
  members.ExpectNoError();
}

/*! \brief Where the input is a part of the output, it stays in its place. */
void GatherInPlace(int size, bool push) {
  Members members(size);
  members.Run([&](int place, Stream& stream) {
    const uint64_t bytes = 1001;
    uint8_t* const recv = members.region(place) + 1024;
    for (uint64_t i = 0; i < bytes; ++i) recv[place * bytes + i] = Byte(place, 0, i, 9);
    MoveArgs args{};
    args.team = members.Args(place);
    args.header.operation = kAllGather;
    args.header.input = 1024 + place * bytes;
    args.send = recv + place * bytes;
    args.recv = recv;
    for (int member = 0; member < size; ++member) {
      args.give_bytes[member] = args.take_bytes[member] = bytes;
      args.take_to[member] = member * bytes;
    }
    stream.Launch(push ? "tvm_ipc_move_push" : "tvm_ipc_move", args, {2, 2, 1});
    for (uint64_t i = 0; i < size * bytes; ++i) {
      EXPECT(recv[i] == Byte(static_cast<int>(i / bytes), 0, i % bytes, 9), i);
    }
  });
  members.ExpectNoError();
}

MessageArgs Message(Members& members, int place, int peer, bool sends, uint64_t bytes) {
  MessageArgs args{};
  args.guard = members.GuardOf(place, &members.channels(place).failed);
  args.header.operation = kSend;
  args.header.count = bytes;
  args.peer = peer;
  args.send_queue = sends ? &members.channels(place).out[peer] : &members.channels(peer).out[place];
  args.receive_queue =
      sends ? &members.channels(peer).in[place] : &members.channels(place).in[peer];
  args.bytes = bytes;
  return args;
}

/*! \brief Messages of all sizes round a ring, both ways. */
void Messages(int size) {
  Members members(size);
  const uint64_t large = kSanitized ? kLanes * kPacketBytes + 77 : 3 << 20;
  const uint64_t sizes[] = {0, 1, 100, kPacketBytes, kPacketBytes + 1, large, 7, large, 0, 64};
  members.Run([&](int place, Stream& stream) {
    const int next = (place + 1) % size;
    const int previous = (place + size - 1) % size;
    for (int way = 0; way < 2; ++way) {
      const int to = way == 0 ? next : previous;
      const int from = way == 0 ? previous : next;
      uint64_t round = 0;
      for (const uint64_t bytes : sizes) {
        ++round;
        std::vector<uint8_t> send(bytes + 1), recv(bytes + 2, 0x5a);
        for (uint64_t i = 0; i < bytes; ++i) send[i] = Byte(place, to, i, round);
        MessageArgs out = Message(members, place, to, true, bytes);
        out.send = send.data();
        MessageArgs in = Message(members, place, from, false, bytes);
        in.recv = recv.data() + 1;
        const kernels::Launch launch{LanesOf(bytes), 1 + static_cast<uint32_t>(round % 2), 1};
        // Large messages wait for their receivers.
        for (int turn = 0; turn < 2; ++turn) {
          if (turn == place % 2) {
            stream.Launch("tvm_ipc_send", out, launch);
          } else {
            stream.Launch("tvm_ipc_receive", in, launch);
          }
        }
        EXPECT(recv[0] == 0x5a && recv[bytes + 1] == 0x5a, "edges");
        for (uint64_t i = 0; i < bytes; ++i) {
          EXPECT(recv[1 + i] == Byte(from, place, i, round), "byte ", i, " of ", bytes);
        }
      }
    }
  });
  members.ExpectNoError();
}

/*! \brief Who has seen a number sees what was written before it was shown. */
void ExposedNumbers(int size) {
  Members members(size);
  std::vector<uint32_t> values(size);
  members.Run([&](int place, Stream& stream) {
    for (uint32_t number = 1; number <= 20; ++number) {
      values[place] = number * 100 + place;
      ExposeArgs args{};
      args.team = members.Args(place);
      args.number = number;
      stream.Launch("tvm_ipc_expose", args, {1, 2, 1});
      for (int shift = 0; shift < size; ++shift) {
        args.member = (place + shift) % size;
        stream.Launch("tvm_ipc_await", args, {1, 2, 1});
        EXPECT(values[args.member] == number * 100 + args.member);
      }
      BarrierArgs meet{};
      meet.team = members.Args(place);
      meet.header.operation = kBarrier;
      stream.Launch("tvm_ipc_barrier", meet, {1, 2, 1});
    }
  });
  members.ExpectNoError();
}

void Patterns() {
  std::vector<uint64_t> memory(1001);
  uint32_t wrong = 0;
  Stream stream;
  PatternArgs args{memory.data(), 1000, 77, &wrong};
  stream.Launch("tvm_ipc_write_pattern", args, {2, 3, 1});
  stream.Launch("tvm_ipc_check_pattern", args, {3, 1, 1});
  EXPECT(wrong == 0 && memory[1000] == 0);
  memory[5] ^= 1;
  memory[999] ^= 1ull << 63;
  stream.Launch("tvm_ipc_check_pattern", args, {3, 2, 1});
  EXPECT(wrong == 2, wrong);
}

/*! \brief Rows of a sum and a residual, by the CPU's kernels. */
struct Norms {
  NamedType type, out, weight_type;
  uint64_t row, rows, seed;
  bool centred;
  int size;

  std::vector<uint8_t> Filled(uint64_t count, const NamedType& of, uint64_t which) const {
    std::vector<uint8_t> data(count * of.type.bytes());
    Fill(data.data(), count, of, which);
    // An infinity would make all of a row NaN.
    for (uint64_t i = 0; i < data.size(); i += of.type.bytes()) {
      if ((data[i + of.type.bytes() - 1] & 0x7f) >= 0x7c) data[i + of.type.bytes() - 1] &= 0x3f;
    }
    return data;
  }
  std::vector<uint8_t> input(int place) const {
    return Filled(rows * row, type, seed * 100 + place);
  }
  std::vector<uint8_t> residual() const { return Filled(rows * row, type, seed * 100 + 50); }
  std::vector<uint8_t> weight() const { return Filled(row, weight_type, seed * 100 + 51); }
  std::vector<uint8_t> bias() const { return Filled(row, weight_type, seed * 100 + 52); }

  std::vector<uint8_t> Sum() const {
    const ReduceFn reduce = FindReduce(type.type, ReduceKind::kSum);
    std::vector<std::vector<uint8_t>> inputs;
    std::vector<const void*> sources;
    for (int i = 0; i < size; ++i) inputs.push_back(input(i));
    for (const auto& one : inputs) sources.push_back(one.data());
    std::vector<uint8_t> sum(inputs[0].size());
    reduce(sum.data(), sources.data(), size, rows * row, false);
    return sum;
  }
  std::vector<uint8_t> ResidualOut(std::vector<uint8_t> sum) const {
    const std::vector<uint8_t> added = residual();
    const void* both[] = {sum.data(), added.data()};
    FindReduce(type.type, ReduceKind::kSum)(sum.data(), both, 2, rows * row, false);
    return sum;
  }
  std::vector<uint8_t> NormOut(const std::vector<uint8_t>& residual_out) const {
    std::vector<float> weights(row), biases(row);
    const WidenFn widen = RequireWiden("test", weight_type.type);
    widen(weights.data(), weight().data(), row);
    widen(biases.data(), bias().data(), row);
    const NormRow norm{row, weights.data(), centred ? biases.data() : nullptr, 1e-5f};
    const NormFn normalise = RequireNorm("test", type.type, out.type);
    std::vector<uint8_t> result(rows * row * out.type.bytes());
    for (uint64_t i = 0; i < rows; ++i) {
      normalise(result.data() + i * row * out.type.bytes(),
                residual_out.data() + i * row * type.type.bytes(), norm);
    }
    return result;
  }
};

void Normalised(const Norms& norms, Members& members, int place, Stream& stream, bool push,
                Launch launch) {
  const std::vector<uint8_t> sum = norms.Sum(), weight = norms.weight(), bias = norms.bias();
  const std::vector<uint8_t> send = push ? norms.input(place) : sum;
  std::vector<uint8_t> residual = norms.residual();
  const bool in_place = norms.seed % 2;
  std::vector<uint8_t> other(residual.size());
  std::vector<uint8_t>& residual_out = in_place ? residual : other;
  std::vector<uint8_t> norm_out(norms.rows * norms.row * norms.out.type.bytes() + 1, 0x5a);
  NormArgs args{};
  args.reduce.team = members.Args(place);
  args.reduce.header.operation = norms.centred ? kAllReduceLayerNorm : kAllReduceRmsNorm;
  args.reduce.header.count = norms.rows * norms.row;
  args.reduce.send = send.data();
  args.residual = residual.data();
  args.residual_out = residual_out.data();
  args.norm_out = norm_out.data();
  args.weight = weight.data();
  args.bias = norms.centred ? bias.data() : nullptr;
  args.row = norms.row;
  args.epsilon = 1e-5f;

  for (int i = 0; i < 3; ++i) {
    if (norms.weight_type.type == kTypes[i].type) args.weight_type = args.bias_type = i;
    if (norms.out.type == kTypes[i].type) args.out_type = i;
  }
  args.pieces = launch.pieces;
  const std::string name = std::string(push ? "tvm_ipc_push_norm_" : "tvm_ipc_norm_");
  stream.Launch(name + norms.type.name, args, launch);
  const std::vector<uint8_t> expected = norms.ResidualOut(sum);
  EXPECT(residual_out == expected, name, norms.type.name, ": residual_out, ", norms.rows, " x ",
         norms.row);
  const std::vector<uint8_t> rows = norms.NormOut(expected);
  EXPECT(std::equal(rows.begin(), rows.end(), norm_out.begin()), name, norms.type.name, " to ",
         norms.out.name, ": norm_out, ", norms.rows, " x ", norms.row, ", ", norms.centred);
  EXPECT(norm_out.back() == 0x5a, "after the end");
}

void NormsOfRows(int size) {
  Members members(size);
  members.Run([&](int place, Stream& stream) {
    uint64_t seed = size * 100;
    for (const uint64_t row : {1, 7, 32, 100, 1025}) {
      for (const uint64_t rows : {0, 1, 3}) {
        ++seed;
        const Norms norms{kTypes[seed % 3],
                          kTypes[seed / 3 % 3],
                          kTypes[seed / 2 % 3],
                          row,
                          rows,
                          seed,
                          seed % 4 < 2,
                          size};
        EXPECT(FitsPushNorm(rows * row, norms.type.type.bytes(), row, size));
        const kernels::Launch launches[] = {{1, 1, 1}, {3, 2, 2}, {4, 1, 3}, {2, 3, 1}};
        Normalised(norms, members, place, stream, true, launches[seed % 4]);
        Normalised(norms, members, place, stream, false, launches[(seed + 1) % 4]);
      }
    }
  });
  members.ExpectNoError();
}

/*! \brief Rows that are longer than what a block has at hand. */
void LongRows() {
  Members members(2);
  const Norms norms{kTypes[1], kTypes[2], kTypes[0], 20001, 2, 5, true, 2};
  members.Run([&](int place, Stream& stream) {
    Normalised(norms, members, place, stream, true, {2, 2, 2});
    Normalised(norms, members, place, stream, false, {2, 2, 1});
  });
  members.ExpectNoError();
}

}  // namespace
}  // namespace kernels
}  // namespace tvm_ipc

int main() {
  using namespace tvm_ipc::kernels;  // NOLINT
  for (bool push : {false, true}) {
    for (int size : {1, 2, 3, 5, 8}) {
      if (!kSanitized || size == 3) MoveParts(size, push, 5000, {1, 1, 1});
    }
    MoveParts(3, push, kSanitized ? 9000 : PushBytes(3), {3, 2, 1});
    GatherInPlace(4, push);
  }
  for (int size : {2, 3, 4}) {
    if (!kSanitized || size == 3) Messages(size);
  }
  ExposedNumbers(3);
  Patterns();
  for (int size : {1, 2, 3, 8}) {
    if (!kSanitized || size == 3) NormsOfRows(size);
  }
  LongRows();
  std::printf("ok\n");
}
