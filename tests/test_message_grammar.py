# SPDX-License-Identifier: Apache-2.0
"""Messages are whole sentences for no thing, for one, and for several."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tvm_ipc import arguments, comm
from tvm_ipc.comm import Mesh
from tvm_ipc.errors import TransformError
from tvm_ipc.spmd.kv_cache_tensor_placements import names_of_caches
from tvm_ipc.spmd.pipeline_parallelism.choose_stages import check_stages
from tvm_ipc.spmd.plan_parser import read_plan
from tvm_ipc.transform.inline_compiler_functions import _check_recursion

PACKAGE = Path(tvm_ipc.__file__).parent
#: The folders whose messages are read here, besides pipeline.py.
FOLDERS = ("spmd", "transform", "runtime")
NOUNS = (
    *("workers", "ranks", "groups", "parameters", "arguments", "results", "tensors", "operands"),
    *("stages", "patterns", "layers", "entries", "scopes", "chunks", "rows", "weights"),
    *("processes", "threads", "collectives", "functions", "modules", "axes", "heads", "blocks"),
)
#: A number directly before a noun in the plural.
NUMBER_OF_THINGS = re.compile(rf"\{{([^{{}}]*)\}} ({'|'.join(NOUNS)})\b")
#: Expressions that are never 1 where they stand before a noun.
SEVERAL = {
    *("self.num_groups", "len(owners)", "choice.chunks"),  # printed only if there are several
    *("workers", "ranks", "site.ranks", "division.copies(workers)"),  # that share a tensor
    "exposed",  # more than the most
    "count",  # of stages, in a program with fewer layers
}


# ---- the functions that build the clauses ---------------------------------------------------


def test_numbers_with_a_noun() -> None:
    numbers = [arguments.counted(n, "worker") for n in range(3)]
    assert numbers == ["0 workers", "1 worker", "2 workers"]
    assert arguments.counted(1, "process") == "1 process"
    assert arguments.counted(2, "process") == "2 processes"
    assert arguments.counted(3, "entry") == "3 entries"


@pytest.mark.parametrize(
    ("names", "clause"),
    [
        ([], "there is no axis"),
        (["x"], "the only axis is 'x'"),
        (["x", "y"], "the axes are 'x', 'y'"),
        (list("abcde"), "the axes are 'a', 'b', 'c', 'd', 'e'"),
        (list("abcdefg"), "the axes are 'a', 'b', 'c', 'd', 'e' and 2 more"),
    ],
)
def test_lists_of_names(names: list[str], clause: str) -> None:
    assert arguments.listed("axis", names) == clause


def test_similar_names() -> None:
    assert arguments.similar(["x"]) == "a similar name is 'x'"
    assert arguments.similar(["x", "y"]) == "similar names are 'x', 'y'"


def test_ranks() -> None:
    assert [arguments.ranks_below(n) for n in (1, 2, 5)] == ["0", "0 to 1", "0 to 4"]


# ---- messages of each part ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shapes", "clause"),
    [
        ({}, "there is no parameter"),
        ({"w": (4, 4)}, "the only parameter is 'w'"),
        ({"w": (4, 4), "v": (4,)}, "the parameters are 'w', 'v'"),
        ({f"w{k}": (4,) for k in range(7)}, "'w3', 'w4' and 2 more"),
    ],
)
def test_a_pattern_that_matches_nothing(shapes: dict[str, tuple[int, ...]], clause: str) -> None:
    with pytest.raises(ValueError, match=f"matches no parameter; .*{clause}$"):
        read_plan({"nothing": "colwise"}, Mesh({"tp": 2}), shapes)


def test_an_axis_that_a_mesh_does_not_have() -> None:
    with pytest.raises(ValueError, match=r"'pp' is no axis of the mesh; the only axis is 'tp'$"):
        read_plan({"w": {"pp": "colwise"}}, Mesh({"tp": 2}), {"w": (4, 4)})


@pytest.mark.parametrize(
    ("inputs", "clause"),
    [
        ([], "there is no input;"),
        (["x"], "the only input is 'x';"),
        (["past_k"], "a similar name is 'past_k';"),
    ],
)
def test_a_cache_that_is_no_input(inputs: list[str], clause: str) -> None:
    with pytest.raises(ValueError, match=f"'pass_k' matches no input; {clause}"):
        names_of_caches(["pass_k"], inputs)


def test_patterns_of_stages() -> None:
    with pytest.raises(ValueError, match=r"has 2 stages along 'pp', but \[\] has 0 patterns;"):
        check_stages([], Mesh({"pp": 2}))
    with pytest.raises(ValueError, match=r"has 1 stage along 'pp', but \['w'\] has 1 pattern;"):
        check_stages(["w"], Mesh({"tp": 2}))


def program(operation: Any) -> tvm.IRModule:
    """Return a module whose function `main` applies an operation to an input."""
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        builder.emit_func_output(builder.emit(operation(x)))
    return builder.get()


@pytest.mark.parametrize(
    ("workers", "world_size", "words"),
    [
        (1, 2, "over 1 worker, but a group has 2; build"),
        (2, 1, "over 2 workers, but a group has 1; build"),
    ],
)
def test_a_module_for_another_number_of_workers(workers: int, world_size: int, words: str) -> None:
    mod = program(lambda x: relax.op.ccl.allgather(x, workers))
    with pytest.raises(TransformError, match=words):
        tvm_ipc.get_pipeline("llvm", world_size)(mod)


@pytest.mark.parametrize(
    ("world_size", "words"),
    [(1, "is 1; use a mesh of the ranks 0, or"), (3, "is 3; use a mesh of the ranks 0 to 2, or")],
)
def test_a_mesh_for_another_number_of_workers(world_size: int, words: str) -> None:
    mod = program(lambda x: comm.place(x, Mesh({"tp": 2}), {"tp": comm.Replica()}))
    with pytest.raises(TransformError, match=f"places tensors on Mesh.*, but world_size {words}"):
        tvm_ipc.get_pipeline("llvm", world_size)(mod)


RECURSIVE = """
@I.ir_module
class Module:
    @R.function
    def f(x: R.Tensor((4,), "float32")) -> R.Tensor((4,), "float32"):
        y: R.Tensor((4,), "float32") = Module.f(x)
        return y
