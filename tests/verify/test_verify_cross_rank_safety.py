# SPDX-License-Identifier: Apache-2.0
"""verify_cross_rank_safety: right plans pass, and each way to break one is seen."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

import tvm_ipc
from tests.transform.loads import power
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.verify_cross_rank_safety import (
    HazardKind,
    VerifyCrossRankSafety,
    verify_cross_rank_safety,
)

BARRIER, NO_EXIT_BARRIER = 0, 1
X = 'x: R.Tensor((256,), "float32")'

HEADER = """
@I.ir_module
class Module:
    @T.prim_func(private=True, s_tir=True)
    def double(x: T.Buffer((256,), "float32"), y: T.Buffer((256,), "float32")):
        for i in range(256):
            with T.sblock("y"):
                vi = T.axis.spatial(256, i)
                y[vi] = x[vi] + x[vi]
    @T.prim_func(private=True, s_tir=True)
    def bump(x: T.Buffer((256,), "float32"), y: T.Buffer((256,), "float32")):
        flat = T.decl_buffer((256,), data=x.data)
        for i in range(256):
            with T.sblock("y"):
                vi = T.axis.spatial(256, i)
                flat[vi] = flat[vi] + T.float32(1)
                y[vi] = T.float32(0)
    @T.prim_func(private=True, s_tir=True)
    def window(x: T.Buffer((256,), "float32"), y: T.Buffer((256,), "float32")):
        for i in range(2):
            with T.sblock("y"):
                vi = T.axis.spatial(2, i)
                T.reads(y[0:256])
                T.writes(x[vi * 128 : vi * 128 + 128])
                half = T.match_buffer(x[vi * 128 : vi * 128 + 128], (128,), "float32")
                half[0] = y[0]
