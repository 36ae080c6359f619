# SPDX-License-Identifier: Apache-2.0
"""A controller has what workers have, and models are compiled in a process of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.hf.checkpoints import continued, saved_with
from tests.models.hf.tokenizers_of_tests import of_words
from tvm_ipc.__main__ import main

PROMPT = [5, 61, 17, 3]
PROGRAM = """
import json, sys
from pathlib import Path
import tvm_ipc

def most(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])

def loaded():
    return sorted({"torch", "transformers", "tvm.relax"} & set(sys.modules))

tvm_ipc.runtime_only()
tvm_ipc.runtime_only()
folder, prompt = json.loads(sys.argv[1])
found, heard = {}, ([], [])
with tvm_ipc.Session(2) as session:
    for one in heard:
        model = tvm_ipc.models.load(folder, session, progress=one.append)
    found["tokens"] = list(model.generate(prompt, 6))
    found["most"] = list(map(most, session.pids))
    found["modules"] = loaded()
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in session.pids]
    found["libraries"] = [name for name in ("libtorch", "libtvm_compiler") if name in "".join(maps)]
    found["text"] = "".join(model.generate("word5 word61 word17 word3", 6))
    found["modules_of_text"] = loaded()
from tvm_ipc.__main__ import main

assert main(["run", folder, "--prompt", "word5 word61", "--json"]) == 0
print(json.dumps({**found, "heard": heard, "modules_of_command": loaded()}))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, saved_with(of_words(), folder)


def test_a_controller_has_what_workers_have(trained: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = trained
    command = [sys.executable, "-c", PROGRAM, json.dumps([str(folder), PROMPT])]
    environment = {**os.environ, "TVM_IPC_CACHE": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr.count("Traceback")) == (0, 0), ended.stderr
    found = json.loads(ended.stdout.splitlines()[-1])
    assert found["tokens"] == continued(model, PROMPT, 6)
    assert found["modules"] == [], "of a controller, which starts with a model that is not compiled"
    assert found["libraries"] == [], "of the controller and of workers"
    assert found["text"] == " ".join(f"word{token}" for token in found["tokens"])
    assert found["modules_of_text"] == ["transformers"], "for the tokenizer"
    assert found["modules_of_command"] == ["transformers"]
    first, second = found["heard"]
    assert "compiling: legalize" in first
    assert second == ["loading weights"], "what is kept is taken as it is"
    assert found["most"][0] < 1.2 * found["most"][1]


def test_import_with_compiler(run_python: Callable[..., str]) -> None:
    """The compiler is there, and PyTorch is not until it is imported."""
    said = run_python(
        "import sys\n"
        "import tvm_ipc.models.hf.calls_in_child\n"
        "print({'tvm', 'tvm_ffi', 'torch'} & {*sys.modules})\n"
        "from tvm_ipc.runtime.import_tvm_without_compiler import import_with_compiler\n"
        "import_with_compiler()\n"
        "import tvm\n"
        "print('torch' in sys.modules)\n"
        "import torch\n"
        "print(tvm.runtime.tensor(torch.ones(2)).numpy().tolist(), tvm.relax.Var('x').name)\n"
    )
    assert said.splitlines() == ["set()", "False", "[1.0, 1.0] x"]


def test_runtime_only_comes_first(run_python: Callable[..., str]) -> None:
    said = run_python(
        "import tvm, tvm_ipc\n"
        "try:\n    tvm_ipc.runtime_only()\n"
        "except tvm_ipc.errors.IPCError as error:\n    print(error)\n"
    )
    assert "TVM has been imported already, with its compiler; call it before" in said


def test_programs_of_a_controller_without_a_compiler(run_python: Callable[..., str]) -> None:
    said = run_python(
        "import os, tvm_ipc\ntvm_ipc.runtime_only()\n"
        "assert 'TVM_USE_RUNTIME_LIB' not in os.environ, 'it is for this process alone'\n"
        "assert tvm_ipc.comm.Mesh({'tp': 2}).ranks == (0, 1)\n"
        "try:\n    tvm_ipc.comm.allreduce\n"
        "except AttributeError as error:\n    print(error)\n"
    )
    assert "no 'allreduce' where TVM's runtime is loaded without its compiler" in said


@pytest.fixture
def compiling(trained: tuple[Path, Any], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command, whose other process has begun."""
    line = [sys.executable, "-m", "tvm_ipc", "run", str(trained[0]), "--tokens", "1"]
    process = subprocess.Popen(
        line,
        env={**os.environ, "TVM_IPC_CACHE": str(tmp_path / "kept"), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def child_of(process: subprocess.Popen[str]) -> int:
    """The process that compiles, when it has begun to import PyTorch."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    for _ in range(600):
        for pid in map(int, children.read_text().split()):
            if "torch" in Path(f"/proc/{pid}/maps").read_text():
                return pid
        time.sleep(0.1)
    raise TimeoutError("nothing is compiled")


@pytest.mark.parametrize("how", ["interrupted", "killed", "the other one killed"])
def test_ends_while_it_compiles(how: str, compiling: subprocess.Popen[str], tmp_path: Path) -> None:
    child = child_of(compiling)
    if how == "interrupted":
        compiling.send_signal(signal.SIGINT)
    elif how == "killed":
        compiling.kill()
    else:
        os.kill(child, signal.SIGKILL)
    out, err = compiling.communicate(timeout=60)
    assert out == ""
    for _ in range(100):
        if not Path(f"/proc/{child}").exists():
            break
        time.sleep(0.1)
    assert not Path(f"/proc/{child}").exists()
    if how == "killed":
        return
    assert [one for one in tmp_path.rglob("*") if one.is_file()] == [], "nothing is left"
    if how == "interrupted":
        assert (compiling.returncode, err) == (130, "tvm-ipc: interrupted\n")
    else:
        assert compiling.returncode == 1
        (line,) = err.splitlines()
        assert line.startswith(
            "tvm-ipc: the process that was started to compile a model was killed"
        )


def test_an_interpreter_that_cannot_start(
    trained: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    from tvm_ipc.models.hf import compile_cache as compiling
    from tvm_ipc.runtime.subprocess_call import run_in_child

    monkeypatch.setattr(compiling, "run_in_child", run_in_child)
    monkeypatch.setenv("TVM_IPC_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert main(["run", str(trained[0]), "--tokens", "1", "--threads"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "a process is needed to compile a model, which cannot start" in line
