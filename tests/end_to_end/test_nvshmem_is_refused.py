# SPDX-License-Identifier: Apache-2.0
"""Programs for TVM's backend of NVSHMEM are refused with a sentence that names what to use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm import relax
from tvm.relax.frontend.nn.llm.kv_cache import TIRPagedKVCache
from tvm.runtime import disco
from tvm.script import relax as R

import tvm_ipc
from tests.end_to_end import test_paged_decoder
from tests.runtime.disco_kinds import errors_at_sync
from tvm_ipc.errors import TransformError, WorkerError
from tvm_ipc.packed_functions.nvshmem_names import NO_NVSHMEM
from tvm_ipc.transform import verify_cross_rank_safety

#: All that TVM registers with NVSHMEM.
NAMES = [
    "runtime.disco.nvshmem.init_nvshmem_uid",
    "runtime.disco.nvshmem.init_nvshmem",
    "runtime.disco.nvshmem.init_nvshmem_wrapper",
    "runtime.disco.nvshmem.finalize_nvshmem",
    "runtime.disco.nvshmem.empty",
    "runtime.disco.nvshmem.barrier_all_on_stream",
    "runtime.disco.nvshmem.barrier_all_on_current_stream",
    "runtime.nvshmem.cumodule_init",
    "nvshmem.KVTransfer",
    "nvshmem.KVTransferPageToPage",
]


@pytest.fixture(scope="module", params=[2, 3, 4])
def session(request: pytest.FixtureRequest) -> Iterator[tvm_ipc.Session]:
    with tvm_ipc.Session(request.param, timeout=60) as session:
        yield session


def calling(name: str) -> tvm.IRModule:
    builder = relax.BlockBuilder()
    x = relax.Var("x", R.Tensor((4,), "float32"))
    with builder.function("main", [x], pure=False):
        call = relax.Call(relax.ExternFunc(name), [x], ty_args=[relax.AnyType()])
        builder.emit_func_output(builder.emit(call))
    return builder.get()


@pytest.mark.parametrize("name", NAMES)
def test_looked_up_in_a_session(name: str, session: tvm_ipc.Session) -> None:
    session.get_global_func(name)
    errors = errors_at_sync(session)
    assert {rank for rank, _, _ in errors} == set(range(session.num_workers))
    assert {message for _, _, message in errors} == {f"there is no function {name}: {NO_NVSHMEM}"}
    assert session.get(session.put(np.ones(2))).tolist() == [1, 1]


@pytest.mark.parametrize("name", NAMES[4::4])
def test_called_by_a_program(name: str, session: tvm_ipc.Session) -> None:
    """TVM's own pipeline compiles it, and the virtual machine looks it up when it is loaded."""
    session.load_vm_module(tvm.compile(calling(name), "llvm"))
    messages = {message for _, _, message in errors_at_sync(session)}
    assert messages == {f"there is no function {name}: {NO_NVSHMEM}"}


def test_in_a_session_of_disco() -> None:
    session = disco.ThreadedSession(2)
    tvm_ipc.init_ccl(session)
    try:
        with pytest.raises(WorkerError, match=r"function nvshmem\.KVTransfer: tvm_ipc has no NVS"):
            session.get_global_func("nvshmem.KVTransfer")(1)
            session._sync_all()
    finally:
        session.shutdown()


@pytest.mark.parametrize("name", NAMES)
def test_compiled_by_our_pipeline(name: str) -> None:
    with pytest.raises(TransformError) as error:
        tvm.compile(calling(name), "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 2))
    assert f"{name} is not available to workers; {NO_NVSHMEM}" in str(error.value)
    (hazard,) = verify_cross_rank_safety(calling(name))
    assert (hazard.kind.name, hazard.function) == ("UNAVAILABLE", "main")


def test_a_kv_cache_for_disaggregated_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM asks its users to compile TVM with NVSHMEM."""

    def transferring(**options: Any) -> Any:
        return TIRPagedKVCache(**{**options, "enable_disaggregation": True})

    monkeypatch.setattr(test_paged_decoder, "TIRPagedKVCache", transferring)
    mod, _ = test_paged_decoder.module_of(2)
    program = tvm.compile(mod, "llvm", relax_pipeline=tvm_ipc.get_pipeline("llvm", 2))
    shape = tvm_ffi.Shape
    with tvm_ipc.Session(2, timeout=60) as session:
        create = session.load_vm_module(program)["create"]
        create(shape([2]), shape([64]), shape([16]), shape([16]))
        messages = {message for _, _, message in errors_at_sync(session)}
    assert messages == {f"a KV cache with enable_disaggregation=True uses NVSHMEM: {NO_NVSHMEM}"}


def test_other_functions_keep_their_message(session: tvm_ipc.Session) -> None:
    session.get_global_func("nvshmemlike.function")
    messages = {message for _, _, message in errors_at_sync(session)}
    (message,) = messages
    assert message.startswith("the worker has no global function nvshmemlike.function; call")


def test_programs_that_ask_whether_it_is_there_get_the_answer_of_the_wheel() -> None:
    found: list[Any] = [tvm_ffi.get_global_func(name, allow_missing=True) for name in NAMES]
    assert found == [None] * len(NAMES)
