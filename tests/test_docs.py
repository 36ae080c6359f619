# SPDX-License-Identifier: Apache-2.0
"""The pages for contributors are true: files are there, words are used, and the example works."""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc.transform import collect_report

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
CONTRIBUTING = ROOT / "docs" / "contributing.md"


def terms() -> dict[str, str]:
    """The words of the glossary, and the file of each."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| `([^`]+)` \|$", GLOSSARY.read_text(), re.MULTILINE)
    assert len({term for term, _ in rows}) == len(rows)
    return dict(rows)


def test_the_glossary_has_few_rows_and_each_has_a_file() -> None:
    """Other words are those of TVM, MPI, NCCL and PyTorch."""
    rows = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    assert len(terms()) == sum(not row.startswith("| term |") for row in rows)
    assert 5 < len(terms()) <= 15


@pytest.mark.parametrize("term", terms())
def test_word_is_used_where_the_glossary_says(term: str) -> None:
    text = (ROOT / "tvm_ipc" / terms()[term]).read_text().lower()
    words = re.split(r"[ -]", term.partition(",")[0].lower())
    plain = re.sub(r"[\s*#:_-]+", "", text)
    assert "".join(words) in plain, f"{terms()[term]} does not have the word {term!r}"


def test_files_that_contributors_are_told_of_are_there() -> None:
    paths = set(re.findall(r"`((?:tvm_ipc|tests|docs|\.ci)/[\w./]*)`", CONTRIBUTING.read_text()))
    assert len(paths) > 15
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


TESTS = ROOT / "tests" / "README.md"
NAMED = re.findall(r"`(tests/[\w/]+\.(?:py|cc))::(\w+)`", TESTS.read_text())


def test_native_tests_that_contributors_are_told_of_are_there() -> None:
    text = CONTRIBUTING.read_text()
    named = {
        name
        for sentence in re.findall(r"native tests? (`[^;.|]*)", text)
        for name in re.findall(r"`(\w+)`", sentence)
    }
    named |= set(re.findall(r"`test_(\w+) \d+ SEED`", text))
    named |= set(re.findall(r"--target test_(\w+)", text))
    there = {path.stem.removeprefix("test_") for path in ROOT.glob("tests/native/test_*.cc")}
    assert {"internode_ring", "cuda_endpoint", "collectives_stress"} <= named <= there


def test_tests_that_the_readme_of_tests_names_are_there() -> None:
    assert len(NAMED) > 30
    assert re.findall(r"`(tests/[^`]*)::([^`]*)`", TESTS.read_text()) == NAMED, "another form"
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not re.search(rf"\n(?:def|void) {name}\(", (ROOT / path).read_text())
    ]
    assert missing == []


def test_each_pitfall_has_a_test_or_a_sentence() -> None:
    rows = [line.split(" | ") for line in TESTS.read_text().splitlines() if line.startswith("| ")]
    rows = [row for row in rows if row != ["| went wrong elsewhere", "here |"]]
    assert len(rows) > 20
    assert [row[0] for row in rows if len(row) != 2 or len(row[1].removesuffix(" |")) < 20] == []


def test_the_faults_that_contributors_try_have_their_places(tmp_path: Path) -> None:
    """A change of the core may move the text that a fault replaces."""
    command = [sys.executable, str(ROOT / "tests/native/faults.py"), str(tmp_path), "--list"]
    listed = subprocess.run(command, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr


def programs(page: str) -> list[str]:
    """The Python blocks of a page."""
    text = (ROOT / "docs" / page).read_text()
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_program(text: str, folder: Path) -> None:
    """Run it from a file, since TVMScript reads the source of what it parses."""
    (folder / "program.py").write_text(text)
    runpy.run_path(str(folder / "program.py"), run_name="__main__")


def test_parts_of_programs_are_python() -> None:
    """Those that cannot run alone, such as lines for others' programs; imports are right."""
    parts = [
        text
        for page in (ROOT / "docs").glob("*.md")
        for text in re.findall(r"^```py\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    assert len(parts) > 3
    for text in parts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tvm_ipc"):
                module = importlib.import_module(str(node.module))
                assert [one.name for one in node.names if not hasattr(module, one.name)] == []


def test_the_page_of_hugging_face_runs(
    run_python: Callable[..., str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    text, _ = programs("hugging_face.md")  # the other one runs in tests/models/hf
    compile(text, "hugging_face.md", "exec")
    if not pytestconfig.getoption("--every-model"):
        pytest.skip("--every-model compiles the model of the page")
    monkeypatch.setenv("TVM_IPC_CACHE", str(tmp_path))
    assert len(run_python(text).split()) == 16


def test_the_page_of_determinism_runs(tmp_path: Path) -> None:
    of_a_model, own = programs("determinism.md")  # the first is run in tests/models/hf
    compile(of_a_model, "determinism.md", "exec")
    run_program(own, tmp_path)


#: Pages whose programs stand alone. Those of the guide to a compiler are in tests/end_to_end.
PAGES = (
    "async_collectives.md",
    "bits.md",
    "communication.md",
    "overlap.md",
    "parallelize.md",
    "passes.md",
    "performance.md",
    "pipelines.md",
    "verifier.md",
)
#: Pages with programs that are run in another way.
OTHERS = {
    "bring_your_own_compiler.md",
    "coming_from.md",
    "contributing.md",
    "determinism.md",
    "gpus.md",
    "hugging_face.md",
    "many_nodes.md",
    "plans.md",
    "sessions.md",
    "testing.md",
    "troubleshooting.md",
    "tutorial.md",
}


def test_the_guide_to_sessions_runs(run_python: Callable[..., str]) -> None:
    """Its blocks are one program; that of a session of Disco is another."""
    *guide, of_disco = programs("sessions.md")
    assert len(guide) > 5
    assert "[2.0, 0.0, 2.0]" in run_python("".join(guide))
    run_python(of_disco)


def test_the_tests_of_the_page_about_tests_pass(tmp_path: Path) -> None:
    for number, text in enumerate(programs("testing.md")):
        (tmp_path / f"test_{number}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    # Options for this run may be unknown outside of the checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr


def test_names_that_are_compared_with_those_of_others_are_there() -> None:
    text = (ROOT / "docs" / "coming_from.md").read_text()
    holders = {"session": tvm_ipc.Session, "R.ccl": R.ccl, "R.comm": tvm_ipc.comm}
    named = [
        (holder, name)
        for holder in holders
        for name in re.findall(rf"`{re.escape(holder)}\.(\w+)", text)
    ]
    assert len(named) > 25
    assert [f"{h}.{n}" for h, n in named if not hasattr(holders[h], n)] == []


def test_programs_of_each_page_are_run() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if programs(path.name)}
    assert pages == {*PAGES, *OTHERS}


@pytest.mark.parametrize(
    "page", ["coming_from.md", "many_nodes.md", "plans.md", "troubleshooting.md", "tutorial.md"]
)
def test_page_prints_what_it_says(
    page: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its programs go on from each other, and the texts between are what they print."""
    monkeypatch.chdir(tmp_path)
    run_program("".join(programs(page)), tmp_path)
    text = (ROOT / "docs" / page).read_text()
    said = re.findall(r"^```text\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    printed = capsys.readouterr().out
    assert re.sub(r"pid \d+", "pid", printed) == re.sub(r"pid \d+", "pid", "".join(said))


def test_pictures_are_as_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    for name, draw in importlib.import_module("pictures").DRAWN.items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == draw(), name


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(text, id=f"{page}-{number}")
        for page in PAGES
        for number, text in enumerate(programs(page), start=1)
    ],
)
def test_pages_run(text: str, tmp_path: Path) -> None:
    run_program(text, tmp_path)


def test_the_pass_for_contributors_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = CONTRIBUTING.read_text()
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    (tmp_path / "remove_self_copies.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("remove_self_copies")

    @I.ir_module
    class Before:
        @R.function(pure=False)
        def main(a: R.Tensor((4,), "float32"), b: R.Tensor((4,), "float32")):
            R.call_packed("tvm_ipc.copy", a, b, ty_args=(R.Tuple,))
            R.call_packed("tvm_ipc.copy", a, a, ty_args=(R.Tuple,))
            return b

    @I.ir_module
    class Expected:
        @R.function(pure=False)
        def main(a: R.Tensor((4,), "float32"), b: R.Tensor((4,), "float32")):
            R.call_packed("tvm_ipc.copy", a, b, ty_args=(R.Tuple,))
            return b

    with collect_report() as report:
        after = module.RemoveSelfCopies()(Before)
    tvm.ir.assert_structural_equal(after, Expected)
    assert [one.verdict for one in report.decisions] == ["removed"]
    with pytest.raises(TypeError, match="RemoveSelfCopies: tell"):
        module.RemoveSelfCopies(tell=3)