"""


def storage(name: str, size: int | str, scope: str = "ipc_memory") -> str:
    return (
        f"{name}: R.Any = R.memory.alloc_storage(R.shape([{size}]), R.prim_value(0), "
        f'R.str("{scope}"), R.dtype("uint8"))'
    )


def tensor(name: str, storage: str, offset: int | str = 0, size: int | str = 256) -> str:
    return (
        f'{name}: R.Tensor(({size},), "float32") = R.memory.alloc_tensor({storage}, '
        f'R.prim_value({offset}), R.shape([{size}]), R.dtype("float32"), R.prim_value(0))'
    )


def own(name: str, scope: str = "global") -> str:
    return (
        f'{name}: R.Tensor((256,), "float32") = R.builtin.alloc_tensor(R.shape([256]), '
        f'R.dtype("float32"), R.prim_value(0), R.str("{scope}"))'
    )


def double(source: str, target: str) -> str:
    return f"Module.double({source}, {target})"


def packed(name: str, *arguments: object, result: str = "_") -> str:
    call = f'R.call_packed("{name}", {", ".join(map(str, arguments))}, ty_args=(R.Any,))'
    return f"{result}: R.Any = {call}"


def allreduce(send: str, recv: str, flags: int = NO_EXIT_BARRIER, in_group: int = 0) -> str:
    numbers = (0, in_group, 1, flags)
    return packed("tvm_ipc.allreduce", send, *map("R.prim_value({})".format, numbers), recv)


def upstreams(send: str, recv: str, strategy: int = 1) -> str:
    return packed("runtime.disco.cuda_ipc.custom_allreduce", send, strategy, recv)


def kill(name: str) -> str:
    return f"R.memory.kill_{'storage' if name[0] == 's' else 'tensor'}({name})"


def function(body: list[str], name: str = "main", parameters: str = X, result: str = "out") -> str:
    private = "" if name == "main" else ", private=True"
    lines = [f"@R.function(pure=False{private})", f"def {name}({parameters}):"]
    lines += ["    " + line for part in [*body, f"return {result}"] for line in part.split("\n")]
    return "\n".join("    " + line for line in lines) + "\n"


def branch(then: list[str], otherwise: list[str], result: str = "r") -> str:
    lines = ["if c:", *(f"    {line}" for line in then), "else:"]
    lines += [f"    {line}" for line in otherwise]
    return "\n".join(lines)


def module(*functions: str) -> tvm.IRModule:
    return tvm.script.from_source(HEADER + "".join(functions))


def hazards(body: list[str], **options: bool) -> list[HazardKind]:
    return kinds(module(function(body)), **options)


def kinds(mod: tvm.IRModule, **options: bool) -> list[HazardKind]:
    """What is found of memory. Nobody says that ranks have the same conditions."""
    found = [hazard.kind for hazard in verify_cross_rank_safety(mod, **options)]
    return [kind for kind in found if kind is not HazardKind.BRANCHES]


def filled(size: int) -> list[str]:
    """Return the lines that compute `a` at the begin of a storage."""
    return [storage("s0", size), tensor("a", "s0"), double("x", "a")]


def end(send: str) -> list[str]:
    """Return the lines of a last collective, which has an exit barrier."""
    return [own("out"), allreduce(send, "out", BARRIER), kill("s0")]


#: Two layers: while peers may read `a`, the second layer writes beside it.
RIGHT = [
    *filled(2048),
    storage("s1", 1024, "global"),
    tensor("b", "s1"),
    allreduce("a", "b"),
    tensor("c", "s0", 1024),
    double("b", "c"),
    *end("c"),
]


def changed(old: str, *new: str) -> list[str]:
    assert RIGHT.count(old) == 1
    place = RIGHT.index(old)
    return [*RIGHT[:place], *new, *RIGHT[place + 1 :]]


def test_a_right_plan_passes():
    assert hazards(RIGHT) == []
    mod = module(function(RIGHT))
    assert VerifyCrossRankSafety()(mod).same_as(mod)


def test_it_is_seen_when_offsets_overlap():
    (hazard,) = verify_cross_rank_safety(
        module(function(changed(tensor("c", "s0", 1024), tensor("c", "s0", 1020))))
    )
    assert hazard.kind is HazardKind.WRITE
    assert (hazard.function, hazard.memory) == ("main", "s0")
    assert hazard.binding.endswith("double(b, c)")
    assert "tvm_ipc.allreduce(a" in hazard.related
    with pytest.raises(TransformError, match=r"(?s)1 hazard:.*'main'.*double\(b, c\).*barrier"):
        VerifyCrossRankSafety()(
            module(function(changed(tensor("c", "s0", 1024), tensor("c", "s0", 0))))
        )


def test_it_is_seen_when_the_last_collective_before_the_return_has_no_barrier():
    body = changed(allreduce("c", "out", BARRIER), allreduce("c", "out"))
    assert hazards(body) == [HazardKind.FREE]


def test_it_is_seen_when_the_storage_is_killed_before_the_next_meeting():
    body = [line for line in RIGHT if line != kill("s0")]
    body.insert(body.index(allreduce("a", "b")) + 1, kill("s0"))
    assert hazards(body) == [HazardKind.FREE]
    # While a tensor lies in it, a storage outlives its kill.
    assert hazards([*body, kill("a")]) == []


def test_it_is_seen_when_a_lifetime_ends_with_the_last_use():
    body = [
        own("a", "ipc_memory"),
        double("x", "a"),
        own("b"),
        allreduce("a", "b"),
        own("out"),
        packed("runtime.disco.allgather", "b", "R.prim_value(0)", "out"),
    ]
    assert hazards(body) == [HazardKind.FREE]
    assert hazards([*body, "R.memory.kill_tensor(a)"]) == []


def test_it_is_seen_when_the_separator_is_gone():
    gather = packed("runtime.disco.allgather", "b", "R.prim_value(0)", "d")
    body = [
        *filled(1024),
        own("b"),
        own("d"),
        own("out"),
        allreduce("a", "b"),
        gather,
        tensor("c", "s0"),
        double("b", "c"),
        allreduce("c", "out", BARRIER),
        kill("s0"),
    ]
    assert hazards(body) == []
    without = [line for line in body if line != gather]
    assert hazards(without) == [HazardKind.WRITE]
    for other in ("broadcast_from_worker0", "scatter_from_worker0", "gather_to_worker0"):
        changed_ = [line.replace("allgather", other) for line in body]
        assert hazards(changed_) == [HazardKind.WRITE], other


def test_a_meeting_counts_for_its_own_ranks():
    def layers(first: int, second: int) -> list[str]:
        return [
            *filled(1024),
            own("b"),
            allreduce("a", "b", NO_EXIT_BARRIER, first),
            own("d"),
            packed("runtime.disco.allgather", "b", f"R.prim_value({second})", "d"),
            tensor("c", "s0"),
            double("b", "c"),
            *end("c"),
        ]

    assert hazards(layers(0, 0)) == []
    assert hazards(layers(1, 1)) == []
    assert hazards(layers(1, 0)) == []
    assert hazards(layers(0, 1)) == [HazardKind.WRITE]


def test_the_output_of_the_next_meeting_is_a_write():
    body = [
        *filled(1024),
        own("b"),
        allreduce("a", "b"),
        tensor("c", "s0"),
        allreduce("b", "c", BARRIER),
        own("out"),
        double("c", "out"),
        kill("s0"),
    ]
    assert hazards(body) == [HazardKind.WRITE]


def test_in_place_without_a_barrier():
    body = [storage("s0", 1024), tensor("a", "s0"), double("x", "a"), tensor("b", "s0")]
    end = [own("out"), allreduce("x", "out", BARRIER), kill("s0")]
    assert HazardKind.WRITE in hazards([*body, allreduce("a", "b"), *end])
    assert hazards([*body, allreduce("a", "b", BARRIER), *end]) == []


def test_ordinary_memory_is_not_read_by_peers():
    body = [own("a"), double("x", "a"), own("b"), allreduce("a", "b"), own("out")]
    assert hazards([*body, double("b", "a"), double("a", "out")]) == []


def test_unknown_functions_may_write_what_they_are_given():
    def calling(call: str) -> list[str]:
        return changed(tensor("c", "s0", 1024), call, tensor("c", "s0", 1024))

    assert hazards(calling(packed("some.function", "a"))) == [HazardKind.WRITE]
    assert hazards(calling(packed("some.function", "b"))) == []
    # That one is written through a buffer declared on its memory.
    assert hazards(calling("Module.bump(a, b)")) == [HazardKind.WRITE]
    assert hazards(calling("Module.window(a, b)")) == [HazardKind.WRITE]
    assert hazards(calling("Module.window(b, a)")) == []
    assert hazards(calling("Module.double(a, b)")) == []
    assert hazards(calling(packed("tvm_ipc.copy", "b", "a"))) == [HazardKind.WRITE]
    assert hazards(calling(packed("tvm_ipc.copy", "a", "b"))) == []


def test_what_aliases_the_input_is_the_input():
    view = 'v: R.Tensor((16, 16), "float32") = R.reshape(a, R.shape([16, 16]))'
    tuple_ = "t: R.Tuple(R.Any, R.Any) = (v, b)"
    item = "w: R.Any = t[0]"
    back = packed("some.function", "w")
    body = changed(tensor("c", "s0", 1024), view, tuple_, item, back, tensor("c", "s0", 1024))
    assert hazards(body) == [HazardKind.WRITE]
    body[body.index(item)] = "w: R.Any = t[1]"
    assert hazards(body) == []


def test_the_result_of_an_unknown_function_may_be_what_it_was_given():
    found = packed("some.source", "a", result="w")
    body = [*RIGHT]
    body.insert(body.index(allreduce("a", "b")), found)
    assert hazards(body) == []
    body.insert(body.index(allreduce("a", "b")) + 1, packed("some.function", "w"))
    assert hazards(body) == [HazardKind.WRITE]


def test_parameters_may_be_the_same_memory():
    parameters = f'{X}, y: R.Tensor((256,), "float32")'
    end = [own("out"), allreduce("x", "out", BARRIER)]
    body = [own("b"), allreduce("x", "b"), double("b", "y"), *end]
    (hazard,) = verify_cross_rank_safety(module(function(body, parameters=parameters)))
    assert hazard.kind is HazardKind.WRITE
    assert kinds(module(function([body[0], *body[2:]], parameters=parameters))) == []


CONDITION = f'{X}, c: R.Tensor((), "bool")'


def test_branches_join():
    def program(then: list[str], otherwise: list[str]) -> list[HazardKind]:
        body = [
            *filled(2048),
            own("b"),
            own("d"),
            allreduce("a", "b"),
            branch([*then, "r = b"], [*otherwise, "r = b"]),
            double("r", "a"),
            *end("a"),
        ]
        return kinds(module(function(body, parameters=CONDITION)))

    meeting = packed("runtime.disco.allgather", "b", "R.prim_value(0)", "d")
    assert program([meeting], [meeting]) == []
    assert program([meeting], []) == [HazardKind.WRITE]
    assert program([], [meeting]) == [HazardKind.WRITE]


def test_what_a_branch_leaves_pending():
    body = [
        *filled(1024),
        own("b"),
        branch([allreduce("a", "b"), "r = b"], [allreduce("a", "b", BARRIER), "r = b"]),
        double("r", "a"),
        *end("a"),
    ]
    assert kinds(module(function(body, parameters=CONDITION))) == [HazardKind.WRITE]


def test_the_result_of_a_branch_is_what_either_gives():
    body = [
        storage("s0", 2048),
        tensor("a", "s0"),
        tensor("b", "s0", 1024),
        double("x", "a"),
        double("x", "b"),
        branch(["r = a"], ["r = b"]),
        own("d"),
        allreduce("r", "d"),
        own("out"),
        double("x", "b"),
        allreduce("x", "out", BARRIER),
        kill("s0"),
    ]
    assert kinds(module(function(body, parameters=CONDITION))) == [HazardKind.WRITE]


def test_branches_may_use_the_same_bytes():
    def one(target: str) -> list[str]:
        return [tensor(target, "s1"), double("x", target), f"r = {target}"]

    body = [storage("s1", 1024), branch(one("a"), one("b")), own("out"), double("r", "out")]
    assert kinds(module(function(body, parameters=CONDITION))) == []


CALL = 'y: R.Tensor((256,), "float32") = Module.part({})'
TWO = f'{X}, o: R.Tensor((256,), "float32")'


def with_part(part: list[str], body: list[str], result: str = "o") -> set[HazardKind]:
    """What is found if the function is called once, and if it is called elsewhere too."""
    once = module(function(part, "part", TWO, result), function(body))
    call = 'y: R.Tensor((256,), "float32") = Module.part(x, o)'
    other = function([call], "other", TWO, "y")
    twice = module(function(part, "part", TWO, result), function(body), other)
    found = [
        {hazard.kind for hazard in verify_cross_rank_safety(mod) if hazard.function != "other"}
        for mod in (once, twice)
    ]
    assert found[0] == found[1]
    return found[0]


AROUND_PART = [
    *filled(1024),
    own("b"),
    allreduce("a", "b"),
    own("d"),
    CALL.format("b, d"),
    double("y", "a"),
    *end("a"),
]


def test_a_called_function_may_meet():
    meeting = packed("runtime.disco.allgather", "x", "R.prim_value(0)", "o")
    assert with_part([meeting], AROUND_PART) == set()
    assert with_part([double("x", "o")], AROUND_PART) == {HazardKind.WRITE}


def test_a_called_function_may_write():
    body = [*AROUND_PART[:6], CALL.format("b, a"), *AROUND_PART[8:]]
    meeting = packed("runtime.disco.allgather", "x", "R.prim_value(0)", "o")
    assert with_part([double("x", "o"), meeting], body) == {HazardKind.WRITE}
    own_meeting = [own("e"), packed("runtime.disco.allgather", "x", "R.prim_value(0)", "e")]
    assert with_part([*own_meeting, double("x", "o")], body) == set()


def test_a_called_function_may_leave_a_read_pending():
    body = [*AROUND_PART[:4], CALL.format("a, b"), double("y", "a"), *AROUND_PART[8:]]
    assert with_part([allreduce("x", "o")], body) == {HazardKind.WRITE}
    assert with_part([allreduce("x", "o", BARRIER)], body) == set()
    # What it allocates itself is gone when it returns.
    part = [own("i", "ipc_memory"), double("x", "i"), allreduce("i", "o"), kill("i")]
    assert with_part(part, body) == {HazardKind.FREE}


def test_a_recursive_function_may_do_anything():
    call = 'y: R.Tensor((256,), "float32") = Module.part(x, o, c)'
    meeting = packed("runtime.disco.allgather", "x", "R.prim_value(0)", "o")
    part = [meeting, branch([call, "r = y"], ["r = o"])]
    parameters = f'{TWO}, c: R.Tensor((), "bool")'
    body = [*AROUND_PART[:6], CALL.format("b, d, c"), *AROUND_PART[7:]]
    found = kinds(
        module(function(part, "part", parameters, "r"), function(body, parameters=CONDITION))
    )
    # It meets before it calls itself, so nothing that it was given is read any more.
    assert found == []
    part = [branch([call, "r = y"], [meeting, "r = o"])]
    found = kinds(
        module(function(part, "part", parameters, "r"), function(body, parameters=CONDITION))
    )
    assert found == [HazardKind.WRITE]


def test_overlap_on_one_rank():
    body = [
        storage("s1", 1024, "global"),
        tensor("a", "s1"),
        double("x", "a"),
        tensor("b", "s1", 512, 128),
        packed("runtime.disco.recv_from_worker0", "b"),
        own("out"),
        double("a", "out"),
    ]
    assert hazards(body) == [HazardKind.LOST]
    assert hazards([*body[:5], double("x", "a"), *body[5:]]) == []


def test_a_tensor_ends_within_its_storage():
    body = [storage("s1", 1024, "global"), tensor("a", "s1", 64), own("out")]
    (hazard,) = verify_cross_rank_safety(
        module(function([*body, double("x", "a"), double("a", "out")]))
    )
    assert hazard.kind is HazardKind.BOUNDS
    assert "ends at byte 1088 of 1024" in str(hazard)


def symbolic(second: str, size: str = "8 * n") -> list[HazardKind]:
    body = [
        "n = T.int64()",
        storage("s0", size),
        tensor("a", "s0", 0, "n"),
        packed("tvm_ipc.copy", "x", "a"),
        own("b"),
        allreduce("a", "b"),
        tensor("c", "s0", second, "n"),
        packed("tvm_ipc.copy", "x", "c"),
        *end("c"),
    ]
    return kinds(module(function(body, parameters='x: R.Tensor(("n",), "float32")')))


def test_symbolic_offsets():
    assert symbolic("4 * n") == []
    assert symbolic("2 * n") == [HazardKind.WRITE]
    assert symbolic("(n * 4 + 63) // 64 * 64", "(n * 4 + 63) // 64 * 64 + n * 4") == []
    assert symbolic("n * 4 // 64 * 64") == [HazardKind.WRITE]
    assert symbolic("4 * n", "7 * n") == [HazardKind.BOUNDS]


@I.ir_module
class Mlp:
    @R.function
    def main(
        x: R.Tensor(("n", 64), "float32"),
        w0: R.Tensor((64, 64), "float32"),
        w1: R.Tensor((64, 64), "float32"),
    ):
        with R.dataflow():
            h = R.ccl.allreduce(R.matmul(x, w0), "sum")
            y = R.ccl.allreduce(R.matmul(R.nn.relu(h), w1), "sum")
            R.output(y)
        return y


def upstreams_plan(mod: tvm.IRModule, strategy: int) -> tvm.IRModule:
    passes = relax.transform
    with tvm.target.Target("llvm"):
        return tvm.transform.Sequential(
            [
                passes.LegalizeOps(),
                passes.ToNonDataflow(),
                passes.RemovePurityChecking(),
                passes.CallTIRRewrite(),
                passes.IPCAllReduceRewrite(strategy),
                passes.StaticPlanBlockMemory(),
            ]
        )(mod)


def test_upstreams_plan_is_flagged_with_upstreams_kernels():
    planned = upstreams_plan(Mlp, 1)
    assert verify_cross_rank_safety(planned) == []  # ours have a barrier at their end
    found = verify_cross_rank_safety(planned, assume_no_exit_barrier=True)
    assert [hazard.kind for hazard in found] == [HazardKind.WRITE, HazardKind.FREE]
    assert "matmul" in found[0].binding and "custom_allreduce" in found[0].related
    # A ring copies: nobody reads the input itself.
    assert verify_cross_rank_safety(upstreams_plan(Mlp, 0), assume_no_exit_barrier=True) == []


@I.ir_module
class Layers:
    @R.function
    def main(x: R.Tensor((64, 64), "float32"), w: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            a = R.ccl.allreduce(R.matmul(x, w), "sum")
            b = R.ccl.allreduce(R.matmul(R.nn.relu(a), w), "sum")
            c = R.ccl.allreduce(R.matmul(R.nn.relu(b), w), "sum")
            d = R.add(c, c)
            R.output(d)
        return d


def test_cuda_graphs():
    seen = []

    @tvm.instrument.pass_instrument
    class Before:
        def run_before_pass(self, mod, info):
            if info.name == "VerifyCrossRankSafety":
                seen.append(mod)

    target = tvm.target.Target({"kind": "cuda", "arch": "sm_90"})
    config = {"relax.backend.use_cuda_graph": True}
    with tvm.transform.PassContext(config=config, instruments=[Before()]):
        tvm_ipc.get_pipeline(target, 2, "oneshot", barrier_budget=1 << 20)(Layers)
    (mod,) = seen
    text = mod.script()
    # Captured functions are given storages, and lay tensors into them.
    assert "run_or_capture" in text and "get_cached_alloc" in text
    assert verify_cross_rank_safety(mod) == []
    found = verify_cross_rank_safety(mod, assume_no_exit_barrier=True)
    assert any(hazard.kind is HazardKind.RETURN for hazard in found)


def test_the_same_is_found_after_every_lowering():
    module_ = module(function(changed(tensor("c", "s0", 1024), tensor("c", "s0"))))
    right = module(function(RIGHT))
    passes = relax.transform
    from tvm_ipc.transform import LowerGPUIPCAllocStorage

    steps = [
        LowerGPUIPCAllocStorage(),
        passes.LowerAllocTensor(),
        passes.KillAfterLastUse(),
        passes.LowerRuntimeBuiltin(),
        passes.ComputePrimValue(),
        passes.VMShapeLower(),
        passes.AttachGlobalSymbol(),
    ]
    for step in steps:
        module_, right = step(module_), step(right)
        assert kinds(module_) == [HazardKind.WRITE], step
        assert kinds(right) == [], step


def test_offsets_of_our_own_function():
    own_form = (
        'c: R.Tensor((256,), "float32") = R.call_packed("tvm_ipc.alloc_tensor", s0, '
        'R.prim_value({}), R.shape([256]), R.dtype("float32"), '
        'ty_args=(R.Tensor((256,), "float32"),))'
    )
    assert hazards(changed(tensor("c", "s0", 1024), own_form.format(1024))) == []
    assert hazards(changed(tensor("c", "s0", 1024), own_form.format(512))) == [HazardKind.WRITE]


def test_what_is_not_lowered_has_no_memory_to_check():
    assert verify_cross_rank_safety(Mlp) == []


def chain(layers: int) -> tvm.IRModule:
    body = [storage("s0", 2048), storage("s1", 1024, "global"), tensor("b0", "s1")]
    body.append(double("x", "b0"))
    for i in range(layers):
        body += [
            tensor(f"a{i}", "s0", 1024 * (i % 2)),
            double(f"b{i}", f"a{i}"),
            tensor(f"b{i + 1}", "s1"),
            allreduce(f"a{i}", f"b{i + 1}"),
        ]
    return module(function([*body, own("out"), allreduce("x", "out", BARRIER), kill("s0")]))


def test_work_grows_with_the_program():
    modules = {layers: chain(layers) for layers in (20, 40, 80)}
    assert power(lambda layers: verify_cross_rank_safety(modules[layers]), 20) < 1.1
    assert verify_cross_rank_safety(modules[80]) == []


def test_options_are_checked():
    with pytest.raises(TypeError, match="assume_no_exit_barrier"):
        VerifyCrossRankSafety(assume_no_exit_barrier=1)


@pytest.mark.parametrize("begin", [0, 16, 30, 32])
def test_a_kernel_is_given_a_part_that_begins_where_it_crashes(begin: int) -> None:
    """Of code for vectors; copies and collectives take bytes from everywhere."""
    offset = relax.prim_value(4 * begin)

    @I.ir_module
    class Parts:
        @T.prim_func(private=True, s_tir=True)
        def fill(a: T.Buffer((16,), "float32")):
            for i in range(16):
                with T.sblock("fill"):
                    vi = T.axis.spatial(16, i)
                    a[vi] = T.float32(1)

        @R.function(pure=False)
        def main(x: R.Tensor((64,), "float32")):
            cls = Parts
            y = R.builtin.alloc_tensor(R.shape([64]), R.dtype("float32"), 0, "global")
            part = R.call_packed(
                "tvm_ipc.view", y, offset, R.shape([16]), ty_args=R.Tensor((16,), "float32")
            )
            _ = cls.fill(part)
            return y

    found = verify_cross_rank_safety(Parts)
    if begin % 16 == 0:
        assert found == []
        return
    (hazard,) = found
    assert "y is misaligned for the kernel; it begins at byte 120" in str(hazard)
    assert "no multiple of 64, so reading it may crash the process" in str(hazard)
