/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file matmul_packed_function.cc
 * \brief Reads the arguments of a matmul and runs it on the thread pool that TVM's kernels use.
 */
#include "blas/matmul_packed_function.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>

#include <algorithm>
#include <string>

#include "blas/kernel_threads.h"
#include "blas/matmul_multi_thread.h"
#include "blas/select_instruction_set.h"
#include "blas/tensor_view.h"
#include "core/error.h"

namespace tvm_ipc {
namespace {

namespace ffi = tvm::ffi;

constexpr const char* kName = "tvm_ipc.blas.matmul";

template <typename... Args>
[[noreturn]] void Refuse(const Args&... args) {
  RefuseArgument(kName, args...);
}

const BlasLibrary& Library() {
  if (const BlasLibrary* library = LoadedBlas()) return *library;
  // Python finds the installed package; its exception names the package to install.
  const auto find = ffi::Function::GetGlobalRequired("tvm_ipc.blas.find");
  return LoadBlas(std::string(find().cast<ffi::String>()));
}

[[noreturn]] void RefuseShapes(const View& a, const View& b, const View& out) {
  Refuse("a ", ShapeText(*a.tensor), ", b ", ShapeText(*b.tensor), " and out ",
         ShapeText(*out.tensor), " do not fit together");
}

/*! \brief Set `batch` to the strides of x in the batch of the result, 0 where x broadcasts. */
void AlignBatch(const View& x, int own, const View& a, const View& b, const View& out,
                int batch_dims, int64_t* batch) {
  for (int d = 0; d < batch_dims; ++d) {
    const int from = d - (batch_dims - own);
    batch[d] = 0;
    if (from < 0 || x.shape[from] == 1) continue;
    if (x.shape[from] != out.shape[d]) RefuseShapes(a, b, out);
    batch[d] = x.stride[from];
  }
}

void CheckUnit(const View& x, int64_t row_stride, int64_t col_stride, int64_t rows, int64_t cols) {
  if (row_stride == 1 || col_stride == 1 || rows <= 1 || cols <= 1) return;
  Refuse(x.what, " ", ShapeText(*x.tensor),
         ": its axes are permuted so that no dimension of the matrix is contiguous");
}

int64_t Integer(const ffi::AnyView& argument) { return argument.cast<int64_t>(); }

void CheckParts(const Product& p) {
  if (p.parts == 0) return;
  if (p.parts < 0 || (p.parts & (p.parts - 1)) != 0) {
    Refuse("parts is ", p.parts, "; expected a power of two, or 0 for sums in the fastest order");
  }
  if (p.k % p.parts != 0) {
    Refuse("parts is ", p.parts, ", but a row of a has ", p.k, " elements; expected a divisor");
  }
  if (p.type == kFloat64) {
    Refuse("parts is ", p.parts, ", but a and b are float64; expected float16, bfloat16 or ",
           "float32, or parts of 0");
  }
  if (!OrdersSums()) {
    Refuse("parts is ", p.parts, ", but the kernels in use are ", BlasInstructionSet(),
           "; sums in a fixed order need AVX2 or AVX-512, others parts of 0");
  }
}

bool HasOperand(int kind) { return kind == kStepAdd || kind == kStepMultiply; }

}  // namespace

void BlasMatmul(ffi::PackedArgs args, ffi::Any* result) {
  const BlasLibrary& library = Library();
  constexpr int kFirst = 6;  // index of the first operand of a step
  if (args.size() < kFirst + 1)
    Refuse("needs (a_axes, b_axes, steps, parts, a, b, *operands, out)");
  const View a(kName, "a", args[4], Integer(args[0]));
  const View b(kName, "b", args[5], Integer(args[1]));
  const View out(kName, "out", args[args.size() - 1], 0);
  if (a.type != b.type) Refuse("a and b have different types");
  if ((a.type == kFloat64) != (out.type == kFloat64)) {
    Refuse("float64 is multiplied and stored as float64 only");
  }
  if (a.ndim == 0 || b.ndim == 0) RefuseShapes(a, b, out);

  Product p;
  p.type = a.type;
  p.target_type = out.type;
  p.target = const_cast<char*>(out.data);
  const bool has_rows = a.ndim > 1, has_cols = b.ndim > 1;
  const int own_a = has_rows ? a.ndim - 2 : 0, own_b = has_cols ? b.ndim - 2 : 0;
  p.batch_dims = std::max(own_a, own_b);
  p.m = has_rows ? a.shape[a.ndim - 2] : 1;
  p.k = a.shape[a.ndim - 1];
  p.n = has_cols ? b.shape[b.ndim - 1] : 1;
  const int at_rows = p.batch_dims, at_cols = p.batch_dims + has_rows;
  if (out.ndim != p.batch_dims + has_rows + has_cols || b.shape[own_b] != p.k ||
      (has_rows && out.shape[at_rows] != p.m) || (has_cols && out.shape[at_cols] != p.n)) {
    RefuseShapes(a, b, out);
  }
  for (int d = 0; d < p.batch_dims; ++d) p.batch[d] = out.shape[d];
  p.a.data = a.data;
  p.a.row_stride = has_rows ? a.stride[a.ndim - 2] : p.k;
  p.a.col_stride = a.stride[a.ndim - 1];
  p.b.data = b.data;
  p.b.row_stride = b.stride[own_b];
  p.b.col_stride = has_cols ? b.stride[b.ndim - 1] : p.k;
  AlignBatch(a, own_a, a, b, out, p.batch_dims, p.a.batch);
  AlignBatch(b, own_b, a, b, out, p.batch_dims, p.b.batch);
  // Each batch dimension of the result must have the size of the one in a or b.
  for (int d = 0; d < p.batch_dims; ++d) {
    if (p.batch[d] != 1 && p.a.batch[d] == 0 && p.b.batch[d] == 0) {
      const int from_a = d - (p.batch_dims - own_a), from_b = d - (p.batch_dims - own_b);
      const bool empty = (from_a >= 0 && a.shape[from_a] == p.batch[d]) ||
                         (from_b >= 0 && b.shape[from_b] == p.batch[d]);
      if (!empty) RefuseShapes(a, b, out);
    }
  }
  p.parts = Integer(args[3]);
  CheckParts(p);
  CheckUnit(a, p.a.row_stride, p.a.col_stride, p.m, p.k);
  CheckUnit(b, p.b.row_stride, p.b.col_stride, p.k, p.n);

  p.num_steps = 0;
  int next = kFirst;
  for (uint64_t steps = static_cast<uint64_t>(Integer(args[2])); steps != 0; steps >>= 4) {
    const int kind = static_cast<int>(steps & 15);
    if (kind < kStepAdd || kind > kStepSilu) Refuse("there is no step ", kind);
    if (p.num_steps == kMaxSteps) Refuse("at most ", kMaxSteps, " steps may follow a product");
    Step& step = p.steps[p.num_steps];
    MatrixBatch& operand = p.operands[p.num_steps];
    ++p.num_steps;
    step = Step{kind, p.type, nullptr, 0, 0};
    operand = MatrixBatch{};
    if (!HasOperand(kind)) continue;
    if (next >= args.size() - 1) Refuse("step ", p.num_steps, " lacks its operand");
    const View x(kName, "an operand", args[next++], 0);
    if ((x.type == kFloat64) != (p.type == kFloat64)) {
      Refuse("operands of steps are float64 where the product is, and only there");
    }
    step.type = x.type;
    operand.data = x.data;
    for (int d = 0; d < out.ndim; ++d) {
      const int from = d - (out.ndim - x.ndim);
      int64_t stride = 0;
      if (from >= 0 && x.shape[from] != 1) {
        if (x.shape[from] != out.shape[d]) {
          Refuse("an operand ", ShapeText(*x.tensor), " does not broadcast to ",
                 ShapeText(*out.tensor));
        }
        stride = x.stride[from];
      }
      if (d < p.batch_dims) {
        operand.batch[d] = stride;
      } else if (has_rows && d == at_rows) {
        operand.row_stride = stride;
      } else {
        operand.col_stride = stride;
      }
    }
    if (x.ndim > out.ndim) {
      Refuse("an operand ", ShapeText(*x.tensor), " does not broadcast to ",
             ShapeText(*out.tensor));
    }
  }
  if (next != args.size() - 1) Refuse(args.size() - 1 - next, " operands are left over");
  Multiply(library, &p, kKernelThreads);
  *result = nullptr;
}

ffi::String BlasInfo() {
  ffi::json::Object json;
  json.Set("library", ffi::String(Library().config));
  json.Set("kernels", ffi::String(BlasInstructionSet()));
  json.Set("threads", MaxKernelThreads());
  return ffi::json::Stringify(json);
}

void UseBlasKernels(ffi::String name) {
  if (!UseBlasInstructionSet(name.c_str())) {
    Fail(kind::kValue, "this machine has no kernels ", std::string(name),
         "; auto, avx512bf16, avx512, avx2 and portable are known");
  }
}

}  // namespace tvm_ipc
