/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file attention_multi_thread.cc
 * \brief Splits attention into blocks of rows, and parts of keys, for threads.
 */
#include "blas/attention_multi_thread.h"

#include <algorithm>
#include <vector>

#include "blas/scratch_memory.h"
#include "blas/select_instruction_set.h"

namespace tvm_ipc {
namespace {

/*! \brief Multiplications that make it worthwhile to wake one more thread. */
constexpr double kAttentionWorkPerThread = 1e6;

thread_local Scratch attention_scratch, attention_states;

/*! \brief The classified bias of a batch: a range for each block of keys of each query. */
struct BiasRanges {
  const AttentionBatch& batch;
  const AttentionKernels& kernels;
  // A bias that all queries, heads or batches share is classified once.
  int64_t blocks = (batch.each.keys + kAttentionKeys - 1) / kAttentionKeys;
  int64_t queries = batch.each.bias_query == 0 ? 1 : batch.each.queries;
  int64_t heads =
      batch.bias.group == 0 && batch.each.bias_head == 0 ? 1 : batch.groups * batch.heads;
  int64_t rows = queries * heads * (batch.bias.batch == 0 ? 1 : batch.batches);
  std::vector<BiasRange> ranges = std::vector<BiasRange>(rows * blocks);

  static constexpr int64_t kRowsAtOnce = 16;

  int64_t units() const { return (rows + kRowsAtOnce - 1) / kRowsAtOnce; }

  void RunUnit(int64_t unit) {
    const int64_t end = std::min(rows, (unit + 1) * kRowsAtOnce);
    for (int64_t row = unit * kRowsAtOnce; row < end; ++row) RunRow(row);
  }

  void RunRow(int64_t row) {
    const Attention& a = batch.each;
    const int64_t of_batch = row / queries / heads, head = row / queries % heads;
    const int64_t at = of_batch * batch.bias.batch + head / batch.heads * batch.bias.group +
                       head % batch.heads * a.bias_head + row % queries * a.bias_query;
    kernels.classify(a, batch.first.bias + at * SizeOf(a.bias_type), &ranges[row * blocks]);
  }

  /*! \brief Return a copy of the batch that refers to the ranges, at strides like the bias's. */
  AttentionBatch Added() const {
    AttentionBatch with = batch;
    with.first.ranges = ranges.data();
    with.each.range_query = queries == 1 ? 0 : blocks;
    with.each.range_head = heads == 1 ? 0 : queries * blocks;
    with.ranges = {rows == queries * heads ? 0 : heads * queries * blocks,
                   with.each.range_head * batch.heads};
    return with;
  }
};

/*!
 * \brief The blocks of a batch: rows of a head of keys, or all rows of several heads of keys. A
 * unit is a block, or a part of its keys.
 */
struct AttentionJob {
  const AttentionBatch& batch;
  const AttentionKernels& kernels;
  int64_t rows, block_rows;
  int64_t groups;  // heads of keys of a block
  int64_t tasks = 1;
  int64_t blocks_of_head = (rows + block_rows - 1) / block_rows;
  int64_t heads_of_batch = (batch.groups + groups - 1) / groups;
  int64_t blocks = batch.batches * heads_of_batch * blocks_of_head;
  int64_t parts = 1;
  /*! \brief If keys are split: states of each unit. */
  float* split = nullptr;

  int64_t units() const { return blocks * parts; }

  AttentionHead HeadOf(int64_t of_batch, int64_t group) const {
    auto at = [&](auto* data, const AttentionStrides& strides, FloatType type) {
      return data + (of_batch * strides.batch + group * strides.group) * SizeOf(type);
    };
    const Attention& a = batch.each;
    AttentionHead head = batch.first;
    head.queries = at(head.queries, batch.queries, a.type);
    head.keys = at(head.keys, batch.keys, a.type);
    head.values = at(head.values, batch.values, a.type);
    head.target = at(head.target, batch.target, a.target_type);
    if (head.bias != nullptr) {
      head.bias = at(head.bias, batch.bias, a.bias_type);
      head.ranges += of_batch * batch.ranges.batch + group * batch.ranges.group;
    }
    return head;
  }

  /*! \brief The rows and heads of keys of a block. */
  struct Block {
    int64_t of_batch, group, groups, first, count;
  };

  Block BlockAt(int64_t block) const {
    const int64_t index = block / blocks_of_head, first = block % blocks_of_head * block_rows;
    const int64_t group = index % heads_of_batch * groups;
    return {index / heads_of_batch, group, std::min(groups, batch.groups - group), first,
            std::min(block_rows, rows - first)};
  }

  /*! \brief Compute the states of a block and the keys [begin, end), and prefetch those of another
   *         unit. */
  void AttendBlock(const Block& block, int64_t begin, int64_t end, int64_t next_unit,
                   float* states) const {
    const Attention& a = batch.each;
    float* const own = attention_scratch.Floats(groups == 1 ? kernels.ScratchSize(a, block.count)
                                                            : kernels.GroupsScratchSize(a, groups));
    if (groups == 1) {
      const AttentionHead head = HeadOf(block.of_batch, block.group);
      kernels.attend(a, head, block.first, block.count, begin, end, own, states);
      return;
    }
    std::vector<AttentionHead> heads(block.groups + 1);
    for (int64_t g = 0; g < block.groups; ++g) heads[g] = HeadOf(block.of_batch, block.group + g);
    AttentionHead* next = nullptr;
    if (next_unit < units()) {
      next = &heads[block.groups];
      const Block after = BlockAt(next_unit / parts);
      *next = HeadOf(after.of_batch, after.group);
      next->keys += next_unit % parts * kAttentionPart * a.key_stride * SizeOf(a.type);
    }
    kernels.attend_groups(a, heads.data(), block.groups, next, block.first, block.count, begin, end,
                          own, states);
  }

