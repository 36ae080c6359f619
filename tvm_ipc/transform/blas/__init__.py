# SPDX-License-Identifier: Apache-2.0
"""Matrix products for the BLAS: what one is, and how it becomes a call."""
