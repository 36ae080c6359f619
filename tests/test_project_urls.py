# SPDX-License-Identifier: Apache-2.0
"""The addresses in the package's metadata derive from one address."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: The placeholder for the address until the repository is public.
PLACEHOLDER = "https://repository.invalid/tvm-ipc"
#: The labels that package indexes know, and what follows the address.
SUFFIXES = {
    "Homepage": "",
    "Source": "",
    "Issues": "/issues",
    "Documentation": "/tree/HEAD/docs",
    "Changelog": "/blob/HEAD/CHANGELOG.md",
}


def address() -> str:
    (source,) = re.findall(r'^Source = "(.*)"$', project(), re.MULTILINE)
    return str(source)


def project() -> str:
    return (ROOT / "pyproject.toml").read_text()


def check_urls(distribution: importlib.metadata.Distribution) -> None:
    entries = distribution.metadata.get_all("Project-URL") or []
    urls = dict(entry.split(", ", 1) for entry in entries)
    expected = {label: address() + suffix for label, suffix in SUFFIXES.items()}
    assert urls == {**expected, "Apache TVM": "https://tvm.apache.org"}


def test_the_metadata_that_is_built(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="needs the packages of the extra `dev`")
    hook = "prepare_metadata_for_build_wheel"
    code = f"import sys; from scikit_build_core.build import {hook}; {hook}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (folder,) = tmp_path.glob("*.dist-info")
    check_urls(importlib.metadata.Distribution.at(folder))


def test_the_paths_exist() -> None:
    for suffix in SUFFIXES.values():
        if "/HEAD/" in suffix:
            assert (ROOT / suffix.partition("/HEAD/")[2]).exists(), suffix


def test_the_release_names_the_placeholder() -> None:
    steps = (ROOT / "docs" / "contributing.md").read_text().partition("Steps of a release:")[2]
    assert f"`{PLACEHOLDER}`" in steps
    if address() == PLACEHOLDER:
        assert project().count("repository.invalid") == len(SUFFIXES) + 1  # and a comment
    else:
        assert "repository.invalid" not in project()


def test_security_names_a_channel() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "**Security**" in text and "**Report a vulnerability**" in text
    assert "metadata" not in text  # it names nobody