  void StoreBlock(const Block& block, float* states) const {
    const Attention& a = batch.each;
    float* const own = attention_scratch.Floats(kernels.ScratchSize(a, block.count));
    const int64_t size = kernels.StateSize(a, block.count);
    for (int64_t g = 0; g < block.groups; ++g) {
      kernels.store(a, HeadOf(block.of_batch, block.group + g), block.first, block.count, own,
                    states + g * size);
    }
  }

  void RunUnit(int64_t index) const {
    // With a causal mask, later rows have more keys: they come first.
    const int64_t unit = groups == 1 ? units() - 1 - index : index;
    const Attention& a = batch.each;
    const Block block = BlockAt(unit / parts);
    // The other tasks take the units in between, in all probability.
    const int64_t next = unit + tasks;
    if (split == nullptr) {
      float* const states =
          attention_states.Floats(block.groups * kernels.StateSize(a, block.count));
      AttendBlock(block, 0, a.keys, next, states);
      StoreBlock(block, states);
      return;
    }
    const int64_t begin = unit % parts * kAttentionPart;
    AttendBlock(block, begin, std::min(a.keys, begin + kAttentionPart), next,
                split + unit * StateSize());
  }

  /*! \brief Add up the parts of each block, and store its rows. */
  void Finish() const {
    const Attention& a = batch.each;
    for (int64_t index = 0; index < blocks; ++index) {
      const Block block = BlockAt(index);
      float* const states = split + index * parts * StateSize();
      const int64_t size = kernels.StateSize(a, block.count);
      for (int64_t part = 1; part < parts; ++part) {
        for (int64_t g = 0; g < block.groups; ++g) {
          kernels.add(a, block.count, states + part * StateSize() + g * size, states + g * size);
        }
      }
      StoreBlock(block, states);
    }
  }

  /*! \brief Return the floats of the states of a unit. */
  int64_t StateSize() const { return groups * kernels.StateSize(batch.each, block_rows); }
};

/*! \brief Return whether the heads of a token's keys and values follow each other in memory. */
bool HeadsFollowEachOther(const AttentionBatch& batch) {
  const Attention& a = batch.each;
  auto follow = [&](const AttentionStrides& strides, int64_t token, int64_t depth) {
    return strides.group == depth && token >= depth * batch.groups;
  };
  return batch.groups > 1 && follow(batch.keys, a.key_stride, a.depth) &&
         follow(batch.values, a.value_stride, a.value_depth);
}

}  // namespace

int AttentionTasks(double multiplications, const Threads& threads) {
  if (multiplications < 2 * kAttentionWorkPerThread) return 1;
  return static_cast<int>(
      std::min<double>(threads.count(), multiplications / kAttentionWorkPerThread));
}

void Attend(const AttentionBatch& batch, const Threads& threads) {
  const Attention& a = batch.each;
  const AttentionKernels& kernels = CurrentAttention(a.type);
  const int64_t rows = batch.heads * a.queries, heads = batch.batches * batch.groups;
  if (rows == 0 || heads == 0) return;
  const double work = static_cast<double>(heads) * rows * a.keys * (a.depth + a.value_depth);
  int tasks = AttentionTasks(work, threads);
  if (batch.first.bias != nullptr && batch.first.ranges == nullptr) {
    BiasRanges bias{batch, kernels};
    RunUnits(threads, bias.rows < 256 ? 1 : tasks, bias.units(), &bias);
    return Attend(bias.Added(), threads);
  }
  const int64_t parts = std::max<int64_t>((a.keys + kAttentionPart - 1) / kAttentionPart, 1);
  int64_t block_rows = kernels.most_rows, groups = 1;
  if (rows <= kernels.few_rows && HeadsFollowEachOther(batch)) {
    // Blocks of many heads read memory faster, and those of few occupy more threads.
    const int64_t shares =
        tasks == 1 ? 1 : (4 * tasks + parts * batch.batches - 1) / (parts * batch.batches);
    groups = std::clamp<int64_t>(batch.groups / shares, 1, kernels.most_groups);
  }
  // Larger blocks pack keys and values less often, and smaller ones occupy more threads.
  auto too_large = [&] {
    const int64_t blocks = heads * ((rows + block_rows - 1) / block_rows);
    return rows <= block_rows / 2 || (tasks > 1 && blocks < 4 * tasks);
  };
  while (block_rows > kernels.lanes && too_large()) block_rows /= 2;
  AttentionJob job{batch, kernels, rows, block_rows, groups, tasks};
  Scratch memory;
  if (tasks > 1 && job.units() < 4 * tasks && parts > 1) {
    job.parts = parts;
    job.split = memory.Floats(job.units() * job.StateSize());
  }
  if (job.units() < tasks) tasks = static_cast<int>(job.units());
  RunUnits(threads, tasks, job.units(), &job);
  if (job.split != nullptr) job.Finish();
}

}  // namespace tvm_ipc
