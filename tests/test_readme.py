# SPDX-License-Identifier: Apache-2.0
"""What the README and the pages that it leads to say runs, is there, and is complete."""

from __future__ import annotations

import fnmatch
import inspect
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tvm

import tvm_ipc
from tvm_ipc import Session, errors, packed_functions
from tvm_ipc.packed_functions import KINDS
from tvm_ipc.runtime import config

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def page(name: str) -> str:
    """The text of a page of docs/."""
    return (ROOT / "docs" / f"{name}.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    """Every fenced block of a text in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def quoted(text: str) -> set[str]:
    """What stands between backticks outside of blocks."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return set(re.findall(r"`([^`\n]+)`", prose))


@pytest.fixture
def run_program() -> Callable[[Path, str], str]:
    """Runs a program from a file, since TVMScript reads the source of its modules."""

    def run(path: Path, text: str) -> str:
        path.write_text(text)
        result = subprocess.run(
            [sys.executable, str(path)],
            cwd=path.parent,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout

    return run


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 130
    collective, model = blocks("python")
    assert sum(bool(line.strip()) for line in collective.splitlines()) <= 10
    assert sum(bool(line.strip()) for line in model.splitlines()) <= 24


def test_the_first_program_runs_at_a_prompt() -> None:
    (program, _) = blocks("python")
    result = subprocess.run(
        [sys.executable, "-i", "-q"], input=program, capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "[ 4.  6.  8. 10.]\n", result.stderr


def test_links_of_the_readme_lead_to_files() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", README)
    assert len(links) > 15
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_program_puts_the_input_into_shared_memory(
    tmp_path: Path, run_program: Callable[[Path, str], str]
) -> None:
    (_, program) = blocks("python")
    check = """
for compiled, places in ((tvm.compile(parallel.module, target="llvm"), 0), (program, 1)):
    with tvm_ipc.Session(2, threads=True) as session:
        main = session.load_vm_module(compiled)["main"]
        result = main(session.put(x), session.put(up[:, :128]), session.put(down[:128]))
        expected = 2 * np.maximum(x @ up[:, :128], 0) @ down[:128]
        np.testing.assert_allclose(session.get(result), expected, rtol=1e-5)
        stats = session.get_global_func("tvm_ipc.arena_stats")().debug_get_from_remote(0)
        assert f'"allocations":{places}' in stats, stats
"""
    assert run_program(tmp_path / "program.py", program + check) == "right: True\n"


@pytest.mark.parametrize(
    ("target", "options", "others"),
    [
        (
            "llvm",
            {"async_collectives": True, "fuse_attention": True},
            {"FixSumOrder", "RewriteCUDAGraph"},
        ),
        (
            {"kind": "cuda", "arch": "sm_90"},
            {},
            {"FixSumOrder", "FuseAttention", "OffloadBLAS", "AsyncCollectives", "ScheduleForCPU"},
        ),
    ],
)
def test_passes_are_in_the_order_of_the_pipeline(
    target: Any, options: dict[str, Any], others: set[str]
) -> None:
    @tvm.instrument.pass_instrument
    class Recorder:
        def __init__(self) -> None:
            self.names: list[str] = []

        def run_before_pass(self, _module: object, info: tvm.transform.PassInfo) -> None:
            self.names.append(str(info.name))

    recorder = Recorder()
    with tvm.transform.PassContext(instruments=[recorder]):
        tvm_ipc.get_pipeline(target, 2, overlap=1, **options)(tvm.IRModule())
    table = re.findall(r"^\| `(\w+)\(", page("passes"), re.MULTILINE)
    homes = (tvm_ipc.transform, tvm_ipc.spmd, tvm_ipc.cpu, tvm_ipc.gpu)
    ours = [name for name in table if any(name in home.__all__ for home in homes)]
    assert len(ours) > 15
    # Our LegalizeOps runs TVM's.
    ran = list(dict.fromkeys(name for name in recorder.names if name in ours))
    # The solver of scopes is also a pass of its own.
    assert ran == [name for name in ours if name not in {"PlanMemoryScopes", *others}]


SAID = ("install", "tutorial", "troubleshooting", "performance", "benchmarks", "overlap", "gpus")


def test_commands_exist() -> None:
    text = README + "".join(map(page, SAID))
    commands = [
        command.strip()
        for block in blocks("sh", text)
        for line in block.splitlines()
        for command in line.split("&&")
    ] + [word for word in quoted(text) if word.startswith(("tvm-ipc ", "python "))]
    assert len(commands) > 20
    asked = set()
    for command in commands:
        program, *arguments = [
            one for one in shlex.split(command) if not one.startswith("TVM_IPC_")
        ]
        if program == "pip":
            assert arguments[0] == "install"
        elif program == "tvm-ipc":
            name = tuple(arguments if arguments[1:] == ["overlap"] else arguments[:1])
            if name in asked:
                continue
            asked.add(name)
            run = [sys.executable, "-m", "tvm_ipc", *arguments, "--help"]
            assert subprocess.run(run, capture_output=True).returncode == 0, command
        elif program != ".":
            assert program == "python", command
            rest = [a for a in arguments if a not in ("-m", "pytest", "venv")]
            own = {"program.py", "tutorial.py", ".venv", "--slow", "--full", "--llama"}
            assert all(a in own or (ROOT / a).exists() for a in rest), command


def test_extras_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = set(re.findall(r"'\.\[(\w+)\]'", README + "".join(map(page, SAID))))
    extras |= set(re.findall(r"^\| `([a-z]+)`[,| ]", page("install"), re.MULTILINE))
    assert len(extras) > 5
    for extra in extras:
        assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra


def test_ci_runs_the_commands_that_users_run() -> None:
    """Whatever the README prints as commands, which `.ci/run` takes out of it with awk."""
    ci = (ROOT / ".ci" / "run").read_text()
    (program,) = re.findall(r"awk '([^']*)' README\.md", ci)
    taken = subprocess.run(["awk", program, "README.md"], cwd=ROOT, capture_output=True, text=True)
    assert taken.stdout.split() == "".join(blocks("sh")).split()
    for command in ("pip install .", "tvm-ipc demo", "python -m pytest tests"):
        assert command in taken.stdout


def test_files_exist() -> None:
    names = {
        word for word in quoted(page("internals")) if re.fullmatch(r"[\w./]*\w\.(py|cc|h)", word)
    }
    assert {
        "packed_functions/program_function_declarations.py",
        "register.cc",
        "tests/test_layers.py",
    } <= names
    places = (ROOT, ROOT / "tvm_ipc", ROOT / "tvm_ipc" / "csrc")
    assert [n for n in names if not any((place / n).is_file() for place in places)] == []


def test_house_is_as_drawn() -> None:
    (house,) = blocks("text", page("internals"))
    drawn = re.findall(r"^( *)([\w.]+?)/?  ", house, re.MULTILINE)
    inside = {name for indent, name in drawn if indent}
    assert all((ROOT / name).is_dir() for indent, name in drawn if not indent)
    there = {path.name for path in (ROOT / "tvm_ipc").iterdir()}
    # Made by an editable install and by running, or of no interest.
    assert there - {"lib", "__pycache__", "py.typed"} == inside


def test_function_table_covers_the_contract() -> None:
    patterns = [word for word in quoted(page("internals")) if "." in word]
    ours = [
        f
        for f in packed_functions.FUNCTIONS
        if f.registered is not packed_functions.Registered.UPSTREAM
    ]
    # The page states where the kernel of a collective is that it does not list.
    by_name = {
        kind.function.name
        for kind in KINDS.values()
        if (ROOT / "tvm_ipc" / "csrc" / "shm" / f"{kind.name}.cc").is_file()
    }
    for function in ours:
        listed = any(fnmatch.fnmatch(function.name, pattern) for pattern in patterns)
        assert listed or function.name in by_name, function.name


def test_every_exception_is_explained() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    explained = set(re.findall(r"^\| `(\w+Error)` \|", page("errors"), re.MULTILINE))
    assert explained == classes


def test_configuration_is_complete() -> None:
    table = page("settings")
    variables = set(re.findall(r"TVM_IPC_[A-Z_]+", table))
    assert variables == set(config.SETTINGS)
    source = Path(config.__file__).read_text()
    read = set(
        re.findall(r"(?:environ\.get\(|_flag\(|_timeout\(|_limit\(|_set\()\"(TVM_IPC_\w+)", source)
    )
    assert read == variables
    parameters = set(inspect.signature(Session.__init__).parameters)
    named = set(re.findall(r"`([a-z_]+)`", table))
    assert parameters - named == {"self"}


def test_added_methods_exist() -> None:
    text = page("sessions")
    (table,) = re.findall(r"## Collectives\n(.*?)\n## ", text, re.DOTALL)
    names = {
        name
        for cell in re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)\(", cell)
    }
    assert names >= {"allreduce", "reduce_scatter", "reduce", "all_to_all", "emulate_link"}
    names |= set(re.findall(r"\bsession\.(\w+)", text.partition("## Plain Disco")[0]))
    others = {"put", "get", "sync", "close", "team", "usable", "pids", "load_vm_module"}
    assert names >= others
    assert [name for name in names if not hasattr(Session, name)] == []


def test_pinned_pair_is_that_of_the_project() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    pins = dict(re.findall(r'"(apache-tvm(?:-ffi)?)==([^"]+)"', project))
    for package, version in pins.items():
        assert f"{package} {version}" in README
        assert f"{package} {version}" in page("compatibility")
