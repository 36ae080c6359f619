# SPDX-License-Identifier: Apache-2.0
"""Provide the commands of `tvm-ipc`; this package may import all others."""
