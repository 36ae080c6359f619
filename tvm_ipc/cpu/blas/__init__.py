# SPDX-License-Identifier: Apache-2.0
"""Analysis and rewriting of matmuls that are offloaded to BLAS."""
