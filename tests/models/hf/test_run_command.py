# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc run`: text on the standard output, and one clear line for whatever goes wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.models.hf.checkpoints import continued, saved_with
from tests.models.hf.tokenizers_of_tests import of_words
from tvm_ipc.__main__ import main
from tvm_ipc.errors import IPCError
from tvm_ipc.models.hf import compile_cache
from tvm_ipc.models.hf.load_and_generate import Model
from tvm_ipc.nodes.find_mpi_installation import find_mpi

WORDS = [f"word{k}" for k in range(67)]
TEXT, TOKENS = "word5 word61 word17 word3", "5,61,17,3"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, saved_with(of_words(), folder)


@pytest.fixture
def folder(trained: tuple[Path, Any], tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(trained[0], tmp_path / "model"))


def run(capfd: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> tuple[str, str]:
    capfd.readouterr()
    try:
        found = main(["run", *map(str, arguments), "--threads"])
    except SystemExit as end:
        found = end.code
    out, err = capfd.readouterr()
    assert found == code, (out, err)
    # TVM prints this where a process loads libraries that it compiled itself, as tests do.
    lines = err.splitlines(keepends=True)
    return out, "".join(line for line in lines if not line.startswith("Warning:SystemLib"))


def refused(capfd: pytest.CaptureFixture[str], *arguments: object, code: int = 1) -> str:
    out, err = run(capfd, *arguments, code=code)
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("tvm-ipc")
    return line


def test_two_nodes(trained: tuple[Path, Any], capfd: pytest.CaptureFixture[str]) -> None:
    try:
        find_mpi()
    except IPCError as error:
        pytest.skip(str(error))
    folder, model = trained
    given = ["run", str(folder), "--tokens", TOKENS, "--max-new-tokens", "6", "--hosts", "2"]
    assert main([*given, "--json"]) == 0
    said = json.loads(capfd.readouterr().out)
    assert said["tokens"] == continued(model, [5, 61, 17, 3], 6)
    assert (len(said["nodes"]), len(said["memory"]["peak_of_processes"])) == (2, 2)


def test_text(trained: tuple[Path, Any], capfd: pytest.CaptureFixture[str]) -> None:
    folder, model = trained
    expected = continued(model, [5, 61, 17, 3], 6)
    text = " ".join(WORDS[token] for token in expected)
    out, err = run(capfd, folder, "--prompt", TEXT, "--max-new-tokens", 6)
    assert out.split() == text.split()
    assert out.endswith("\n")
    assert [line.split()[0] for line in err.splitlines()] == ["model", "time", "memory"]
    assert "tokens/s" in err
    out, _ = run(capfd, folder, "--tokens", TOKENS, "--max-new-tokens", 6)
    assert out == ",".join(map(str, expected)) + "\n"
    asked: list[int] = []
    generate = Model.generate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Model,
            "generate",
            lambda self, ids, count, **how: (
                asked.append(count),
                generate(self, ids, count, **how),
            )[1],
        )
        out, err = run(capfd, folder, "--prompt", TEXT, "--max-new-tokens", 6, "--json", "--bench")
    assert sorted(asked) == [2, 6], "both are warm when they are timed"
    facts = json.loads(out)
    assert (facts["tokens"], facts["text"]) == (expected, text)
    assert err == ""
    assert facts["pytorch"]["tokens"] == expected
    assert facts["compiled_before"]
    drawn = ("--temperature", 3, "--seed", 1, "--max-new-tokens", 6)
    first, _ = run(capfd, folder, "--tokens", TOKENS, *drawn)
    again, _ = run(capfd, folder, "--tokens", TOKENS, *drawn)
    assert first == again != out


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


