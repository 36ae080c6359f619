# SPDX-License-Identifier: Apache-2.0
"""Kernels of a CPU: what they compute, in stages, and loops in which it is computed fast."""
