# SPDX-License-Identifier: Apache-2.0
"""The table of packed functions and what the package registers are the same."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from enum import Enum, IntEnum, IntFlag
from pathlib import Path

import pytest

from tvm_ipc import packed_functions
from tvm_ipc.packed_functions import (
    KINDS,
    RESULT,
    ROLES,
    Function,
    ReduceKind,
    Registered,
    Sync,
    constants_shared_with_native_library,
    generate_collective_functions,
)

PREFIXES = (
    "tvm_ipc.",
    "runtime.disco.cuda_ipc.",
    *(f"runtime.disco.{backend}." for backend in packed_functions.BACKENDS),
)
#: Prints the signature of each global function: as `(Tensor, int) -> None`, "" where it has none.
LIST_FUNCTIONS = """
import json, tvm_ipc
tvm_ipc.Session
from tvm_ffi.core import TypeSchema
from tvm_ffi.registry import get_global_func_metadata, list_global_func_names

def signature(name):
    schema = get_global_func_metadata(name).get("type_schema")
    types = TypeSchema.from_json_str(schema) if schema else None
    if types is None or not types.args:
        return ""
    result, *parameters = [one.repr(lambda name: name.rpartition(".")[2]) for one in types.args]
    return f"({', '.join(parameters)}) -> {result}"

