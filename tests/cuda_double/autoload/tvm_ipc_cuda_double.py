# SPDX-License-Identifier: Apache-2.0
"""TVM's compiler of CUDA sources, where the double is: g++ and a header.

`import tvm` calls `register`, in each process that has this folder on its path.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import tempfile
from pathlib import Path

SHIM = Path(__file__).resolve().parents[1] / "shim"
#: Hidden: a kernel named like a function of the C library is still the kernel.
FLAGS = (
    *("-std=c++17", "-O1", "-fPIC", "-shared", "-w", "-fvisibility=hidden"),
    *("-fno-strict-aliasing", "-ffp-contract=off"),
)
KERNEL = re.compile(
    r'extern "C" __global__ void (?:__launch_bounds__\((?P<threads>\d+)[^)]*\) )?'
    r"(?P<name>\w+)\([^;{]*\)\s*\{"
)
SHARED = re.compile(
    r"(?<!extern )__shared__ (?:(?:alignas|__align__)\(\d+\) )?(?P<type>[\w:]+) "
    r"(?P<name>\w+)\[(?P<count>\d+)\];"
)
DYNAMIC = re.compile(
    r"extern __shared__ (?:(?:alignas|__align__)\(\d+\) )?(?P<type>[\w:]+) (?P<name>\w+)\[\];"
)
#: Bytes between the beginnings of two arrays of a block are a multiple of it.
ALIGNMENT = 128


def for_cpu(code: str) -> str:
    """Arrays that a block shares get their place from whoever runs it; kernels get descriptors."""
    pieces = []
    starts = [match.start() for match in KERNEL.finditer(code)]
    ends = [*starts, len(code)][1:]
    descriptors = []
    for start, end in zip(starts, ends, strict=True):
        head = KERNEL.match(code, start)
        assert head is not None
        sizes = ["0"]

        def place(match: re.Match[str], sizes: list[str] = sizes) -> str:
            offset = " + ".join(sizes)
            sizes.append(
                f"(sizeof({match['type']}) * {match['count']} + {ALIGNMENT - 1}) "
                f"/ {ALIGNMENT} * {ALIGNMENT}"
            )
            return (
                f"auto& {match['name']} = *reinterpret_cast<{match['type']}(*)[{match['count']}]>"
                f"(static_cast<char*>(cuda_on_cpu::now->static_shared) + {offset});"
            )

        body = SHARED.sub(place, code[start:end])
        body = DYNAMIC.sub(
            lambda match: (
                f"auto* {match['name']} = "
                f"static_cast<{match['type']}*>(cuda_on_cpu::now->dynamic_shared);"
            ),
            body,
        )
        if "__shared__" in body:
            line = next(line for line in body.splitlines() if "__shared__" in line)
            raise ValueError(f"cuda double: shared memory of an unknown form: {line.strip()}")
        pieces.append(body)
        shared = " + ".join(sizes)
        threads = head["threads"] or 1024
        descriptors.append(f"CUDA_ON_CPU_KERNEL({head['name']}, {shared}, {threads})\n")
    first = starts[0] if starts else len(code)
    return "".join(['#include "cuda_on_cpu.h"\n', code[:first], *pieces, "\n", *descriptors])


def compile_cuda(code: str) -> bytes:
    """A shared library for the CPU in place of a cubin."""
    source = for_cpu(code)
    compiler = os.environ.get("CXX", "g++")
    kept = os.environ.get("TVM_IPC_DOUBLE_CACHE")
    digest = hashlib.sha256(source.encode())
    for header in sorted([*SHIM.glob("*.h"), SHIM.parent / "kernel_abi.h"]):
        digest.update(header.read_bytes())
    digest.update(" ".join([compiler, *FLAGS]).encode())
    library = Path(kept, f"{digest.hexdigest()[:32]}.so") if kept else None
    if library is not None and library.exists():
        return library.read_bytes()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernels.cc")
        path.write_text(source)
        made = Path(folder, "kernels.so")
        done = subprocess.run(
            [compiler, *FLAGS, f"-I{SHIM}", str(path), "-o", str(made)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"cuda double: {compiler} failed\n{done.stderr}\n{code}")
        data = made.read_bytes()
        if library is not None:
            library.parent.mkdir(parents=True, exist_ok=True)
            temporary = library.with_suffix(f".{os.getpid()}")
            temporary.write_bytes(data)
            temporary.rename(library)
    return data


def register() -> None:
    """Replace what TVM registers: NVRTC or nvcc."""
    import tvm_ffi

    tvm_ffi.register_global_func("tvm_callback_cuda_compile", compile_cuda, override=True)
