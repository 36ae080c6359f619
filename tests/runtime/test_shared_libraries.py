# SPDX-License-Identifier: Apache-2.0
"""What a user reads when a library is missing or the versions differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from tvm_ipc.errors import LibraryError
from tvm_ipc.runtime import shared_libraries


def test_loading_twice_gives_the_same_library() -> None:
    assert shared_libraries.load() == shared_libraries.load()
    assert shared_libraries.load().name == "libtvm_ipc.so"


def test_missing_library_names_the_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "libtvm_ipc.so"
    monkeypatch.setattr(shared_libraries, "_library_paths", lambda: [place])
    with pytest.raises(LibraryError, match=r"missing: looked for .*pip install") as error:
        shared_libraries._load_native()
    assert str(place) in str(error.value)


def test_broken_library_tells_what_the_linker_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    place = tmp_path / "libtvm_ipc.so"
    place.write_bytes(b"no library")
    monkeypatch.setattr(shared_libraries, "_library_paths", lambda: [place])
    with pytest.raises(LibraryError, match=f"cannot be loaded: {place}: .*reinstall"):
        shared_libraries._load_native()


def test_installed_pair_is_the_tested_one() -> None:
    assert all(version.matches for version in shared_libraries.versions())
    assert shared_libraries.explain_versions() == ""


def test_another_pair_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = (
        shared_libraries.Version("apache-tvm", "0.27.0.post1", "0.27.0.post1"),
        shared_libraries.Version("apache-tvm-ffi", "0.1.14.post1", "0.1.15.post2"),
    )
    monkeypatch.setattr(shared_libraries, "versions", lambda: pair)
    explanation = shared_libraries.explain_versions()
    assert "installed apache-tvm 0.27.0.post1, apache-tvm-ffi 0.1.15.post2" in explanation
    assert "pip install apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1" in explanation


def test_nothing_is_loaded_beside_another_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise AssertionError("it is loaded")

    monkeypatch.setattr(shared_libraries, "_native", None)
    monkeypatch.setattr(shared_libraries, "_load_native", load)
    monkeypatch.setattr(shared_libraries, "explain_versions", lambda: "another pair")
    with pytest.raises(LibraryError, match="another pair"):
        shared_libraries.load()
