# SPDX-License-Identifier: Apache-2.0
"""What is compiled is kept by content, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tvm_ipc.errors import IPCError, ModelError
from tvm_ipc.models.hf import compile_cache
from tvm_ipc.models.hf.model_folder import ModelFolder, read_folder

FACTS = {
    "vocabulary": 7,
    "dtype": "float32",
    "ignored": [],
    "collectives": {"allreduce": 2},
    "notes": ["the plan was found"],
    "caches": [[2, 8, "float32"]],
    "weights": [["w", "p_w", [6, 4], "float32", ["S[0]"]]],
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Folders in which something was compiled, which takes no time here."""
    found: list[Path] = []

    def make(work: Path, *_: Any) -> None:
        found.append(work)
        (work / "model.so").write_bytes(b"code")
        facts = {**FACTS, "library": compile_cache.digest(work / "model.so")}
        (work / "model.json").write_text(json.dumps(facts))

    monkeypatch.setattr(compile_cache, "_compile_into", make)
    return found


def folder_of(tmp_path: Path, **config: Any) -> ModelFolder:
    folder = tmp_path / "model"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "model.safetensors").touch()
    return read_folder(folder)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TVM_IPC_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept" / "models"


def test_is_compiled_once(made: list[Path], tmp_path: Path, kept: Path) -> None:
    folder = folder_of(tmp_path)
    first = compile_cache.load_or_compile(folder, 2, "float32")
    second = compile_cache.load_or_compile(folder, 2, "float32")
    assert (first.cached, second.cached, len(made)) == (False, True, 1)
    assert first.library == second.library
    assert second.shards["w"].shard_shape == (3, 4)
    # Whatever it is made of makes another one.
    compile_cache.load_or_compile(folder, 3, "float32")
    compile_cache.load_or_compile(folder, 2, "bfloat16")
    compile_cache.load_or_compile(folder, 2, "float32", plan="auto")
    compile_cache.load_or_compile(folder, 2, "float32", plan={"q_proj": "colwise"})
    assert compile_cache.load_or_compile(folder, 2, "float32", plan={"q_proj": "colwise"}).cached
    compile_cache.load_or_compile(folder_of(tmp_path, rope_theta=5.0), 2, "float32")
    assert len(made) == 6
    assert len(list(kept.iterdir())) == 6, "nothing is left beside what is kept"


@pytest.mark.parametrize("name", ["model.so", "model.json"])
@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "other"])
def test_what_is_damaged_is_made_again(
    damage: str, name: str, made: list[Path], tmp_path: Path, kept: Path
) -> None:
    folder = folder_of(tmp_path)
    path = compile_cache.load_or_compile(folder, 2, "float32").library.parent / name
    if damage == "gone":
        path.unlink()
    else:
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[:-1], "empty": b"", "other": b"[]"}[damage])
    again = compile_cache.load_or_compile(folder, 2, "float32")
    assert (again.cached, len(made)) == (False, 2)
    assert again.library.read_bytes() == b"code"
    assert [one.name for one in kept.iterdir()] == [again.library.parent.name]


def test_several_at_a_time(made: list[Path], tmp_path: Path, kept: Path) -> None:
    folder = folder_of(tmp_path)
    make, together = compile_cache._compile_into, threading.Barrier(3)

    def all_at_once(*arguments: Any) -> None:
        together.wait(timeout=30)  # all have found nothing
        make(*arguments)

    compile_cache._compile_into = all_at_once
    found: list[Any] = []

    def one() -> None:
        found.append(compile_cache.load_or_compile(folder, 2, "float32"))

    threads = [threading.Thread(target=one) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({one.library for one in found}) == 1
    assert len(found) == len(made) == 3
    assert len(list(kept.iterdir())) == 1


def test_a_failure_leaves_nothing(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch, made: list[Path]
) -> None:
    def fail(work: Path, *_: Any) -> None:
        (work / "model.so").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_cache, "_compile_into", fail)
    with pytest.raises(KeyboardInterrupt):
        compile_cache.load_or_compile(folder_of(tmp_path), 2, "float32")
    assert list(kept.iterdir()) == []


def test_what_the_killed_left_is_swept(made: list[Path], tmp_path: Path, kept: Path) -> None:
    for name, age in ((".old", 2), (".new", 0)):
        (kept / name).mkdir(parents=True)
        then = time.time() - age * 86400
        os.utime(kept / name, (then, then))
    compile_cache.load_or_compile(folder_of(tmp_path), 2, "float32")
    assert {one.name for one in kept.iterdir() if one.name.startswith(".")} == {".new"}


def test_a_folder_that_cannot_be_written_is_no_error(
    made: list[Path], tmp_path: Path, kept: Path
) -> None:
    kept.parent.write_text("a file is in the way")
    found = compile_cache.load_or_compile(folder_of(tmp_path), 2, "float32")
    assert found.library.read_bytes() == b"code"
    assert "Not a directory" in found.why_not_cached or "File exists" in found.why_not_cached


def test_configurations_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        read_folder(tmp_path / "no")
    with pytest.raises(TypeError, match="folder is a folder with config"):
        read_folder(3)


@pytest.mark.parametrize(("full", "variable"), [("cache", "TVM_IPC_CACHE"), ("tmp", "TMPDIR")])
def test_a_full_disk_is_named(
    full: str, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilers and linkers end without saying which folder they could not write to."""

    def ends(*_: Any) -> None:
        raise RuntimeError("Compilation error:")

    def usage(path: Path) -> SimpleNamespace:
        is_tmp = path == Path(tempfile.gettempdir())
        return SimpleNamespace(free=2**20 if is_tmp == (full == "tmp") else 2**40)

    monkeypatch.setattr(compile_cache, "run_in_child", ends)
    monkeypatch.setattr(shutil, "disk_usage", usage)
    with pytest.raises(IPCError, match=rf"has 1.0 MiB free; .* {variable} .* Compilation error:"):
        compile_cache.load_or_compile(folder_of(tmp_path), 2, "float32")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**40))
    with pytest.raises(RuntimeError, match=r"^Compilation error:$"):
        compile_cache.load_or_compile(folder_of(tmp_path), 2, "float32")


@pytest.mark.parametrize("which", ["..", ".", "{name}", "{name}/model.so", "{name}/model.json"])
@pytest.mark.parametrize("how", ["owner", "mode"])
def test_what_other_users_can_write_is_not_executed(
    which: str,
    how: str,
    made: list[Path],
    kept: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = folder_of(tmp_path)
    first = compile_cache.load_or_compile(folder, 2, "float32")
    assert compile_cache.load_or_compile(folder, 2, "float32").cached
    path = kept / which.format(name=first.library.parent.name)
    if how == "mode":
        path.chmod(path.stat().st_mode | 0o002)
        words = "every user may write to"
    else:
        if os.geteuid() == 0:
            os.chown(path, 12345, -1)
        else:
            own = os.geteuid()
            monkeypatch.setattr(os, "geteuid", lambda: own + 1)
        words = "belongs to another user"
    found = compile_cache.load_or_compile(folder, 2, "float32")
    assert not found.cached
    assert words in found.why_not_cached
    assert "set TVM_IPC_CACHE" in found.why_not_cached
    assert len(made) == 2
    assert not found.library.is_relative_to(tmp_path / "kept")
    assert first.library.exists()
