# SPDX-License-Identifier: Apache-2.0
"""The headline figures of `tvm-ipc explain`, its JSON, and its page in a browser."""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_ipc import comm
from tvm_ipc.__main__ import main
from tvm_ipc.calibration import COLLECTIVES, Calibration, Times
from tvm_ipc.tools.inspection.collective_and_parameter_totals import (
    CollectiveCount,
    Estimate,
    Figures,
    Parameters,
)
from tvm_ipc.tools.inspection.explain_decisions_and_memory import Question, explain

#: A link of one byte per second, with a latency of half a second.
SLOW = Calibration(
    machine="elsewhere",
    backend="shm",
    workers=2,
    bandwidth=1.0,
    latency=0.5,
    wake=0.0,
    matmul=Times(((1, 2), (64,), (64,)), (1.0, 2.0)),
    blas_matmul=Times(((1, 2), (64,), (64,)), (1.0, 2.0)),
    collectives=dict.fromkeys(COLLECTIVES, Times(((1, 2),), (1e-9, 2e-9))),
    reduce=Times(((1, 2),), (1e-9, 2e-9)),
    copy=Times(((1, 2),), (1e-9, 2e-9)),
    chunk=0.0,
    hide=0.0,
    noise=0.0,
)


@I.ir_module
class Several:
    @R.function
    def main(x: R.Tensor((4, 4), "float32")):
        with R.dataflow():
            a = R.ccl.allreduce(R.nn.gelu(x), "sum", in_group=False)
            b = R.ccl.allreduce(R.nn.silu(a), "sum", in_group=False)
            c = R.comm.allgather(b, axis=0, workers=2)
            d = R.comm.reduce_scatter(c, axis=0, workers=2)
            e = R.comm.broadcast(d)
            R.output(e)
        return e

    @R.function
    def other(x: R.Tensor(("n", 4), "float32")):
        R.func_attr({"tir_var_upper_bound": {"n": 8}})
        with R.dataflow():
            a = R.ccl.allreduce(R.nn.gelu(x), "sum", in_group=False)
            R.output(a)
        return a


def figures_of(mod: tvm.IRModule, **options: Any) -> Figures:
    return explain(mod, Question("here", "llvm", 2, "auto", {}), **options).figures


def test_collectives_are_counted_by_kind_with_their_bytes() -> None:
    figures = figures_of(Several)
    assert set(figures.collectives) == {
        CollectiveCount("main", "allreduce", 2, 128),
        CollectiveCount("main", "allgather", 1, 64),
        CollectiveCount("main", "reduce_scatter", 1, 128),
        CollectiveCount("main", "broadcast", 1, 64),
        CollectiveCount("other", "allreduce", 1, 128),
    }
    assert set(figures.parameters) == {
        Parameters("main", 64, None),
        Parameters("other", 128, None),
    }
    assert figures.estimates == ()


def test_time_is_estimated_with_a_calibration() -> None:
    # Two halves of each all-reduce cross the link, the shard of others, and no kind beyond these.
    seconds = 2 * (2 * 32 + 0.5) + (64 + 0.5) + (64 + 0.5)
    estimates = figures_of(Several, overlap=SLOW).estimates
    assert {replace(estimate, seconds=round(estimate.seconds, 3)) for estimate in estimates} == {
        Estimate("main", seconds, 4, 5),
        Estimate("other", 2 * 64 + 0.5, 1, 1),
    }


