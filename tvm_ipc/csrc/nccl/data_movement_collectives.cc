/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file data_movement_collectives.cc
 * \brief Collectives that only move data: NCCL's own, or sends and receives in one group.
 *
 * They move bytes, so they support every type. A member copies its own part itself.
 */
#include "core/all_to_all_layout.h"
#include "core/ragged_rows.h"
#include "nccl/team_operation.h"

namespace tvm_ipc::nccl {

namespace {

/*! \brief NCCL calls in a group; after the first failure, further calls are skipped. */
class Group {
 public:
  Group(Handle handle, cuda::Stream stream) : handle_(handle), stream_(stream) {}

  void Send(const uint8_t* from, size_t bytes, int to) {
    const auto& send = TheLibrary().Send;
    if (Goes(bytes)) Take(send.name(), send(from, bytes, kUint8, to, handle_, stream_));
  }
  void Receive(uint8_t* to, size_t bytes, int from) {
    const auto& receive = TheLibrary().Recv;
    if (Goes(bytes)) Take(receive.name(), receive(to, bytes, kUint8, from, handle_, stream_));
  }
  Called called() const { return called_; }

 private:
  bool Goes(size_t bytes) const { return bytes > 0 && called_.result == kSuccess; }
  void Take(const char* name, Result result) {
    called_ = {name, result == kInProgress ? kSuccess : result};
  }

  Handle handle_;
  cuda::Stream stream_;
  Called called_;
};

}  // namespace

void AllGather(Team& team, const Call& call) {
  const Buffer& send = call.send;
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    const auto& gather = TheLibrary().AllGather;
    return Called{gather.name(),
                  gather(send.data, call.recv.data, send.bytes(), kUint8, handle, stream)};
  });
  if (team.size() == 1) team.Copy(send.begin(), call.recv.begin(), send.bytes());
}

void Broadcast(Team& team, const Call& call) {
  const Buffer& recv = call.recv;
  const void* source = team.index() == call.root ? call.send.data : recv.data;
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    const auto& broadcast = TheLibrary().Broadcast;
    return Called{broadcast.name(),
                  broadcast(source, recv.data, recv.bytes(), kUint8, call.root, handle, stream)};
  });
  if (team.size() == 1) team.Copy(call.send.begin(), recv.begin(), recv.bytes());
}

void Scatter(Team& team, const Call& call) {
  const int root = call.root;
  const bool sends = team.index() == root;
  const size_t part = call.recv.bytes();
  auto slice = [&](int i) { return call.send.begin() + static_cast<size_t>(i) * part; };
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    Group group(handle, stream);
    for (int i = 0; sends && i < team.size(); ++i) {
      if (i != root) group.Send(slice(i), part, i);
    }
    if (!sends) group.Receive(call.recv.begin(), part, root);
    return group.called();
  });
  if (sends) team.Copy(slice(root), call.recv.begin(), part);
}

void Gather(Team& team, const Call& call) {
  const int root = call.root;
  const bool receives = team.index() == root;
  const size_t part = call.send.bytes();
  auto slice = [&](int i) { return call.recv.begin() + static_cast<size_t>(i) * part; };
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    Group group(handle, stream);
    for (int i = 0; receives && i < team.size(); ++i) {
      if (i != root) group.Receive(slice(i), part, i);
    }
    if (!receives) group.Send(call.send.begin(), part, root);
    return group.called();
  });
  if (receives) team.Copy(call.send.begin(), slice(root), part);
}

void AllToAll(Team& team, const Call& call) {
  const Buffer& send = call.send;
  const Buffer& recv = call.recv;
  const int n = team.size();
  const int me = team.index();
  const Division division(send, call.layout, n);
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    Group group(handle, stream);
    for (int k = 1; k < n; ++k) {
      const int to = (me + k) % n;
      const int from = (me + n - k) % n;
      group.Send(send.begin() + division.before(me, to), division.part(me, to), to);
      group.Receive(recv.begin() + division.recv_offset(from, me), division.part(from, me), from);
    }
    return group.called();
  });
  team.Copy(send.begin() + division.before(me, me), recv.begin() + division.recv_offset(me, me),
            division.part(me, me));
}

void RaggedAllToAll(Team& team, const Call& call) {
  const Buffer& send = call.send;
  const Buffer& recv = call.recv;
  const int n = team.size();
  const int me = team.index();
  const size_t numbers = call.counts.count / static_cast<size_t>(n);
  const size_t part = numbers * sizeof(int64_t);
  // NCCL takes sizes on the host, so the host waits for the counts, twice: a rank that has wrong
  // counts of its own must not begin.
  const std::vector<int64_t> counts = team.ReadNumbers(call, call.counts);
  CheckSentRows(call, counts.data(), n);
  auto exchanged = [&](int i) { return static_cast<size_t>(i) * part; };
  team.Run(call, true, [&](Handle handle, cuda::Stream stream) {
    Group group(handle, stream);
    for (int k = 1; k < n; ++k) {
      const int to = (me + k) % n;
      const int from = (me + n - k) % n;
      group.Send(call.counts.begin() + exchanged(to), part, to);
      group.Receive(call.recv_counts.begin() + exchanged(from), part, from);
    }
    return group.called();
  });
  team.Copy(call.counts.begin() + exchanged(me), call.recv_counts.begin() + exchanged(me), part);
  const std::vector<int64_t> received = team.ReadNumbers(call, call.recv_counts);
  CheckReceivedRows(call, received.data(), me);
  auto bytes = [&](const std::vector<int64_t>& of, int i) {
    const size_t first = static_cast<size_t>(i) * numbers;
    return static_cast<size_t>(ElementsOf(call, &of[first], numbers)) * send.type.bytes();
  };
  auto before = [&](const std::vector<int64_t>& of, int i) {
    size_t sum = 0;
    for (int j = 0; j < i; ++j) sum += bytes(of, j);
    return sum;
  };
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    Group group(handle, stream);
    for (int k = 1; k < n; ++k) {
      const int to = (me + k) % n;
      const int from = (me + n - k) % n;
      group.Send(send.begin() + before(counts, to), bytes(counts, to), to);
      group.Receive(recv.begin() + before(received, from), bytes(received, from), from);
    }
    return group.called();
  });
  team.Copy(send.begin() + before(counts, me), recv.begin() + before(received, me),
            bytes(counts, me));
}

void Permute(Team& team, const Call& call) {
  const Buffer& send = call.send;
  const Buffer& recv = call.recv;
  const NumberView& sources = call.layout;
  const int n = team.size();
  const int me = team.index();
  const int from = static_cast<int>(sources[static_cast<size_t>(me)]);
  team.Run(call, [&](Handle handle, cuda::Stream stream) {
    Group group(handle, stream);
    for (int to = 0; to < n; ++to) {
      if (to != me && sources[static_cast<size_t>(to)] == me) {
        group.Send(send.begin(), send.bytes(), to);
      }
    }
    if (from >= 0 && from != me) group.Receive(recv.begin(), recv.bytes(), from);
    return group.called();
  });
  if (from == me) team.Copy(send.begin(), recv.begin(), send.bytes());
  if (from < 0) team.Clear(recv);
}

}  // namespace tvm_ipc::nccl
