# SPDX-License-Identifier: Apache-2.0
"""Analysis of kernels as stages, and generation of vectorizable loops, for `ScheduleForCPU`."""