names = [n for n in list_global_func_names() if n.startswith(("tvm_ipc.", "runtime.disco."))]
print(json.dumps({name: signature(name) for name in names}))
"""


@pytest.fixture(scope="module", params=["0", "1"], ids=["full", "runtime_only"])
def registered(request: pytest.FixtureRequest, run_python: Callable[..., str]) -> dict[str, str]:
    return dict(json.loads(run_python(LIST_FUNCTIONS, TVM_USE_RUNTIME_LIB=request.param)))


def types_of(function: Function) -> str:
    """The signature as tvm-ffi has it."""
    types = [ROLES.get(one.type, one.type) for one in function.parameters]
    result = function.result.replace("Function", "Callable[..., Any]")
    return f"({', '.join(types)}) -> {result}".replace("(Function", "(Callable[..., Any]")


def test_names_are_listed_once() -> None:
    counts = Counter(function.name for function in packed_functions.FUNCTIONS)
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_listed_function_is_registered(registered: dict[str, str]) -> None:
    assert [f.name for f in packed_functions.FUNCTIONS if f.name not in registered] == []


def test_every_registered_function_is_listed(registered: dict[str, str]) -> None:
    listed = {function.name for function in packed_functions.FUNCTIONS}
    assert sorted(n for n in registered if n.startswith(PREFIXES) and n not in listed) == []


def test_functions_are_registered_with_the_types_that_are_listed(
    registered: dict[str, str],
) -> None:
    typed = (Registered.NATIVE, Registered.UPSTREAM)
    wanted = {
        f.name: types_of(f) if f.registered in typed else "" for f in packed_functions.FUNCTIONS
    }
    assert {name: registered[name] for name in wanted} == wanted


#: The parameters of `csrc/core/collective_list.h`, as signatures have them.
NATIVE_PARAMETERS = {
    "Send": "send: Tensor",
    "SendOfRoot": "send: Tensor | None",
    "Recv": "recv: Tensor",
    "RecvOfRoot": "recv: Tensor | None",
    "Kind": "kind: ReduceKind",
    "Root": "root: int",
    "Team": "team: Team",
    "AllReduceStrategy": "strategy: AllReduceStrategy",
    "Flags": "flags: CollectiveFlag",
    "Splits": "parts: Shape",
    "Sources": "sources: Shape",
    "Residual": "residual: Tensor",
    "Weight": "weight: Tensor",
    "Bias": "bias: Tensor",
    "Epsilon": "epsilon: float",
    "ResidualOut": "residual_out: Tensor",
    "NormOut": "norm_out: Tensor",
    "SendRows": "send: Tensor",
    "Counts": "counts: Tensor",
    "RecvCounts": "recv_counts: Tensor",
}


def test_the_native_list_of_collectives_has_the_parameters_that_are_listed() -> None:
    """Types alone do not tell a kind from a strategy or flags."""
    header = Path(__file__).resolve().parents[2] / "tvm_ipc/csrc/core/collective_list.h"
    source = re.sub(r"\s*\\\n\s*", " ", header.read_text())
    entries = [
        ("tvm_ipc." + name, parameters)
        for name, parameters in re.findall(
            r'ENTRY\(\w+, "(\w+)", \w+, [01], [01], [01], ([\w, ]+)\)', source
        )
    ] + [
        (f"runtime.disco.{backend}.{name}", parameters)
        for name, parameters in re.findall(r'ENTRY\("(\w+)", \w+, ([\w, ]+)\)', source)
        for backend in packed_functions.BACKENDS
    ]
    assert len(entries) >= 11 + 5 * len(packed_functions.BACKENDS)
    for name, parameters in entries:
        function = packed_functions.find(name)
        assert function is not None, name
        wanted = [f"{one.name}: {one.type}" for one in function.parameters]
        assert [NATIVE_PARAMETERS[one] for one in parameters.split(", ")] == wanted, name


def test_only_functions_of_any_number_of_arguments_are_registered_without_types() -> None:
    untyped = {f.name for f in packed_functions.FUNCTIONS if f.registered is Registered.UNTYPED}
    assert untyped == {
        f.name for f in packed_functions.FUNCTIONS if any(p.variadic for p in f.parameters)
    }


@pytest.mark.parametrize("function", packed_functions.PROGRAMS.values(), ids=lambda one: one.name)
def test_effects_of_what_programs_call_are_complete(function: Function) -> None:
    memory = {p.name for p in function.parameters if re.match("Tensor|Storage|Any", p.type)}
    effects = {*function.reads, *function.writes, function.result_of} - {""}
    assert effects == memory or function.name == "tvm_ipc.arena_offset"
    assert set(function.peers_read) <= set(function.reads)
    assert set(function.scopes) <= memory | {RESULT}
    if function.peers_read:
        assert function.sync in (Sync.PARTIAL, Sync.BARRIER)
    if function.general_form:
        general = packed_functions.PROGRAMS[function.general_form]
        own = {p.name for p in function.parameters}
        assert {p.name for p in general.parameters} == own | set(function.defaults)
        assert own.isdisjoint(function.defaults)
        for effect in ("reads", "writes", "scopes", "peers_read", "sync"):
            assert getattr(function, effect) == getattr(general, effect)


def test_numbers_and_names_are_those_of_the_library(run_python: Callable[..., str]) -> None:
    code = "import tvm_ipc, tvm_ffi; tvm_ipc.Session; call = tvm_ffi.get_global_func"
    code += "; print(call('tvm_ipc.numbers')()); print(call('runtime.disco.compiled_ccl')())"
    text, backend = run_python(code).splitlines()
    library = json.loads(text)
    reduced = library.pop("reduced")
    public = {
        name: value
        for name, value in vars(constants_shared_with_native_library).items()
        if name[0].isupper()
    }
    mine: dict[str, object] = {
        name: {one: int(number) for one, number in value.__members__.items()}
        for name, value in public.items()
        if isinstance(value, type) and issubclass(value, Enum) and value not in (IntEnum, IntFlag)
    }
    mine |= {name: value for name, value in public.items() if isinstance(value, (int, str))}
    mine["BACKENDS"] = [
        [name, constants_shared_with_native_library.DEVICES[on]]
        for name, on in constants_shared_with_native_library.BACKENDS.items()
    ]
    assert constants_shared_with_native_library.backends_of("cpu")[0] == backend
    assert mine == library
    assert {kind.name: {t for t in reduced["SUM"] if kind.takes(t)} for kind in ReduceKind} == {
        name: set(types) for name, types in reduced.items()
    }
    assert set(constants_shared_with_native_library.REDUCED_TYPES) == set(reduced["SUM"])


def test_wrong_arguments_of_packed_functions_are_refused_with_the_types_that_are_right(
    run_python: Callable[..., str],
) -> None:
    code = """
import tvm_ipc, tvm_ffi
tvm_ipc.Session
for name, *arguments in [
    ("tvm_ipc.require_bounds", "n", 1, 2),
    ("tvm_ipc.require_bounds", "n", "m", 1, 2),
    ("tvm_ipc.allreduce", 1, 2, 3, 4, 5, 6),
    ("runtime.disco.shm.sync_worker", None),
]:
    try:
        tvm_ffi.get_global_func(name)(*arguments)
    except TypeError as error:
        print(error)
