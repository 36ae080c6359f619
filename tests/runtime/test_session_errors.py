# SPDX-License-Identifier: Apache-2.0
"""Errors come home: of each rank, in functions and in programs, and at the end.

Every error is a Python exception that says which rank and what, and the session works afterwards.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm_ffi import Shape

import tvm_ipc
from tests.runtime.disco_kinds import RANKS, call, errors_at_sync, on_workers, refused
from tests.runtime.disco_programs import FailsOnRank, build
from tests.runtime.places import ON_GPUS
from tests.runtime.tensors_of_ranks import put_each
from tvm_ipc.errors import IPCError, RankError, WorkerError, describe

# ---- exceptions in functions ----------------------------------------------------------------


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("kind", ["ValueError", "TypeError", "AssertionError", "MemoryError"])
def test_exception_of_one_rank(kind: str, rank: int, trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_on", rank, kind, "no such luck")
    with pytest.raises(WorkerError) as error:
        trio.sync()
    (one,) = error.value.errors
    assert (one.rank, one.kind, one.message) == (rank, kind, "no such luck")
    assert "worker_functions.py" in one.traceback
    assert "in fail_on" in one.traceback
    assert str(error.value).startswith(f"rank {rank}: {kind}: no such luck\n")
    assert isinstance(error.value, IPCError)


def test_exception_of_all_ranks(trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_on", -1, "ValueError", "all of us")
    assert errors_at_sync(trio) == [(rank, "ValueError", "all of us") for rank in range(RANKS)]


def test_error_of_all_ranks_is_said_once(trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_on", -1, "ValueError", "all of us")
    with pytest.raises(WorkerError) as error:
        trio.sync()
    assert str(error.value).startswith("ranks 0-2: ValueError: all of us\n")
    assert str(error.value).count("all of us") == 1
    assert [str(one).splitlines()[0] for one in error.value.errors] == [
        f"rank {rank}: ValueError: all of us" for rank in range(RANKS)
    ]


def test_ranks_in_a_message() -> None:
    errors = [RankError(rank, "ValueError", "no", "") for rank in (0, 1, 2, 4, 7, 6)]
    errors.insert(2, RankError(3, "TypeError", "no", ""))
    assert describe(errors) == "ranks 0-2, 4, 6-7: ValueError: no\nrank 3: TypeError: no"


def test_exceptions_of_two_ranks_that_differ(trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_on", 2, "ValueError", "third")
    call(trio, "tests.fail_on", 0, "TypeError", "first")
    assert errors_at_sync(trio) == [(0, "TypeError", "first"), (2, "ValueError", "third")]


@pytest.mark.parametrize("kind", ["SystemExit", "KeyboardInterrupt", "GeneratorExit"])
def test_exceptions_that_end_programs_end_no_worker(kind: str, trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_on", 1, kind, "leaving")
    assert errors_at_sync(trio) == [(1, kind, "leaving")]


def test_exit_code_and_own_exceptions_keep_their_names(trio: tvm_ipc.Session) -> None:
    call(trio, "tests.exit_on", 1, 5)
    assert errors_at_sync(trio) == [(1, "SystemExit", "5")]
    call(trio, "tests.fail_with_own_exception", 2)
    with pytest.raises(WorkerError) as error:
        trio.sync()
    (one,) = error.value.errors
    assert (one.kind, one.message) == ("OwnError", "mine\na note")
    assert "in fail_with_own_exception" in str(one)
    assert "keep_exception_type_and_text.py" not in str(one)


@pytest.mark.parametrize("kind", ["surrogate", "no text"])
def test_exceptions_without_a_text(kind: str, trio: tvm_ipc.Session) -> None:
    for rank in range(RANKS):
        call(trio, "tests.fail_without_text", rank, kind)
        ((failed, _, message),) = errors_at_sync(trio)
        assert failed == rank
        assert (
            "\\udc80" if kind == "surrogate" else "its text raises ZeroDivisionError"
        ) in message


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are new in Python 3.11")
def test_exception_group_keeps_its_text(trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_with_group", 0)
    ((_, kind, message),) = errors_at_sync(trio)
    assert kind == "ExceptionGroup"
    assert message.splitlines() == [
        "two tasks (2 sub-exceptions)",
        "  - ValueError: first",
        "    of two lines",
        "  - ExceptionGroup: inner (1 sub-exception)",
        "      - KeyError: 'second'",
    ]


@pytest.mark.parametrize("character", ["x", "\N{SNOWMAN}"], ids=["ascii", "three_bytes"])
def test_text_that_nobody_can_read_is_cut(character: str, trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_with_long_text", 1, character, 50_000_000)
    ((_, kind, message),) = errors_at_sync(trio)
    assert kind == "ValueError"
    assert message.startswith(character * 100_000)
    assert message.endswith(character * 100_000)
    size = 50_000_000 * len(character.encode())
    assert f"of {size} bytes are left out here] ..." in message
    assert len(message.encode()) < 1_100_000


@pytest.mark.parametrize(
    "message", ["", "two\nlines", "\N{SNOWMAN} and \0 and %s {}", "long " * 100_000]
)
def test_any_text_comes_through(message: str, trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_on", 1, "ValueError", message)
    assert errors_at_sync(trio) == [(1, "ValueError", message)]


def test_wrong_number_of_arguments(trio: tvm_ipc.Session) -> None:
    call(trio, "runtime.disco.worker_rank", 1, 2)
    refused(trio, "TypeError", "Expected 0 but got 2 arguments")


def test_wrong_types_of_arguments(trio: tvm_ipc.Session) -> None:
    call(trio, "vm.builtin.alloc_tensor", 1, "two", 3.0)
    errors = errors_at_sync(trio)
    assert [(rank, kind) for rank, kind, _ in errors] == [(r, "TypeError") for r in range(RANKS)]


def test_wrong_types_for_a_collective(trio: tvm_ipc.Session) -> None:
    trio.get_global_func("runtime.disco.allreduce")("a", Shape([0]), True, "b")
    refused(trio, "TypeError", "Tensor")


def test_error_at_the_next_value_too(trio: tvm_ipc.Session) -> None:
    x = trio.put(np.ones(3))
    call(trio, "tests.fail_on", 0, "ValueError", "before the value")
    with pytest.raises(WorkerError, match="rank 0: ValueError: before the value"):
        trio.get(x)
    np.testing.assert_array_equal(trio.get(x), np.ones(3))


def test_first_use_of_a_function_after_an_error() -> None:
    """What the session looks up for itself, it looks up again if an error came between."""
    with tvm_ipc.Session(2, threads=True) as session:
        session.import_python_module("tests.runtime.worker_functions")
        x = call(session, "tests.next_int", 1)
        call(session, "tests.fail_on", 0, "ValueError", "in between")
        with pytest.raises(WorkerError, match="in between"):
            x.debug_get_from_remote(1)
        assert x.debug_get_from_remote(1) == 2


def test_error_is_raised_once(trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_on", 0, "ValueError", "once")
    errors_at_sync(trio)
    trio.sync()


def test_others_do_not_wait_for_a_rank_that_failed(trio: tvm_ipc.Session) -> None:
    x = trio.put(np.ones(100_000))
    began = time.monotonic()
    call(trio, "tests.fail_on", 1, "ValueError", "in the middle")
    for _ in range(3):
        trio.allreduce(x, x)
        trio.allgather(trio.empty((2,), "float32"), trio.empty((6,), "float32"))
    # Only the cause is told, not that the others stopped.
    assert errors_at_sync(trio) == [(1, "ValueError", "in the middle")]
    assert time.monotonic() - began < 20


def test_what_follows_an_error_is_skipped_until_it_was_raised(trio: tvm_ipc.Session) -> None:
    places = put_each(trio, [np.zeros(1, "int64")] * RANKS)
    call(trio, "tests.add_one_to", places)
    trio.sync()  # an error also ends what other ranks are in the middle of
    call(trio, "tests.fail_on", 1, "ValueError", "stop")
    call(trio, "tests.add_one_to", places)
    call(trio, "tests.fail_on", 1, "ValueError", "not even reached")
    assert errors_at_sync(trio) == [(1, "ValueError", "stop")]
    assert [int(value[0]) for value in on_workers(places, RANKS)] == [2, 1, 2]
    call(trio, "tests.add_one_to", places)
    assert [int(value[0]) for value in on_workers(places, RANKS)] == [3, 2, 3]


def test_calling_a_function_that_was_never_found(trio: tvm_ipc.Session) -> None:
    missing = trio.get_global_func("no.such.function")
    refused(
        trio,
        "ValueError",
        "no global function no.such.function",
        "import_python_module",
        "compiler=True",
    )
    missing(1)
    refused(trio, "TypeError", "the called object is not a function")


def test_calling_what_is_no_function(trio: tvm_ipc.Session) -> None:
    trio.call_packed(trio.put(np.ones(3)), 1)
    refused(trio, "TypeError", "not a function but ffi.Tensor")


def test_value_that_a_skipped_call_should_have_made(trio: tvm_ipc.Session) -> None:
    call(trio, "tests.fail_on", -1, "ValueError", "first")
    nothing = trio.empty((3,), "float32")
    errors_at_sync(trio)
    trio.allreduce(nothing, trio.empty((3,), "float32"))
    assert {kind for _, kind, _ in errors_at_sync(trio)} == {"TypeError"}


def test_value_that_cannot_travel(trio: tvm_ipc.Session) -> None:
    function = trio.get_global_func("tests.next_int")
    if len(set(trio.pids)) == 1:
        assert function.debug_get_from_remote(1)(1) == 2
        return
    with pytest.raises(WorkerError, match=r"rank 1: TypeError: .*ffi\.Function"):
        function.debug_get_from_remote(1)


@pytest.mark.parametrize(
    "argument",
    [[1, 2], {"a": 1}, object(), 2**64, 1j, np.array("text"), lambda: 1],
    ids=["list", "dict", "object", "integer_beyond_64_bits", "complex", "no_numbers", "function"],
)
def test_argument_that_cannot_be_sent(argument: Any, trio: tvm_ipc.Session) -> None:
    """Refused at once, and nothing reaches a worker."""
    with pytest.raises((TypeError, ValueError), match="argument 2 of a call is "):
        call(trio, "tests.is_none", 1, argument)


def test_value_of_another_session(trio: tvm_ipc.Session) -> None:
    # Of threads on GPUs there is one session at a time: docs/gpus.md.
    with tvm_ipc.Session(RANKS, threads=not ON_GPUS) as other:
        foreign = other.put(np.full(3, 7.0))
        with pytest.raises(ValueError, match="a value of another session has no meaning"):
            call(trio, "tests.plus_one", foreign)
        with pytest.raises(ValueError, match="another session"):
            trio.get(foreign)


# ---- exceptions in programs -----------------------------------------------------------------


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("programs") / "fails.so"
    build(FailsOnRank).export_library(str(path))
    return str(path)


@pytest.mark.parametrize("rank", range(RANKS))
def test_exception_inside_a_vm_function(rank: int, program: str, trio: tvm_ipc.Session) -> None:
    module = trio.load_vm_module(program)
    x = trio.put(np.ones(4, "float32"))
    trio.sync()  # what is on its way when a rank fails may come nowhere
    module["fails"](x, rank)
    with pytest.raises(WorkerError) as error:
        trio.sync()
    (one,) = error.value.errors
    assert (one.rank, one.kind, one.message) == (rank, "ValueError", "inside the program")
    assert "in fail_on" in one.traceback
    # The same module goes on.
    result = module["fails"](x, RANKS)
    np.testing.assert_array_equal(on_workers(result, RANKS), np.full((RANKS, 4), RANKS))


def test_tensor_of_the_wrong_shape_for_a_vm_function(program: str, trio: tvm_ipc.Session) -> None:
    module = trio.load_vm_module(program)
    x = trio.put(np.ones(5, "float32"))
    trio.sync()  # a rank that fails before another one has it costs that one its own error
    module["fails"](x, RANKS)
    errors = errors_at_sync(trio)
    assert [rank for rank, _, _ in errors] == list(range(RANKS))
    for _, kind, message in errors:
        assert kind in ("ValueError", "RuntimeError")
        assert "4" in message


def test_tensor_of_the_wrong_type_for_a_vm_function(program: str, trio: tvm_ipc.Session) -> None:
    module = trio.load_vm_module(program)
    module["fails"](trio.put(np.ones(4, "int32")), RANKS)
    for _, _, message in errors_at_sync(trio):
        assert "float32" in message


def test_function_that_a_module_lacks(program: str, trio: tvm_ipc.Session) -> None:
    module = trio.load_vm_module(program)
    module["nope"]
    for _, kind, message in errors_at_sync(trio):
        assert (kind, message) == ("ValueError", "the module has no function nope")
    module["fails"](trio.put(np.ones(4, "float32")), RANKS)


def test_file_that_is_no_module(tmp_path: Path, trio: tvm_ipc.Session) -> None:
    path = tmp_path / "text.so"
    path.write_bytes(b"\x7fELF no library")
    trio.load_vm_module(path)
    for rank, _, message in errors_at_sync(trio):
        assert rank in range(RANKS)
        assert "text.so" in message


def test_file_that_is_not_there(trio: tvm_ipc.Session) -> None:
    with pytest.raises(FileNotFoundError, match=r"no compiled module at '/no/such/file\.so'"):
        trio.load_vm_module("/no/such/file.so")


def test_tensor_that_no_memory_holds(trio: tvm_ipc.Session) -> None:
    trio.empty((1 << 46,), "float32")
    assert {kind for _, kind, _ in errors_at_sync(trio)} == {"MemoryError"}


def test_python_module_that_is_not_there(trio: tvm_ipc.Session) -> None:
    trio.import_python_module("no_such_module")
    for rank, kind, message in errors_at_sync(trio):
        assert kind == "ModuleNotFoundError"
        assert rank in range(RANKS)
        assert "No module named 'no_such_module'" in message


@pytest.mark.parametrize("timeout", [1e10, 1e300])
def test_deadline_that_never_comes(timeout: float) -> None:
    with tvm_ipc.Session(2, threads=True, timeout=timeout) as session:
        session.import_python_module("tests.runtime.worker_functions")
        x = session.put(np.ones(3))
        call(session, "tests.sleep_on", 1, 0.3)
        session.allreduce(x, x)
        np.testing.assert_array_equal(session.get(x), np.full(3, 2.0))


# ---- errors at the end ----------------------------------------------------------------------


def start_and_fail(threads: bool) -> tvm_ipc.Session:
    session = tvm_ipc.Session(2, threads=threads)
    session.import_python_module("tests.runtime.worker_functions")
    call(session, "tests.fail_on", 1, "ValueError", "just before the end")
    return session


@pytest.mark.parametrize("threads", [True, False], ids=["threads", "processes"])
def test_close_raises_what_is_left(threads: bool) -> None:
    session = start_and_fail(threads)
    with pytest.raises(WorkerError, match="rank 1: ValueError: just before the end"):
        session.close()
    assert not session.usable
    session.close()


def test_leaving_the_block_raises_what_is_left() -> None:
    with pytest.raises(WorkerError, match="just before the end"), start_and_fail(True):
        pass


def test_leaving_the_block_with_an_exception_does_not_replace_it() -> None:
    class OwnError(Exception):
        pass

    with pytest.raises(OwnError), start_and_fail(True) as session:
        raise OwnError
    assert not session.usable


def test_errors_of_one_session_are_not_those_of_another(trio: tvm_ipc.Session) -> None:
    with tvm_ipc.Session(2, threads=True) as other:
        other.import_python_module("tests.runtime.worker_functions")
        call(other, "tests.fail_on", 0, "ValueError", "over there")
        trio.sync()
        with pytest.raises(WorkerError, match="over there"):
            other.sync()
