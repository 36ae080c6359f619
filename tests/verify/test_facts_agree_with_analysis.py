# SPDX-License-Identifier: Apache-2.0
"""The verifier and the passes state the same facts about TVM, each in tables of its own.

The tables are separate on purpose: with one table, a wrong entry would make a pass reuse memory
that is in use, and the verifier accept it. So the verifier imports no table of `tvm_ipc.analysis`,
and these tests compare both. They agree in what is certain. Where an operator only may return its
argument, the verifier assumes that it does.
"""

from __future__ import annotations

import pytest
import tvm
from tvm import relax, tirx

from tests.end_to_end.small_decoder import Decoder
from tvm_ipc.analysis.primfunc_effects import find_parameters
from tvm_ipc.analysis.views_and_writes_of_calls import VIEWS, WRITERS
from tvm_ipc.packed_functions import PROGRAMS
from tvm_ipc.verify import known_calls
from tvm_ipc.verify.primfunc_written_parameters import written_parameters


def test_the_same_calls_return_views() -> None:
    views_of_tvm = VIEWS - PROGRAMS.keys()
    assert views_of_tvm == known_calls.SAME_MEMORY
    assert known_calls.SAME_MEMORY <= known_calls.VIEWS | known_calls.VIEW_OPERATORS
    # The verifier takes ours from the signature alone.
    assert all(PROGRAMS[name].result_of for name in VIEWS & PROGRAMS.keys())


def test_what_may_write_its_arguments_is_unknown_to_the_verifier() -> None:
    followed = {"relax.call_tir_inplace", "relax.call_builtin_with_ctx"}
    assert set(WRITERS) <= known_calls.UNKNOWN_OPERATORS | followed


@pytest.mark.parametrize(
    "table", ["ALLOCATIONS", "VIEWS", "VIEW_OPERATORS", "READERS", "UNKNOWN_OPERATORS"]
)
def test_tvm_has_what_the_verifier_lists(table: str) -> None:
    for name in getattr(known_calls, table):
        if name.startswith("relax."):
            assert tvm.ir.Op.get(name).name == name
        else:
            tvm.get_global_func(name)


def test_the_same_parameters_of_kernels_are_written() -> None:
    mod = relax.transform.LegalizeOps()(Decoder().builder.get())
    kernels = {name: f for name, f in mod.functions_items() if isinstance(f, tirx.PrimFunc)}
    assert len(kernels) > 5
    for name, kernel in kernels.items():
        written = {k for k, one in enumerate(find_parameters(kernel)) if one.may_be_written}
        assert written_parameters(kernel) == written, name
