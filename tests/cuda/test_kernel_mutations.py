# SPDX-License-Identifier: Apache-2.0
"""Mistakes in how the CUDA kernels go together, which their tests on the CPU must find.

All of them are put into a copy of the kernels, each under its number: so there is one compilation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # compiles the kernels for each mutation

ROOT = Path(__file__).resolve().parents[2]

#: The mistake, its file, what is there, and what instead, where `M` is whether it is made.
MUTATIONS = (
    (
        "one slot for what is pushed",
        "team_operation_device_code.h",
        "return team_.team_slot[member]->stage[epoch_ & 1];",
        "return team_.team_slot[member]->stage[M ? 0 : epoch_ & 1];",
    ),
    (
        "one slot for headers, which are compared for equality",
        "team_operation_device_code.h",
        "headers[epoch_ & 1]",
        "headers[M ? 0 : epoch_ & 1]",
    ),
    (
        "no meeting in the middle",
        "reduce_large_inputs_by_pull.h",
        "operation.Barrier(kForMiddle)",
        "(M || operation.Barrier(kForMiddle))",
    ),
    (
        "a meeting that does not release",
        "team_operation_device_code.h",
        "StoreRelease(flag, epoch_)",
        "M ? StoreRelaxed(flag, epoch_) : StoreRelease(flag, epoch_)",
    ),
    (
        "a meeting that does not acquire",
        "team_operation_device_code.h",
        "while (LoadAcquire(flag) != epoch_",
        "while ((M ? LoadRelaxed(flag) : LoadAcquire(flag)) != epoch_",
    ),
    (
        "a start that does not release",
        "team_operation_device_code.h",
        "if (kPublishesInput) {",
        "if (kPublishesInput && !M) {",
    ),
    (
        "a start that does not acquire",
        "team_operation_device_code.h",
        "kReadsInputs ? LoadPairAcquire(from)",
        "kReadsInputs && !M ? LoadPairAcquire(from)",
    ),
    (
        "no meeting at the end",
        "reduce_large_inputs_by_pull.h",
        "operation.Barrier(kForEnd, args.leaves_early == 0);",
        "if (!M) operation.Barrier(kForEnd, args.leaves_early == 0);",
    ),
    (
        "who leaves early whose input does not stay",
        "reduce_large_inputs_by_pull.h",
        "args.leaves_early == 0);",
        "!M && args.leaves_early == 0);",
    ),
    (
        "who leaves early does not tell that it has read",
        "team_operation_device_code.h",
        "if (member != team_.place) ",
        "if (member != team_.place && !(M && !hears)) ",
    ),
    (
        "who pushes need not hear from all",
        "reduce_small_inputs_by_push.h",
        "if (operation.talks()) operation.Hear<false>();",
        "if (operation.talks() && !M) operation.Hear<false>();",
    ),
    (
        "the first block that is done ends the operation",
        "team_operation_device_code.h",
        "AddHere(&own().arrived, 1) == Blocks() - 1",
        "AddHere(&own().arrived, 1) == (M ? 0 : Blocks() - 1)",
    ),
    (
        "a message that needs no credit",
        "messages_exposure_probe_device_code.h",
        "LoadAcquire(&out.taken), channel.packet() - 2)",
        "LoadAcquire(&out.taken), channel.packet() - (M ? 9 : 2))",
    ),
    (
        "a message that is taken before it is copied",
        "messages_exposure_probe_device_code.h",
        "StoreRelease(&out.taken, channel.packet())",
        "M ? StoreRelaxed(&out.taken, channel.packet()) : StoreRelease(&out.taken, "
        "channel.packet())",
    ),
    (
        "slots that are never cleared",
        "team_operation_device_code.h",
        "if (epoch_ % kClearEvery < 2) Clear();",
        "if (epoch_ % kClearEvery < 2 && !M) Clear();",
    ),
)


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command that runs a mutant, whose number comes last."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    copy = tmp_path_factory.mktemp("mutants")
    shutil.copytree(ROOT / "tvm_ipc/csrc", copy / "tvm_ipc/csrc")
    for folder in ("native", "cuda_double"):
        shutil.copytree(ROOT / "tests" / folder, copy / "tests" / folder)
    for number, (mistake, name, right, wrong) in enumerate(MUTATIONS, 1):
        path = copy / "tvm_ipc/csrc/cuda/kernels" / name
        source = path.read_text()
        assert right in source, f"{mistake}: the kernels have changed"
        path.write_text(source.replace(right, re.sub(r"\bM\b", f"(mutant == {number})", wrong)))
    program = copy / "mutant"
    csrc = copy / "tvm_ipc/csrc"
    command = [
        *(compiler, "-std=c++17", "-O1", "-g1", "-fsanitize=thread", "-ffp-contract=off", "-w"),
        *(f"-I{csrc}", f"-I{copy / 'tests/native'}", "-rdynamic"),
        *(str(copy / "tests/native/cuda_mutant.cc"), "-o", str(program), "-ldl", "-lpthread"),
    ]
    subprocess.run(command, check=True)
    # ThreadSanitizer of older compilers cannot place its shadow under many random address bits.
    setarch = ["setarch", os.uname().machine, "-R"]
    fixed = (
        shutil.which("setarch") and subprocess.run([*setarch, "true"], check=False).returncode == 0
    )
    return [*(setarch if fixed else ()), str(program)]


def outcome(command: list[str], mutant: int) -> str:
    """Empty if all went well."""
    try:
        ran = subprocess.run(
            [*command, str(mutant)],
            env={**os.environ, "TSAN_OPTIONS": "halt_on_error=1"},  # one report is enough
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "it hangs"
    return "" if ran.returncode == 0 else (ran.stdout + ran.stderr)[-2000:] or "it died"


def test_every_mistake_is_found(mutants: list[str]) -> None:
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda number: outcome(mutants, number), range(len(MUTATIONS) + 1)))
    assert found[0] == "", f"without a mistake: {found[0]}"
    missed = [mutation[0] for mutation, what in zip(MUTATIONS, found[1:], strict=True) if not what]
    assert missed == []