def configure(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def noise(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)


def without_a_tensor(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (shutil.rmtree, "does not exist; a model is a folder with config.json"),
        (remove("config.json"), "there is no config.json"),
        (remove("model.safetensors"), "there are no weights in *.safetensors"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "it must have a JSON object"),
        (configure(model_type=None), "it has no 'model_type'"),
        (configure(model_type="lama"), "model_type 'lama' is not an architecture of transformers"),
        (configure(model_type="vit"), "model_type 'vit' is not a causal language model"),
        (
            configure(quantization_config={"quant_method": "gptq"}),
            "weights are quantized (gptq)",
        ),
        (configure(dtype="float8_e4m3fn"), "its weights are float8_e4m3fn"),
        (cut_short, "model.safetensors"),
        (noise, "model.safetensors"),
        (without_a_tensor, "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_what_is_wrong_is_one_line(
    damage: Callable[[Path], object],
    said: str,
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    damage(folder)
    assert said in refused(capfd, folder, "--tokens", TOKENS)


def test_prompts_that_are_refused(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    line = refused(capfd, folder / "config.json", "--tokens", "1")
    assert "is a file; a model is a folder" in line
    line = refused(capfd, folder, "--tokens", "1,67")
    assert "--tokens has 67, but the model's tokens are 0 to 66" in line
    line = refused(capfd, folder, "--tokens", "1", "--max-new-tokens", 5000)
    assert "1 tokens and 5000 new ones are more than the 4096" in line
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert "give token ids with --tokens" in refused(capfd, folder, "--prompt", TEXT)
    assert "there is no prompt; specify --prompt" in refused(capfd, folder, code=2)
    assert "--prompt conflicts with --tokens; specify one of them" in refused(
        capfd, folder, "--prompt", "a", "--tokens", "1", code=2
    )


def test_without_pytorch(
    trained: tuple[Path, Any],
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It is needed to compile, and no more."""
    run(capfd, trained[0], "--tokens", TOKENS, "--max-new-tokens", 2)
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setitem(sys.modules, "transformers", None)
    run(capfd, trained[0], "--tokens", TOKENS, "--max-new-tokens", 2)
    configure(rms_norm_eps=0.5)(folder)
    line = refused(capfd, folder, "--tokens", TOKENS)
    assert "to compile a model torch is needed, which" in line
    assert "pip install '.[hf]' in a checkout of tvm-ipc" in line


def test_what_cannot_be_kept(
    trained: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It runs, and is not said to be kept as well."""
    made = compile_cache.load_or_compile
    why = {"cached": False, "why_not_cached": "Read-only file system"}
    monkeypatch.setattr(
        compile_cache, "load_or_compile", lambda *a, **b: replace(made(*a, **b), **why)
    )
    _, err = run(capfd, trained[0], "--tokens", TOKENS, "--max-new-tokens", 2)
    assert "but not cached: Read-only file system; weights loaded" in err
    assert "loaded from the cache" not in err


@pytest.fixture
def running(trained: tuple[Path, Any], cache: Path) -> Iterator[subprocess.Popen[str]]:
    """The command as a process, which generates for long."""
    line = [sys.executable, "-m", "tvm_ipc", "run", str(trained[0]), "--tokens", TOKENS]
    process = subprocess.Popen(
        [*line, "--max-new-tokens", "4000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.read(20)  # it has begun
        yield process
    finally:
        process.kill()
        process.communicate()


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    tasks = children.parents[1].iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def gone(pids: list[int]) -> bool:
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.1)
    return False


@pytest.mark.parametrize("how", ["interrupted", "killed", "a worker killed"])
def test_ends(how: str, running: subprocess.Popen[str]) -> None:
    workers = workers_of(running)
    assert workers
    if how == "interrupted":
        running.send_signal(signal.SIGINT)
    elif how == "killed":
        running.kill()
    else:
        os.kill(workers[0], signal.SIGKILL)
    _, err = running.communicate(timeout=60)
    if how == "killed":
        assert running.returncode == -signal.SIGKILL
    elif how == "interrupted":
        assert (running.returncode, err) == (130, "tvm-ipc: interrupted\n")
    else:
        assert running.returncode == 1
        (line,) = err.splitlines()
        assert line.startswith("tvm-ipc: ")
        assert "rank 1" in line
        assert "died" in line
    assert gone(workers)
