# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc run`: a folder and a prompt in, text out."""
