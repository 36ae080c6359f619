# SPDX-License-Identifier: Apache-2.0
"""All-reduce, residual and norm as one function, against NumPy: the new residual bit for bit.

What the norm gives is compared with float64, and between ranks and instruction sets bit for bit.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

import tvm_ipc
from tests.runtime.collective_cases import EAGER, STAGE, Array, numpy_type, reduce
from tests.runtime.tensors_of_ranks import put_each, write_each
from tvm_ipc.errors import WorkerError
from tvm_ipc.packed_functions import AllReduceStrategy, CollectiveFlag, ReduceKind

OpenSession = Callable[[int], tvm_ipc.Session]
HERE = Path(__file__).resolve().parent
DTYPES = ("float32", "float16", "bfloat16")
#: Relative to the largest weight: a few roundings of the type of the result.
TOLERANCE = {"float32": 4e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
SHAPES = ((0, 64), (1, 1), (7, 1), (1, 7), (7, 64), (3, 4096), (57, 64), (5, 33))
#: Rows larger than a staging buffer, and many that one does not hold.
LARGE = ((2, STAGE // 2 + 5), (2 * STAGE // 4096 + 3, 1024))


@dataclass(frozen=True)
class Case:
    """One call."""

    rows: int
    hidden: int
    dtype: str = "float32"
    layer: bool = False
    memory: str = "private"
    weight: str = "float32"
    result: str = "float32"
    strategy: int = AllReduceStrategy.AUTO
    flags: int = 0
    in_place: bool = False
    #: The node of each rank; nothing: all are on one machine.
    nodes: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.hidden


def tensor(session: tvm_ipc.Session, shape: tuple[int, ...], dtype: str, memory: str) -> Any:
    """A tensor in the arenas, in private memory, or in the one on some ranks."""
    size = max(1, int(np.prod(shape)) * numpy_type(dtype).itemsize)
    if memory == "private":
        return session.empty(shape, dtype)
    function = "tests.ipc_tensor" if memory == "arena" else "tests.ipc_tensor_on_even_ranks"
    return session.get_global_func(function)(size, Shape(shape), tvm.DataType(dtype))


def inputs(case: Case, ranks: int) -> tuple[list[Array], Array, Array, Array]:
    """What the ranks send, the residual, the weight and the bias."""
    random = np.random.default_rng((case.rows, case.hidden, DTYPES.index(case.dtype)))

    def draw(*shape: int, dtype: str) -> Array:
        values = random.standard_normal(shape) * 2.0 ** random.integers(-2, 3, shape)
        return np.asarray((values + 0.5).astype(numpy_type(dtype)))

    sends = [draw(*case.shape, dtype=case.dtype) for _ in range(ranks)]
    residual = draw(*case.shape, dtype=case.dtype)
    return sends, residual, *(draw(case.hidden, dtype=case.weight) for _ in range(2))


def summed(case: Case, ranks: int) -> Array:
    """The new residual: rounded as a sum, then as an addition."""
    sends, residual, _, _ = inputs(case, ranks)
    wide = np.float32
    total = reduce(np.stack(sends), ReduceKind.SUM, case.nodes)
    return np.asarray((total.astype(wide) + residual.astype(wide)).astype(residual.dtype))


def normalised(case: Case, x: Array, weight: Array, bias: Array) -> Array:
    """The norm of rows in float64."""
    x, weight, bias = (one.astype("float64") for one in (x, weight, bias))
    if x.size == 0:
        return x
    mean = x.mean(-1, keepdims=True) if case.layer else 0
    scale = 1 / np.sqrt(((x - mean) ** 2).mean(-1, keepdims=True) + 1e-5)
    return np.asarray((x - mean) * scale * weight + (bias if case.layer else 0))


def run(session: tvm_ipc.Session, case: Case) -> tuple[list[Array], list[Array]]:
    """Do it; return what each rank has then."""
    ranks = session.num_workers
    sends, residual, weight, bias = inputs(case, ranks)
    send = tensor(session, case.shape, case.dtype, case.memory)
    write_each(send, sends)
    old = session.put(residual)
    residual_out = old if case.in_place else session.empty(case.shape, case.dtype)
    norm_out = session.empty(case.shape, case.result)
    session.get_global_func(f"tvm_ipc.allreduce_{'layer' if case.layer else 'rms'}_norm")(
        *(send, old, session.put(weight)),
        *([session.put(bias)] if case.layer else []),
        *(1e-5, 0, case.strategy, case.flags, residual_out, norm_out),
    )
    if case.flags:  # the promise was that the input stays until the next collective
        session.allreduce(session.put(np.zeros(1)), session.empty((1,), "float64"))
    found = [session.get(residual_out, rank) for rank in range(ranks)]
    for rank, values in enumerate(sends):
        assert session.get(send, rank).tobytes() == values.tobytes(), "the input was written"
    return found, [session.get(norm_out, rank) for rank in range(ranks)]


def check(session: tvm_ipc.Session, case: Case) -> bytes:
    """Compare with NumPy; return the bytes of both results."""
    residuals, norms = run(session, case)
    wanted = summed(case, session.num_workers)
    _, _, weight, bias = inputs(case, session.num_workers)
    rows = normalised(case, wanted, weight, bias)
    for rank, (x, y) in enumerate(zip(residuals, norms, strict=True)):
        assert x.tobytes() == wanted.tobytes(), f"{case}: the residual on rank {rank}"
        assert y.tobytes() == norms[0].tobytes(), f"{case}: rank {rank} has other bits"
    if case.rows:
        error = np.abs(norms[0].astype("float64") - rows) / (1 + np.abs(rows))
        assert error.max() < TOLERANCE[case.result], f"{case}: {error.max()}"
    return residuals[0].tobytes() + norms[0].tobytes()


def cases(dtype: str, shapes: tuple[tuple[int, int], ...]) -> Iterator[Case]:
    """Every shape, norm, memory and strategy; the rest takes turns."""
    turn = itertools.count()
    ways = (AllReduceStrategy.AUTO, AllReduceStrategy.ONESHOT, AllReduceStrategy.TWOSHOT)
    for shape, layer, memory in itertools.product(
        shapes, (False, True), ("arena", "private", "mixed")
    ):
        i = next(turn)
        weight, result = (dtype, "float32", *DTYPES)[i % 5], (*DTYPES, dtype)[i % 4]
        case = Case(*shape, dtype, layer, memory, weight, result, flags=i % 2)
        for strategy in ways:
            yield replace(case, strategy=strategy, in_place=i % 3 == 0)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_way(ranks: int, dtype: str, opened: OpenSession) -> None:
    for case in cases(dtype, SHAPES):
        check(opened(ranks), case)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3])
def test_rows_and_pieces_end_at_different_places(
    ranks: int, dtype: str, opened: OpenSession
) -> None:
    for case in cases(dtype, LARGE):
        check(opened(ranks), case)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_sizes_where_the_way_changes(more: int, opened: OpenSession) -> None:
    for size in (EAGER, STAGE, 3 * STAGE):
        for memory in ("arena", "private"):
            check(opened(3), Case(size // 4 + more, 1, memory=memory))
            check(opened(3), Case(1, size // 4 + more, memory=memory, layer=True))


def test_what_is_not_a_number_stays_in_its_row(opened: OpenSession) -> None:
    session = opened(2)
    for dtype, result in itertools.product(DTYPES, DTYPES):
        values = np.ones((3, 40), numpy_type(dtype))
        values[1, 35] = np.nan
        out, norm = session.empty((3, 40), dtype), session.empty((3, 40), result)
        weight = np.ones(40, "float32")
        weight[7] = np.nan
        session.get_global_func("tvm_ipc.allreduce_rms_norm")(
            session.put(values), session.put(values), session.put(weight), 0.0, 0, 3, 0, out, norm
        )
        found = np.isnan(session.get(norm).astype("float32"))
        assert found[1].all()
        assert found[:, 7].all()
        assert found.sum() == 40 + 2


def test_the_bits_are_those_of_the_parts(opened: OpenSession) -> None:
    """Sums and additions of very different sizes round: 1 + 2**-8 - 1 is 0 in bfloat16."""
    session = opened(3)
    for dtype, small in (("float32", 2.0**-24), ("bfloat16", 2.0**-8), ("float16", 2.0**-11)):
        sends = [np.full((2, 50), one, numpy_type(dtype)) for one in (1, small, small)]
        send, total = session.empty((2, 50), dtype), session.empty((2, 50), dtype)
        write_each(send, sends)
        session.get_global_func("tvm_ipc.allreduce")(send, ReduceKind.SUM, 0, 3, 0, total)
        residual = np.full((2, 50), -1, numpy_type(dtype))
        wanted = session.get(total) + residual
        out, norm = session.empty((2, 50), dtype), session.empty((2, 50), dtype)
        session.get_global_func("tvm_ipc.allreduce_rms_norm")(
            *(send, session.put(residual), session.put(np.ones(50, "float32"))),
            *(1e-5, 0, 3, 0, out, norm),
        )
        assert session.get(out).tobytes() == wanted.tobytes()


def test_a_large_mean_does_not_cancel(opened: OpenSession) -> None:
    session, random = opened(2), np.random.default_rng(0)
    x = (random.standard_normal((4, 500)) + 4096).astype("float32")
    zeros, ones = np.zeros((4, 500), "float32"), np.ones(500, "float32")
    out, norm = session.empty((4, 500), "float32"), session.empty((4, 500), "float32")
    send = session.empty((4, 500), "float32")
    send.debug_copy_from(0, x)
    send.debug_copy_from(1, zeros)
    session.get_global_func("tvm_ipc.allreduce_layer_norm")(
        *(send, session.put(zeros), session.put(ones), session.put(zeros[0])),
        *(0.0, 0, 3, 0, out, norm),
    )
    wide = x.astype("float64")
    wanted = (wide - wide.mean(-1, keepdims=True)) / wide.std(-1, keepdims=True)
    np.testing.assert_allclose(session.get(norm), wanted, atol=2e-3)


SAME_BITS = """
import json, tvm_ffi, tvm_ipc
from tests.runtime.test_allreduce_norm import digest

