# SPDX-License-Identifier: Apache-2.0
"""Pages and messages give commands that install the package as it can be installed today."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tvm_ipc import pip_install_commands

ROOT = Path(__file__).resolve().parents[1]
#: A command that takes the package from an index, which does not have it.
FROM_INDEX = re.compile(r"tvm-ipc\[|DISTRIBUTION\}\[|pip install[^`\n|&]*\btvm[-_]ipc\b")
#: A command for an extra that does not come from the constant.
OWN_COMMAND = re.compile(r"pip install '?\.\[")


def texts() -> list[Path]:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "mkdocs.yml"]
    sources = [
        path
        for folder in ("tvm_ipc", "benchmarks", "examples")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".cc", ".h", ".cmake")
    ]
    return [*pages, *sources]


def test_no_command_takes_the_package_from_an_index() -> None:
    assert len(texts()) > 400
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in texts()
        for match in FROM_INDEX.finditer(path.read_text().replace(" in a checkout of tvm-ipc", ""))
    ]
    assert found == []


def test_messages_have_the_command_from_one_constant() -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in texts()
        if path.suffix != ".md" and OWN_COMMAND.search(path.read_text())
    ]
    assert sorted(found) == ["mkdocs.yml", "tvm_ipc/pip_install_commands.py"]


@pytest.mark.parametrize(
    "text",
    [
        "pip install 'tvm-ipc[hf]'",
        "pip install '{DISTRIBUTION}[cuda]'",
        "`pip install --force-reinstall --no-deps tvm-ipc`",
    ],
)
def test_such_a_command_is_found(text: str) -> None:
    assert FROM_INDEX.search(text)


def test_the_commands() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nname = "{pip_install_commands.DISTRIBUTION}"\n' in project
    assert (
        pip_install_commands.install_extra("mpi") == "pip install '.[mpi]' in a checkout of tvm-ipc"
    )
    assert pip_install_commands.INSTALL == "`pip install .` in a checkout of tvm-ipc"


def test_extras_that_messages_name_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    sources = "".join(path.read_text() for path in texts() if path.suffix == ".py")
    named = set(re.findall(r"""install_extra\(['"](\w+)['"]\)""", sources))
    assert named >= {"cuda", "hf", "mpi"}
    assert [name for name in named if not re.search(rf"^{name} = \[", project, re.MULTILINE)] == []


def test_pytorch_for_cpus_comes_from_its_own_index() -> None:
    page = (ROOT / "docs" / "install.md").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    (torch,) = re.findall(r'^hf = \["(torch[^"]*)"', project, re.MULTILINE)
    command = f"pip install '{torch}' --index-url https://download.pytorch.org/whl/cpu\n"
    assert command in page
    assert "+cpu" not in page
