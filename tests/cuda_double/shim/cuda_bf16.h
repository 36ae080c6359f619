// SPDX-License-Identifier: Apache-2.0
// Included by generated sources; cuda_on_cpu.h has what they need of it.
