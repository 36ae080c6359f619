# SPDX-License-Identifier: Apache-2.0
"""What follows an all-reduce, for `FuseAllReduceEpilogue`."""