found = digest()
print(found, json.loads(tvm_ffi.get_global_func("tvm_ipc.native_info")())["instruction_set"])
"""


def digest() -> str:
    """Of the bits of all results of some cases."""
    found = hashlib.sha256()
    with tvm_ipc.Session(3, threads=True, timeout=60) as session:
        session.import_python_module("tests.runtime.worker_functions")
        for dtype in DTYPES:
            for case in cases(dtype, ((7, 64), (5, 33), (3, 1000))):
                found.update(check(session, case))
    return found.hexdigest()


@pytest.mark.slow
def test_one_answer_whatever_the_instruction_set(run_python: Callable[..., str]) -> None:
    info = json.loads(tvm_ffi.get_global_func("tvm_ipc.native_info")())
    answers = set()
    for name in info["instruction_sets"]:
        answer, used = run_python(SAME_BITS, TVM_IPC_ISA=name, TVM_USE_RUNTIME_LIB="1").split()
        assert used == name
        answers.add(answer)
    assert len(answers) == 1


def test_a_team_of_some_ranks(opened: OpenSession) -> None:
    session = opened(3)
    send = put_each(session, [np.full((2, 600), rank + 1, "float32") for rank in range(3)])
    zeros = session.put(np.zeros((2, 600), "float32"))
    out, norm = session.put(np.zeros((2, 600), "float32")), session.empty((2, 600), "float32")
    weight = session.put(np.ones(600, "float32"))
    team = session.team([2, 0])
    for rank in team.ranks:
        session.get_global_func("tests.call_on")(
            *(rank, "tvm_ipc.allreduce_rms_norm", send, zeros, weight),
            *(1e-5, team.id, 3, 0, out, norm),
        )
    assert [session.get(out, rank)[1, 1] for rank in range(3)] == [4, 0, 4]


def test_a_work(opened: OpenSession) -> None:
    session = opened(2)
    x, weight = session.put(np.ones((3, 700), "float32")), session.put(np.ones(700, "float32"))
    out, norm = session.empty((3, 700), "float32"), session.empty((3, 700), "float32")
    post = session.get_global_func("tvm_ipc.start")
    post("tvm_ipc.allreduce_rms_norm", x, x, weight, 0.0, 0, 3, 0, out, norm)
    assert (session.get(out, 1) == 3).all()
    assert (session.get(norm, 1) == 1).all()


# ---- what is refused ----------------------------------------------------------------------------


def refused(session: tvm_ipc.Session, kind: str, message: str) -> None:
    with pytest.raises(WorkerError) as error:
        session.sync()
    assert error.value.errors[0].kind == kind
    assert message in error.value.errors[0].message
    check(session, Case(7, 64))


@dataclass
class Arguments:
    """Of a call with 4 rows of 6, as counts and types."""

    send: tuple[int, str] = (24, "float32")
    residual: tuple[int, str] = (24, "float32")
    weight: tuple[int, str] = (6, "float32")
    bias: tuple[int, str] = (6, "float32")
    residual_out: tuple[int, str] = (24, "float32")
    norm_out: tuple[int, str] = (24, "float32")


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        (
            {"residual": (23, "float32")},
            "ValueError",
            "send has 24 x float32, residual has 23 x float32; they must be equal",
        ),
        ({"residual": (24, "float16")}, "ValueError", "residual has 24 x float16; they must be"),
        ({"residual_out": (24, "float16")}, "ValueError", "residual_out has 24 x float16"),
        (
            {"norm_out": (25, "float32")},
            "ValueError",
            "send has 24 elements, norm_out has 25; they must have as many",
        ),
        (
            {"weight": (7, "float32"), "bias": (7, "float32")},
            "ValueError",
            "send has 24 elements, which are no rows of 7, as many as weight has",
        ),
        ({"weight": (0, "float32"), "bias": (0, "float32")}, "ValueError", "no rows of 0"),
        ({"bias": (5, "float32")}, "ValueError", "weight has 6 elements, bias has 5; both must"),
        (
            {"weight": (6, "float64")},
            "TypeError",
            "float64 is not normalised; cast to float32, float16 or bfloat16",
        ),
        ({"bias": (6, "int32")}, "TypeError", "int32 is not normalised"),
        ({"norm_out": (24, "float64")}, "TypeError", "float64 is not normalised"),
        (
            dict.fromkeys(("send", "residual", "residual_out"), (24, "float64")),
            "TypeError",
            "float64 is not normalised",
        ),
    ],
)
def test_tensors_that_do_not_fit(
    given: dict[str, tuple[int, str]],
    kind: str,
    message: str,
    opened: OpenSession,
) -> None:
    session, counts = opened(2), vars(Arguments(**given))
    tensors = [session.empty((count,), dtype) for count, dtype in counts.values()]
    function = session.get_global_func("tvm_ipc.allreduce_layer_norm")
    function(*tensors[:4], 1e-5, 0, 3, 0, *tensors[4:])
    refused(session, kind, f"allreduce_layer_norm: {message}" if "send" in message else message)


@pytest.mark.parametrize(
    ("output", "at", "other"),
    [
        ("residual_out", 0, "send"),
        ("residual_out", 23, "send"),
        ("norm_out", 0, "send"),
        ("residual_out", 30, "residual"),
        ("norm_out", 24, "residual"),
        ("norm_out", 60, "weight"),
        ("norm_out", 90, "residual_out"),
    ],
)
def test_outputs_that_overlap(output: str, at: int, other: str, opened: OpenSession) -> None:
    session = opened(2)
    whole = session.empty((200,), "float32")
    view = session.get_global_func("tests.view")
    starts = {"send": 0, "residual": 24, "weight": 60, "residual_out": 80, "norm_out": 120}
    starts[output] = at
    parts = {
        name: view(whole, start, 6 if name == "weight" else 24) for name, start in starts.items()
    }
    session.get_global_func("tvm_ipc.allreduce_rms_norm")(
        *(parts["send"], parts["residual"], parts["weight"], 1e-5, 0, 3, 0),
        *(parts["residual_out"], parts["norm_out"]),
    )
    message = f"allreduce_rms_norm: {output} overlaps {other}; outputs must be apart"
    refused(session, "ValueError", message)


@pytest.mark.parametrize(
    ("strategy", "flags", "message"),
    [(4, 0, "there is no strategy 4"), (0, 2, "unknown flags 2")],
)
def test_numbers_without_a_meaning(
    strategy: int, flags: int, message: str, opened: OpenSession
) -> None:
    session = opened(2)
    x, w = session.empty((4,), "float32"), session.empty((4,), "float32")
    session.get_global_func("tvm_ipc.allreduce_rms_norm")(
        x, x, w, 1e-5, 0, strategy, flags, session.empty((4,), "float32"), w
    )
    refused(session, "ValueError", f"allreduce_rms_norm: {message}")


@pytest.mark.parametrize("what", ["rows", "epsilon", "norm"])
def test_ranks_that_disagree(what: str, opened: OpenSession) -> None:
    session = opened(2)
    x = session.empty((12,), "float32")
    outputs = session.empty((12,), "float32"), session.empty((12,), "float32")
    call_on = session.get_global_func("tests.call_on")
    for rank in range(2):
        row = session.empty((6 if rank and what == "rows" else 4,), "float32")
        layer = rank and what == "norm"
        epsilon = 2e-5 if rank and what == "epsilon" else 1e-5
        call_on(
            *(rank, f"tvm_ipc.allreduce_{'layer' if layer else 'rms'}_norm", x, x, row),
            *([row] if layer else []),
            *(epsilon, 0, 3, int(CollectiveFlag.NONE), *outputs),
        )
    refused(session, "MismatchError", "the ranks disagree: rank 0 called allreduce_rms(sum, ")
