# SPDX-License-Identifier: Apache-2.0
"""Statements of docs/notebooks.md: cells, workers, interrupts and the end of a kernel.

Wants `nbclient` and `ipykernel`, which `.ci/run` installs; skipped where they are missing.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel", reason="no ipykernel here: pip install nbclient ipykernel")
nbclient = pytest.importorskip(
    "nbclient", reason="no nbclient here: pip install nbclient ipykernel"
)
nbformat = pytest.importorskip("nbformat")
manager = pytest.importorskip("jupyter_client.manager")

NOTEBOOK = Path(__file__).resolve().parents[1] / "examples" / "quickstart.ipynb"
#: Runs a cell, which is interrupted after some seconds; returns what it shows.
Cell = Callable[..., str]


def environment() -> dict[str, str]:
    """Return the environment of a user.

    With the first variable kernels do not import from the current directory, and with the second
    they do not show what other processes print.
    """
    hidden = ("PYTHONSAFEPATH", "PYTEST_CURRENT_TEST")
    return {name: value for name, value in os.environ.items() if name not in hidden}


def results(notebook: Any) -> list[list[str]]:
    """Return the value of each cell that has one."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [
        [one.data["text/plain"] for one in cell.outputs if one.output_type == "execute_result"]
        for cell in cells
    ]


def lines(notebook: Any) -> list[str]:
    """Return the printed lines; those of workers may come a cell later."""
    outputs = [one for cell in notebook.cells for one in cell.get("outputs", [])]
    return sorted("".join(one.get("text", "") for one in outputs).split("\n"))


def test_the_notebook_shows_what_it_shows(tmp_path: Path) -> None:
    stored = nbformat.read(NOTEBOOK, as_version=4)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, resources=resources).execute(env=environment())
    assert results(notebook) == results(stored)
    assert lines(notebook) == lines(stored)
    assert any("hello, notebook" in line for line in lines(notebook))


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[Any, Cell]]:
    """A kernel in a folder of its own."""
    kernel, client = manager.start_new_kernel(
        kernel_name="python3", cwd=str(tmp_path), env=environment()
    )

    def run(code: str, interrupt_after: float | None = None) -> str:
        request = client.execute(code)
        if interrupt_after is not None:
            time.sleep(interrupt_after)
            kernel.interrupt_kernel()
        shown = []
        while True:
            message = client.get_iopub_msg(timeout=60)
            kind, content = message["msg_type"], message["content"]
            if message["parent_header"].get("msg_id") != request:
                continue
            if kind == "stream":
                shown.append(content["text"])
            elif kind == "execute_result":
                shown.append(content["data"]["text/plain"])
            elif kind == "error":
                shown.append(f"{content['ename']}: {content['evalue']}")
            elif kind == "status" and content["execution_state"] == "idle":
                return "".join(shown)

    yield kernel, run
    client.stop_channels()
    kernel.shutdown_kernel(now=True)


START = """
import numpy as np
import tvm_ipc
session = tvm_ipc.Session(2)
x, y = session.put(np.ones(4, "float32")), session.empty((4,), "float32")
"""


def test_an_interrupt_ends_the_cell_and_leaves_the_session(kernel: tuple[Any, Cell]) -> None:
    _, run = kernel
    assert run(START) == ""
    assert run("while True: session.allreduce(x, y); session.sync()", 2) == "KeyboardInterrupt: "
    assert run("session.allreduce(x, y); session.usable, session.get(y)[0] == 2") == (
        "(True, np.True_)"
    )


def test_workers_end_with_the_kernel(kernel: tuple[Any, Cell]) -> None:
    process, run = kernel
    pids = run(START + "print(*session.pids)").split()
    assert len(pids) == 2
    process.shutdown_kernel(now=True)
    deadline = time.monotonic() + 20
    while any(Path("/proc", pid).exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert [pid for pid in pids if Path("/proc", pid).exists()] == []


REGISTER = """
import tvm_ffi
@tvm_ffi.register_global_func("mine.answer", override=True)
def answer():
    return 42
"""


def test_functions_of_cells_are_in_threads_and_not_in_processes(kernel: tuple[Any, Cell]) -> None:
    _, run = kernel
    call = "session.get_global_func('mine.answer')().debug_get_from_remote(1)"
    run(START + REGISTER)
    assert "has no global function mine.answer" in run(call)
    run("session.close(); session = tvm_ipc.Session(2, threads=True)")
    assert run(call) == "42"


def test_tvmscript_needs_the_source_of_a_cell(kernel: tuple[Any, Cell]) -> None:
    _, run = kernel
    model = (
        "from tvm.script import ir as I, relax as R\n"
        "@I.ir_module\nclass Model:\n    @R.function\n"
        "    def main(x: R.Tensor((4,), 'float32')):\n        return x\n"
    )
    assert "Error" not in run(model)
    assert "Error" not in run(model.replace("(4,)", "(5,)"))
    assert "5" in run("str(Model['main'].params[0].ty.shape)")
    assert "Error" in run(f"exec({model!r})")
