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

/*! \brief The blocks of a batch. A unit is a block of rows, or a part of its keys. */
struct AttentionJob {
  const AttentionBatch& batch;
  const AttentionKernels& kernels;
  int64_t rows, block_rows, blocks, units;
  int64_t parts = 1;
  /*! \brief If keys are split: a state for each unit. */
  float* split = nullptr;

  AttentionHead HeadOf(int64_t index) const {
    const int64_t of_batch = index / batch.groups, group = index % batch.groups;
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

  void RunUnit(int64_t index) const {
    // With a causal mask, later rows have more keys: they come first.
    const int64_t unit = units - 1 - index;
    const Attention& a = batch.each;
    const int64_t block = unit / parts, part = unit % parts;
    const AttentionHead head = HeadOf(block / blocks);
    const int64_t first = block % blocks * block_rows;
    const int64_t count = std::min(block_rows, rows - first);
    float* const own = attention_scratch.Floats(kernels.ScratchSize(a, count));
    if (split == nullptr) {
      float* const state = attention_states.Floats(kernels.StateSize(a, count));
      kernels.attend(a, head, first, count, 0, a.keys, own, state);
      kernels.store(a, head, first, count, own, state);
      return;
    }
    const int64_t begin = part * kAttentionPart, end = std::min(a.keys, begin + kAttentionPart);
    kernels.attend(a, head, first, count, begin, end, own, split + unit * StateSize());
  }

  /*! \brief Add up the parts of each block, and store its rows. */
  void Finish() const {
    const Attention& a = batch.each;
    const int64_t size = StateSize();
    float* const own = attention_scratch.Floats(kernels.ScratchSize(a, block_rows));
    for (int64_t block = 0; block < units / parts; ++block) {
      float* const state = split + block * parts * size;
      const int64_t first = block % blocks * block_rows;
      const int64_t count = std::min(block_rows, rows - first);
      for (int64_t part = 1; part < parts; ++part) {
        kernels.add(a, count, state + part * size, state);
      }
      kernels.store(a, HeadOf(block / blocks), first, count, own, state);
    }
  }

  int64_t StateSize() const { return kernels.StateSize(batch.each, block_rows); }
};

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
  // Larger blocks pack keys and values less often, and smaller ones occupy more threads.
  int64_t block_rows = kernels.most_rows;
  if (heads * (rows / block_rows) < 4 * tasks) block_rows = kernels.lanes;
  const int64_t blocks = (rows + block_rows - 1) / block_rows;
  AttentionJob job{batch, kernels, rows, block_rows, blocks, heads * blocks};
  const int64_t parts = (a.keys + kAttentionPart - 1) / kAttentionPart;
  Scratch memory;
  if (tasks > 1 && job.units < 4 * tasks && parts > 1) {
    job.parts = parts;
    job.units *= parts;
    job.split = memory.Floats(job.units * job.StateSize());
  }
  if (job.units < tasks) tasks = static_cast<int>(job.units);
  RunUnits(threads, tasks, job.units, &job);
  if (job.split != nullptr) job.Finish();
}

}  // namespace tvm_ipc