def test_placements_show_what_sharding_saves() -> None:
    mesh = comm.Mesh({"tp": 2})
    columns = {"tp": comm.Shard(1)}

    @I.ir_module
    class Placed:
        @R.function
        def main(x: R.Tensor((4, 8), "float32"), w: R.Tensor((8, 16), "float32")):
            with R.dataflow():
                up = R.matmul(x, R.comm.place(w, mesh, columns))
                whole = R.comm.place(up, mesh, {"tp": comm.Replica()})
                R.output(whole)
            return whole

    figures = figures_of(Placed)
    assert figures.parameters == (Parameters("main", 128 + 256, 128 + 512),)
    assert [(c.kind, c.count) for c in figures.collectives] == [("allgather", 1)]


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run the command in a folder with the module in it."""
    monkeypatch.chdir(tmp_path)
    Path("several.json").write_text(tvm.ir.save_json(Several))

    def explained(*arguments: str) -> tuple[int, str, str]:
        code = main(["explain", *arguments])
        return code, *capsys.readouterr()

    return explained


def test_figures_come_first_in_the_terminal(run: Any) -> None:
    for options in ((), ("--text",)):
        code, out, _ = run("several.json", *options)
        assert code == 0
        lines = out.splitlines()
        assert max(map(len, lines)) < 80
        assert lines[0] == "Memory and collectives of several.json"
        words = " ".join(out.split())
        assert "workers 2 collectives main: 2 all-reduces of 128 B together, 1 all-gather of" in (
            words
        )
        assert "other: 1 all-reduce of 128 B the bytes are those of the inputs on one" in words
        assert "parameters main: 64 B per worker other: 128 B per worker memory The plan" in words
        assert "\ntime " not in out
    SLOW.save("slow.json")
    _, out, _ = run("several.json", "--overlap", "slow.json")
    assert "time main: 258 s in collectives that nothing overlaps with, for 4 of 5 that" in (
        " ".join(out.split())
    )


def test_the_demo_is_compared_with_its_model_for_one_worker(run: Any) -> None:
    _, out, _ = run("--demo")
    assert "decode: 35.6 MiB per worker, 63.1 MiB before sharding" in out
    assert "decode: 8 all-reduces of 16 KiB together and 1 all-gather of 8 KiB" in out


def test_page_has_the_figures(run: Any) -> None:
    run("several.json", "-o", "page.html")
    html = Path("page.html").read_text()
    assert "2 all-reduces of 128 B together" in html
    assert "64 B per worker" in html


def test_json_has_the_documented_fields(run: Any) -> None:
    code, out, err = run("several.json", "--json")
    assert code == 0
    assert err == ""
    assert not list(Path().glob("*.html"))
    printed = json.loads(out)
    page = (Path(__file__).parents[3] / "docs" / "passes.md").read_text()
    section = page.partition("### Fields of `tvm-ipc explain --json`")[2].partition("\n## ")[0]
    documented = [line.split("`")[1] for line in section.splitlines() if line.startswith("| `")]
    assert documented == list(printed)
    assert printed["workers"] == 2
    assert printed["collectives"][0] == {
        "function": "main",
        "kind": "allreduce",
        "count": 2,
        "bytes": 128,
    }
    assert printed["sizes"]["other"] == {"n": 8}
    assert set(printed["memory"]["main"]) == {"plan", "tvm_plan", "lower_bound", "results"}
    decision = next(d for d in printed["decisions"] if d["verdict"] == "rewritten")
    assert set(decision) == {"pass_name", "function", "subject", "verdict", "reason"}


def test_json_stays_an_object_beside_a_page(run: Any) -> None:
    code, out, err = run("several.json", "--json", "-o", "page.html")
    assert code == 0
    assert json.loads(out)["source"] == "several.json"
    assert err == "written: page.html\n"


@pytest.mark.parametrize("options", [(), ("--text",), ("--json",), ("-o", "explain-several.html")])
def test_open_shows_the_page(
    run: Any, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or True)
    code, out, err = run("several.json", "--open", *options)
    assert code == 0
    page = Path("explain-several.html").resolve()
    assert opened == [page.as_uri()]
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert "browser" not in out + err


def no_browser(_: str) -> bool:
    raise webbrowser.Error("could not locate runnable browser")


@pytest.mark.parametrize("missing", [lambda _: False, no_browser])
def test_without_a_browser_it_says_where_the_page_is(
    run: Any, monkeypatch: pytest.MonkeyPatch, missing: Callable[[str], bool]
) -> None:
    monkeypatch.setattr(webbrowser, "open", missing)
    code, out, _ = run("several.json", "--open")
    assert code == 0
    uri = Path("explain-several.html").resolve().as_uri()
    assert out.endswith(f"written: explain-several.html\nno browser was found; open {uri} in one\n")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--text --json", "--text and --json both write to the standard output"),
        ("--json -o -", "--json and --output - both write to the standard output"),
        ("--open -o -", "--open needs a file, and --output is the standard output"),
    ],
)
def test_outputs_that_conflict(run: Any, options: str, words: str) -> None:
    code, out, err = run("several.json", *options.split())
    assert (code, out) == (2, "")
    assert words in err
