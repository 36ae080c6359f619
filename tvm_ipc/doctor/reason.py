# SPDX-License-Identifier: Apache-2.0
"""Errors as reasons in an answer: one line each."""

from __future__ import annotations

from tvm_ipc.errors import IPCError


def reason_of(error: Exception) -> str:
    """Return the first line of an error, with its kind if it is none of ours."""
    text = (str(error).splitlines() or [""])[0]
    ours = isinstance(error, IPCError)
    return text if ours else f"{type(error).__name__}: {text}"
