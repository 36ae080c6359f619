# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: the choice of stages, the split of functions, and the lowering."""
