/* SPDX-License-Identifier: Apache-2.0 */
/*!
 * \file cuda_kernels_cpu.cc
 * \brief The CUDA kernels, compiled for the CPU: for the native tests, and as a shared library for
 *        tests/cuda_double. Wants csrc among the folders that are searched for headers.
 */
#define TVM_IPC_KERNEL_DEVICE "../../../../tests/native/cuda_cpu_device.h"

// The pragmas are NVRTC's.
#pragma GCC diagnostic ignored "-Wunknown-pragmas"

#include "cuda/kernels/move.cu"    // NOLINT
#include "cuda/kernels/norm.cu"    // NOLINT
#include "cuda/kernels/reduce.cu"  // NOLINT