"""
    bounds = "`tvm_ipc.require_bounds(0: str, 1: int, 2: int, 3: int) -> void`. Expected "
    team = "2: Variant<int, ffi.Shape>"
    reduce = f"`tvm_ipc.allreduce(0: DLTensor*, 1: int, {team}, 3: int, 4: int, 5: DLTensor*)"
    wrong_type = "Mismatched type on argument #{} when calling: "
    wrong_number = "Mismatched number of arguments when calling: "
    assert run_python(code).splitlines() == [
        f"{wrong_number}{bounds}4 but got 3 arguments",
        f"{wrong_type.format(1)}{bounds}`int` but got `ffi.SmallStr`",
        f"{wrong_type.format(0)}{reduce} -> void`. Expected `DLTensor*` but got `int`",
        f"{wrong_number}`runtime.disco.shm.sync_worker() -> void`. Expected 0 but got 1 arguments",
    ]


@pytest.mark.parametrize(
    "folder",
    [
        "analysis",
        "cpu/blas",
        "cpu/kernels",
        "cpu/offload_blas.py",
        "cpu/schedule_for_cpu.py",
        "gpu/rewrite_cuda_graph.py",
        "spmd",
        "tools/explain",
        "tools/inspection",
        "transform",
        "verify",
        "pipeline.py",
    ],
)
def test_compilers_take_names_from_the_contract(folder: str) -> None:
    names = {function.name for function in packed_functions.FUNCTIONS}
    place = Path(packed_functions.__file__).parents[1] / folder
    for path in [place] if place.is_file() else place.rglob("*.py"):
        said = {
            n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant)
        }
        assert not said & names, path.name


def test_arguments_are_bound_to_parameters() -> None:
    matmul = packed_functions.PROGRAMS["tvm_ipc.blas.matmul"]
    for count, operands in ((7, 0), (8, 1), (10, 3)):
        bound = matmul.bind(count)
        assert bound is not None
        names = [parameter.name for parameter in bound]
        numbers = ["a_axes", "b_axes", "steps", "parts"]
        assert names == [*numbers, "a", "b", *["operands"] * operands, "out"]
        assert matmul.positions(matmul.writes, count) == (count - 1,)
        assert matmul.positions(matmul.reads, count) == tuple(range(4, count - 1))
    assert matmul.bind(6) is None
    assert matmul.positions(matmul.writes, 6) == ()


def test_effects_of_operands_that_are_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"mine\.f: the effects name other, but the signature is "):
        Function("mine.f", "(one: Tensor)", "", reads=("one", "other"))


@pytest.mark.parametrize("backend", ["", "shm.", "nccl."])
def test_collectives_are_found_under_the_name_of_each_backend(backend: str) -> None:
    found = packed_functions.find(f"runtime.disco.{backend}allgather")
    assert found is not None
    assert found.writes == ("recv",)
    assert packed_functions.find(f"runtime.disco.{backend}unheard") is None
    assert packed_functions.find("runtime.disco.shm.nccl.allgather") is None
    assert packed_functions.find("allgather") is None


def test_what_a_meeting_proves_of_another_team() -> None:
    world, group, other = packed_functions.Team.WORLD, packed_functions.Team.GROUP, 2
    assert all(packed_functions.Team.contains(world, team) for team in (world, group, other))
    assert packed_functions.Team.contains(other, other)
    assert not any(packed_functions.Team.contains(group, team) for team in (world, other))
    assert not any(packed_functions.Team.contains(other, team) for team in (world, group, 3))


def test_the_stub_has_what_the_entries_generate() -> None:
    stub = generate_collective_functions.STUB
    remedy = f"run `cmake --build build` or `python -m {generate_collective_functions.__name__}`"
    assert stub.is_file(), f"{stub} is missing; {remedy}"
    assert stub.read_text() == generate_collective_functions.stub(), f"{stub} is old; {remedy}"


def test_the_stub_is_written_without_installed_packages(tmp_path: Path) -> None:
    """As the build does, in an environment that may have no package or another tvm_ipc."""
    stub = tmp_path / "stub.pyi"
    module = generate_collective_functions.__name__
    parent = Path(generate_collective_functions.__file__).parents[2]
    subprocess.run([sys.executable, "-E", "-S", "-B", "-m", module, stub], cwd=parent, check=True)
    assert stub.read_text() == generate_collective_functions.stub()
    assert list(tmp_path.iterdir()) == [stub]


@pytest.mark.parametrize(
    ("name", "received"),
    [
        ("allreduce", 1500),
        ("reduce_scatter", 750),
        ("reduce", 1500),
        ("allgather", 3000),
        ("gather", 3000),
        ("broadcast", 1000),
        ("scatter", 250),
        ("take_shard", 0),
        ("all_to_all", 750),
        ("permute", 1000),
        ("send_recv", 1000),
    ],
)
def test_bytes_that_arrive_at_one_of_four_ranks(name: str, received: int) -> None:
    assert KINDS[name].bytes_received(1000, 4) == received
