# SPDX-License-Identifier: Apache-2.0
"""The decoder for GPUs: it compiles without one, and the demo says what it lacks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tvm

import tvm_ipc
from tvm_ipc.errors import IPCError
from tvm_ipc.examples.tensor_parallel_decoder import attention_kernels
from tvm_ipc.examples.tensor_parallel_decoder import decoder_model as model
from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config
from tvm_ipc.gpu import discovery
from tvm_ipc.tools import demo

CONFIG = Config(layers=1, hidden=64, heads=8, kv_heads=4, inner=96, vocabulary=128, context=80)
TARGET = tvm.target.Target({"kind": "cuda", "arch": "sm_90"}, host="llvm")


def compiled(dtype: str, **options: Any) -> tuple[str, str]:
    """The program of the VM, and the source of the kernels."""
    overlap = options.pop("overlap", None)
    config = Config(**{**vars(CONFIG), "dtype": dtype})
    mod = model.build(config, 2, device="cuda", **options)
    pipeline = tvm_ipc.get_pipeline(TARGET, 2, overlap=overlap)
    executable = tvm.compile(mod, TARGET, relax_pipeline=pipeline)
    return executable.as_text(), executable.mod.imports[0].imports[0].inspect_source()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_loop_has_threads(dtype: str) -> None:
    program, source = compiled(dtype)
    found = re.findall(r"__launch_bounds__\((\d+)\) (\w+)_kernel\(", source)
    threads = {name: int(count) for count, name in found}
    assert threads["attend"] == 128
    assert "append" in threads
    assert any("argmax" in name for name in threads)
    assert min(threads.values()) > 1
    assert "tvm_ipc.allreduce_rms_norm" in program


def test_rows_of_prompts_in_parts() -> None:
    program, _ = compiled("float32", sequence_parallel=True, overlap=2)
    for name in ("team_index", "expose", "peer_view", "reduce_slices", "release"):
        assert f"tvm_ipc.{name}" in program


def test_a_context_without_room_for_its_scores_is_refused() -> None:
    most = attention_kernels.LONGEST
    attention_kernels.attend_on_gpu(2, 2, 8, most, "float32")
    words = f"the context is {most + 64}, .* supports at most {most} positions"
    with pytest.raises(IPCError, match=words):
        attention_kernels.attend_on_gpu(2, 2, 8, most + 64, "float32")


def test_the_demo_says_what_it_lacks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(discovery, "find", lambda: discovery.Gpus("", "there is no driver", (), ()))
    with pytest.raises(IPCError, match=r"demo --device cuda: .* need an NVIDIA GPU: there is no d"):
        demo.main(["--device", "cuda"])
    assert capfd.readouterr().out == ""


def test_threads_that_would_share_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one = discovery.Gpu(0, "A GPU", "9.0", 1 << 34, "sm_90", "")
    monkeypatch.setattr(discovery, "find", lambda: discovery.Gpus("13.0", "", (one,), ("sm_90",)))
    with pytest.raises(IPCError, match=r"--threads: 4 threads cannot share 1 GPU; .* --threads"):
        demo.main(["--device", "cuda", "--threads"])


def test_the_blas_is_for_cpus(capfd: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cuda", "--blas"]) == 2
    assert "--blas needs --device cpu" in capfd.readouterr().err
