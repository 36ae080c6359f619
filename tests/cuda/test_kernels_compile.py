# SPDX-License-Identifier: Apache-2.0
"""What NVRTC makes of the CUDA kernels: nothing in memory of threads, and the accesses wanted."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

KERNELS = Path(__file__).resolve().parents[2] / "tvm_ipc/csrc/cuda/kernels"
TYPES = (
    *("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "int64", "uint64", "bool"),
)
SOURCES = {
    "reduce": tuple(
        f"{way}_{t}" for t in TYPES for way in ("push", "push_slices", "pull", "parts")
    ),
    "norm": tuple(f"{way}_{t}" for t in TYPES[:3] for way in ("push_norm", "norm")),
    "move": (
        *("move", "move_push", "meet", "show", "await", "send", "receive"),
        *("write_pattern", "check_pattern"),
    ),
}


@cache
def compiler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compile_kernels", KERNELS / "compile.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.find_nvrtc()
    except module.CompileError as why:
        pytest.skip(f"NVRTC 13.0 is not here: {why}")
    return module


@cache
def ptx(source: str) -> dict[str, str]:
    """The PTX of each kernel of a source, by its name, with what it calls behind it."""
    text = compiler().compiled(KERNELS / f"{source}.cu", "compute_90").decode().rstrip("\0")
    head, *entries = re.split(r"\.visible \.entry ", text)
    return {entry[: entry.index("(")]: entry + head for entry in entries}


@pytest.mark.parametrize("source", SOURCES)
def test_every_kernel_is_there(source: str) -> None:
    assert set(ptx(source)) == {f"tvm_ipc_{name}" for name in SOURCES[source]}


@pytest.mark.parametrize("source", ["norm", "move"])
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_kernels_keep_nothing_in_memory(source: str, target: str) -> None:
    # That they do in any source fails the build; here it is seen to be looked at.
    image = compiler().compiled(KERNELS / f"{source}.cu", target)
    frames = compiler().frames(image)
    assert {f"tvm_ipc_{name}" for name in SOURCES[source]} <= set(frames)
    assert set(frames.values()) == {0}


def test_a_kernel_that_keeps_something_in_memory_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "spills.cu"
    source.write_text(
        'extern "C" __global__ void spills(int* p, int n) {\n'
        "  int local[64] = {};\n"
        "  for (int i = 0; i < n; ++i) local[p[i] & 63] += local[p[i + n] & 63] + i;\n"
        "  for (int i = 0; i < n; ++i) p[i] = local[p[i] & 63];\n"
        "}\n"
    )
    for target in ("sm_90", "compute_90"):
        with pytest.raises(compiler().CompileError, match="kept in memory of threads"):
            compiler().compiled(source, target)


@pytest.mark.parametrize("name", ["push", "push_slices"])
def test_pushed_words_are_whole_and_wait_for_nothing(name: str) -> None:
    code = ptx("reduce")[f"tvm_ipc_{name}_float16"]
    assert "st.relaxed.sys.global.v2.b64" in code
    assert "ld.relaxed.sys.global.v2.b64" in code
    assert "membar" not in code
    assert "fence" not in code


@pytest.mark.parametrize(("source", "name"), [("reduce", "pull_bfloat16"), ("move", "move")])
def test_what_is_read_where_it_lies_is_released_and_acquired(source: str, name: str) -> None:
    code = ptx(source)[f"tvm_ipc_{name}"]
    for access in ("st.release.sys.global.v2.b64", "ld.acquire.sys.global.v2.b64"):
        assert access in code, access
    for access in ("st.release.sys.b32", "ld.acquire.sys.b32"):
        assert access in code, access
    # 128 bits at a time, and not by way of the first cache.
    assert "ld.global.L1::no_allocate.v2.b64" in code
    assert "st.global.v2.b64" in code


@pytest.mark.parametrize("name", ["push_float32", "pull_float32", "push_slices_float16"])
def test_arithmetic_rounds_as_that_of_cpus(name: str) -> None:
    code = ptx("reduce")[f"tvm_ipc_{name}"]
    assert not re.search(r"\bfma\.|\bmad\.(rn|f32)", code), "a multiply and an add are not fused"
    assert ".ftz" not in code
    assert "div.approx" not in code
    assert "div.full" not in code
    assert "div.rn.f32" in code