"""


def test_recursion_of_one_function() -> None:
    mod = tvm.script.from_source(RECURSIVE)
    with pytest.raises(TransformError, match="'f' calls itself and cannot be inlined"):
        _check_recursion(dict(mod.functions_items()))


def test_a_session_of_one_worker() -> None:
    with tvm_ipc.Session(1) as session:
        assert repr(session) == "<tvm_ipc.Session: 1 process, open>"
        with pytest.raises(ValueError, match="the session has 1 worker; pass an array whose first"):
            session.scatter(np.zeros((2, 2)))
        with pytest.raises(ValueError, match=r"each 0 and once, such as \[0\], not"):
            session.team([1])
        with pytest.raises(ValueError, match="is the rank of a worker, 0, not 1"):
            session.get(session.put(np.zeros(2)), 1)
    with pytest.raises(ValueError, match="device_ids is the number of a device, not"):
        tvm_ipc.Session(1, device="cuda", device_ids=[0, 1])


# ---- targets --------------------------------------------------------------------------------

REFUSED = """
import tvm_ipc
for target in ("rocm", "nvptx -mcpu=sm_80", '{"kind": "rocm"}', {"kind": "rocm"}, "vulkan"):
    try:
        tvm_ipc.get_pipeline(target, 2)
    except ValueError as error:
        print(error)
"""


def test_an_unsupported_target_is_refused_before_tvm_prints_warnings() -> None:
    result = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == 5
    supported = "supported are 'llvm' and 'c' for CPUs, and 'cuda' for NVIDIA GPUs"
    assert lines[0] == (
        f"get_pipeline: target is 'rocm', but tvm_ipc has no collectives for 'rocm'; {supported}"
    )
    assert all(line.endswith(supported) for line in lines)


@pytest.mark.parametrize(
    "target",
    ["llvm", '{"kind": "c"}', {"kind": "llvm", "mcpu": "core-avx2"}, "nvidia/nvidia-h100"],
)
def test_supported_targets(target: Any) -> None:
    tvm_ipc.get_pipeline(target, 2)
    tvm_ipc.get_pipeline(tvm.target.Target(target), 2)


@pytest.mark.parametrize("target", ["nosuch", "", "{", {"tag": "nosuch"}, {"kind": 3}])
def test_what_is_no_target(target: Any) -> None:
    with pytest.raises(ValueError, match="get_pipeline: target is one of 'llvm', 'c', 'cuda'"):
        tvm_ipc.get_pipeline(target, 2)


# ---- all messages ---------------------------------------------------------------------------


def messages(source: str) -> Iterator[str]:
    """Yield the f-strings of a file, with the text of each expression in braces."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                f"{{{ast.unparse(part.value)}}}"
                if isinstance(part, ast.FormattedValue)
                else str(part.value)  # type: ignore[attr-defined]
                for part in node.values
            )


def test_no_message_has_a_number_before_a_fixed_plural() -> None:
    files = [path for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    found = [
        f"{path.relative_to(PACKAGE)}: {match[0]}"
        for path in [*files, PACKAGE / "pipeline.py"]
        for text in messages(path.read_text())
        for match in NUMBER_OF_THINGS.finditer(text)
        if match[1] not in SEVERAL
    ]
    assert found == []


def test_such_a_message_is_found() -> None:
    (text,) = messages("f'has {len(x)} workers'")
    assert NUMBER_OF_THINGS.search(text)
    (text,) = messages("f'has {counted(len(x), noun)}'")
    assert not NUMBER_OF_THINGS.search(text)
