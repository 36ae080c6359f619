/* SPDX-License-Identifier: Apache-2.0 */
/*! \file collective_call.cc */
#include "core/collective_call.h"

#include <algorithm>
#include <cstring>

#include "core/ragged_rows.h"

namespace tvm_ipc {

namespace {

/*! \brief Return a name as descriptors have it: without its last word, if it is too long. */
constexpr OpName ShortName(std::string_view name) {
  OpName op("");
  const size_t room = sizeof(op.text) - 1;
  if (name.size() > room) name = name.substr(0, name.substr(0, room + 1).rfind('_'));
  for (size_t i = 0; i < name.size(); ++i) op.text[i] = name[i];
  return op;
}

/*! \brief Return whether the list `parameters`, as the source has it, has one. */
constexpr bool Has(std::string_view parameters, std::string_view wanted) {
  for (size_t at = 0; at < parameters.size();) {
    const size_t end = std::min(parameters.find(',', at), parameters.size());
    if (parameters.substr(at, end - at) == wanted) return true;
    at = end + 2;
  }
  return false;
}

constexpr CollectiveTraits kTraits[] = {
#define TVM_IPC_TRAITS(Name, text, relation, mpi, cuda, nccl, ...)     \
  {text,                                                               \
   ShortName(text),                                                    \
   Relation::relation,                                                 \
   Relation::relation == Relation::kNorm || Has(#__VA_ARGS__, "Kind"), \
   Has(#__VA_ARGS__, "AllReduceStrategy"),                             \
   Has(#__VA_ARGS__, "Sources"),                                       \
   Has(#__VA_ARGS__, "Root"),                                          \
   Has(#__VA_ARGS__, "SendOfRoot")},
    TVM_IPC_COLLECTIVES(TVM_IPC_TRAITS)
#undef TVM_IPC_TRAITS
};

}  // namespace

const CollectiveTraits& TraitsOf(Collective collective) {
  return kTraits[static_cast<size_t>(collective)];
}

std::optional<Collective> FindCollective(std::string_view name) {
#define TVM_IPC_FIND(Name, text, ...) \
  if (name == text) return Collective::k##Name;
  TVM_IPC_COLLECTIVES(TVM_IPC_FIND)
#undef TVM_IPC_FIND
#define TVM_IPC_FIND(text, Name, ...) \
  if (name == text) return Collective::k##Name;
  TVM_IPC_COLLECTIVES_OF_DISCO(TVM_IPC_FIND)
#undef TVM_IPC_FIND
  return std::nullopt;
}

Descriptor DescriptorOf(const Call& call, int root) {
  const CollectiveTraits& traits = TraitsOf(call.collective);
  const Buffer& buffer = traits.only_root_sends ? call.recv : call.send;
  Descriptor descriptor;
  descriptor.op = traits.op;
  descriptor.reduces = traits.reduces;
  descriptor.kind = call.kind;
  if (traits.has_strategy) {
    descriptor.strategy =
        static_cast<int8_t>(call.strategy == Strategy::kDefault ? Strategy::kAuto : call.strategy);
  }
  descriptor.flags = call.flags;
  descriptor.type = buffer.type;
  descriptor.count = buffer.count;
  if (traits.has_root) descriptor.root = root;
  if (traits.relation == Relation::kNorm) {
    int64_t epsilon;
    memcpy(&epsilon, &call.epsilon, sizeof(epsilon));
    descriptor.layout_hash = HashOf({static_cast<int64_t>(call.weight.count), epsilon});
  } else if (traits.relation == Relation::kRagged) {
    // The members send and receive different numbers of rows.
    descriptor.count = call.row;
    descriptor.layout_hash = HashOf({static_cast<int64_t>(call.counts.count)});
  } else if (!call.layout.empty()) {
    descriptor.layout_hash = HashOf(call.layout);
    // The members' own counts may differ; the sum of all is the same.
    if (traits.relation == Relation::kSplits) {
      descriptor.count = 0;
      for (int64_t part : call.layout) descriptor.count += static_cast<uint64_t>(part);
    }
  }
  return descriptor;
}

size_t BytesArriving(const Call& call, size_t size, size_t index) {
  if (!call.recv.exists()) return 0;
  const CollectiveTraits& traits = TraitsOf(call.collective);
  const size_t bytes = call.recv.bytes();
  switch (traits.relation) {
    case Relation::kNorm:
    case Relation::kEqual:
      // Without a root, slices of the reduction arrive from all peers, then their results.
      return traits.reduces && !traits.has_root ? 2 * bytes / size * (size - 1) : bytes;
    case Relation::kEqualAndApart:
      // A reduction that has no common result takes the sends of the others as they are.
      return traits.reduces ? bytes * (size - 1) : bytes;
    case Relation::kSendIsLarger:
      return traits.reduces ? bytes * (size - 1) : bytes;
    case Relation::kRecvIsLarger:
      return bytes - call.send.bytes();
    case Relation::kSplits:
      return bytes / size * (size - 1);
    case Relation::kRagged:
      return RaggedBytesArriving(call, size, index);
  }
  return 0;
}

uint64_t HashOf(NumberView numbers) {
  if (numbers.empty()) return 0;
  uint64_t hash = 14695981039346656037u;  // FNV-1a, number by number
  for (int64_t number : numbers) hash = (hash ^ static_cast<uint64_t>(number)) * 1099511628211u;
  return hash | 1;
}

}  // namespace tvm_ipc
