# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc explain` on the demo, on files, and on what is neither."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest
import tvm
from tvm import relax
from tvm.script import ir as I
from tvm.script import relax as R
from tvm.script import tirx as T

from tvm_ipc import __main__ as command
from tvm_ipc import comm
from tvm_ipc.calibration import COLLECTIVES, Calibration, Times


@I.ir_module
class Layers:
    @T.prim_func
    def spare(a: T.Buffer((4,), "float32")):
        a[0] = T.float32(0)

    @R.function
    def main(x: R.Tensor((64, 64), "float32")):
        with R.dataflow():
            a = R.ccl.allreduce(R.nn.gelu(x), "sum", in_group=False)
            b = R.ccl.allreduce(R.nn.silu(a), "sum", in_group=False)
            R.output(b)
        return b


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the module in it, and to be in."""
    monkeypatch.chdir(tmp_path)
    Path("layers.json").write_text(tvm.ir.save_json(Layers))
    Path("layers.py").write_text(Layers.script())
    return tmp_path


def explain(*arguments: str) -> int:
    return command.main(["explain", *arguments])


@pytest.mark.parametrize("name", ["layers.json", "layers.py"])
def test_saved_module_becomes_a_page(
    saved: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert explain(name) == 0
    out = capsys.readouterr().out
    assert out.endswith("\n\nwritten: explain-layers.html\n")
    assert "collectives  main: 2 all-reduces of 32 KiB together\n" in out
    html = Path("explain-layers.html").read_text()
    assert f"Memory and collectives of {name}" in html
    assert "rewritten" in html


def test_text_writes_no_page(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(saved.iterdir())
    assert explain("layers.json", "--text", "--barrier-budget", "0") == 0
    out = capsys.readouterr().out
    assert sorted(saved.iterdir()) == before
    assert "of 2 with their input in ipc_memory" in " ".join(out.split())
    # One buffer of 16 KiB, read by peers; TVM's plan has its bytes allocated as float32.
    assert "ipc_memory     16 KiB      64 KiB" in out.replace("  25%", "")


def test_sizes_without_a_bound_are_said(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tvm.ir.save_json(unbounded())
    Path("unbounded.json").write_text(text)
    assert explain("unbounded.json", "--text", "--barrier-budget", "0") == 0
    out = capsys.readouterr().out
    assert "strategy auto  n = 128\n" in out
    assert "ipc_memory     32 KiB" in out
    assert explain("unbounded.json", "--text", "--barrier-budget", "0", "--size", "n=64") == 0
    assert "ipc_memory     16 KiB" in capsys.readouterr().out


def unbounded() -> tvm.IRModule:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor(("n", 64), "float32")):
            with R.dataflow():
                a = R.ccl.allreduce(R.nn.gelu(x), "sum", in_group=False)
                b = R.nn.silu(a)
                R.output(b)
            return b

    return Module


def test_demo_as_page_and_text(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("--demo", "--text", "-o", "demo.html", "--size", "n=64") == 0
    out = capsys.readouterr().out
    assert "n = 64" in out
    assert "Function prefill" in out
    assert "have no exit barrier" in " ".join(out.split())
    assert "Function <code>decode</code>" in Path("demo.html").read_text()


def test_timeline_of_the_demo_with_sequence_parallelism(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain("--demo", "--sequence-parallel", "--text", "-o", "demo.html") == 0
    out = capsys.readouterr().out
    assert "reduce_scatter of" in out
    assert "# transfer that the program waits for" in out
    assert "18 transfers" in Path("demo.html").read_text()


def test_timeline_of_overlap(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--demo", "--sequence-parallel", "--overlap", "2", "--text", "-o", "demo.html")
    assert explain(*arguments) == 0
    out = capsys.readouterr().out
    assert "16 in chunks" in " ".join(out.split())
    assert "16 of 18 transfers overlap with computation." in out
    page = Path("demo.html").read_text()
    assert "meanwhile: 2 x blas.matmul" in page


def test_posted_collectives_are_on_their_way_beside_kernels(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("independent.json").write_text(tvm.ir.save_json(independent()))
    assert explain("independent.json", "--text") == 0
    assert "No transfer overlaps with computation." in capsys.readouterr().out
    assert explain("independent.json", "--text", "--async-collectives") == 0
    out = capsys.readouterr().out
    assert "1 collective, 1 asynchronous." in out
    assert "1 of 1 transfers overlap with computation." in out


def test_calibration_says_what_overlaps(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over a link that is as slow as the matmul, which takes a second for a row."""
    rows, moved = Times(((1, 2), (64,), (64,)), (1.0, 2.0)), Times(((1, 2),), (1e-9, 2e-9))
    calibration = Calibration(
        machine="elsewhere",
        backend="shm",
        workers=2,
        bandwidth=256.0,
        latency=0.0,
        wake=0.0,
        matmul=rows,
        blas_matmul=rows,
        collectives=dict.fromkeys(COLLECTIVES, moved),
        reduce=moved,
        copy=moved,
        chunk=0.0,
        hide=0.0,
        noise=0.0,
    )
    calibration.save("calibration.json")
    Path("gather.json").write_text(tvm.ir.save_json(gathered_product()))
    assert explain("gather.json", "--text", "--overlap", "calibration.json") == 0
    out = capsys.readouterr().out
    assert re.search(r"allgather of x: in \d+ chunks", out)
    assert "1 collective, 1 in chunks." in out
    assert explain("gather.json", "--text", "--overlap", "1") == 0
    assert "allgather of x: in 1 chunk" in capsys.readouterr().out
    assert explain("gather.json", "--overlap", "calibration.json", "--world-size", "4") == 2
    assert "it was measured for 2 workers, and this is 4 workers" in capsys.readouterr().err


@pytest.mark.parametrize("streams", [1, 3])
def test_marked_axes_are_explained_with_their_streams(
    saved: Path, capsys: pytest.CaptureFixture[str], streams: int
) -> None:
    mesh = comm.Mesh({"tp": 2})
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 2, 8), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            whole = builder.emit(comm.place(x, mesh, {"tp": comm.Shard(1)}))
            out = builder.emit_output(comm.place(whole, mesh, {}, stream=0))
        builder.emit_func_output(out)
    Path("marked.json").write_text(tvm.ir.save_json(builder.get()))
    assert explain("marked.json", "--text", "--streams", str(streams)) == 0
    out = capsys.readouterr().out
    assert "stream=0 of gv: in 4 chunks" in out
    assert f"asynchronous allgather, {streams} chunk{'s' * (streams > 1)} at a time" in out


def gathered_product() -> tvm.IRModule:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((64, 64), "float32"), w: R.Tensor((64, 64), "float32")):
            with R.dataflow():
                y = R.matmul(R.comm.allgather(x, axis=0, workers=2), w)
                R.output(y)
            return y

    return Module


def independent() -> tvm.IRModule:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((8, 8), "float32")):
            with R.dataflow():
                total = R.ccl.allreduce(R.matmul(x, x), "sum", in_group=False)
                b = R.matmul(x, R.sort(x))
                c = R.matmul(total, b)
                R.output(c)
            return c

    return Module


def test_page_on_the_standard_output(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert explain("layers.json", "-o", "-") == 0
    out = capsys.readouterr().out
    assert out.startswith("<!DOCTYPE html>")
    assert "written: " not in out


def test_one_of_several_modules(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = Layers.script() + Layers.script().replace("class Module", "class Other")
    Path("two.py").write_text(both)
    assert explain("two.py") == 2
    assert "two.py defines several modules; it defines Module, Other: select one with --module" in (
        capsys.readouterr().err
    )
    assert explain("two.py", "--module", "Other", "--text") == 0
    assert explain("two.py", "--module", "Third") == 2
    assert "defines no module 'Third'" in capsys.readouterr().err


def test_program_that_prints_and_imports_its_neighbour(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("neighbour_of_program.py").write_text(f"import tvm\n{Layers.script()}".replace("# ", ""))
    Path("program.py").write_text(
        "from neighbour_of_program import Module\nprint('hello')\n"
        "if __name__ == '__main__':\n    raise SystemExit('run as a program')\n"
    )
    path = list(sys.path)
    assert explain("program.py", "-o", "-") == 0
    out, err = capsys.readouterr()
    assert out.startswith("<!DOCTYPE html>")
    assert "hello" in err
    assert sys.path == path


def test_module_is_only_read(saved: Path) -> None:
    before = Path("layers.json").read_bytes()
    assert explain("layers.json", "--text") == 0
    assert Path("layers.json").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("", "specify either the file of a module or --demo"),
        ("layers.json --demo", "specify either the file of a module or --demo"),
        ("missing.json", "cannot read missing.json: No such file or directory"),
        (".", "cannot read .: Is a directory"),
        (
            "empty.json",
            "empty.json is not JSON of tvm.ir.save_json; a file of TVMScript must end in .py",
        ),
        ("bytes.json", "bytes.json is not a text file"),
        ("broken.json", "broken.json is not JSON of tvm.ir.save_json: "),
        ("other.json", "other.json is not JSON of tvm.ir.save_json: "),
        ("number.json", "number.json holds a int, not an IRModule"),
        ("kernels.json", "the module in kernels.json has no Relax function"),
        ("broken.py", "broken.py raised an error: SyntaxError: "),
        ("unknown.py", "has no attribute 'nosuch' (at "),
        ("raises.py", "raises.py raised an error: ZeroDivisionError: division by zero"),
        ("exits.py", "exits.py raised an error: SystemExit: 0"),
        ("nothing.py", "nothing.py defines no module"),
        ("layers.json --world-size 0", "--world-size is 0; it must be 1 to 64"),
        ("layers.json --world-size two", "argument --world-size: invalid int value: 'two'"),
        ("layers.json --strategy best", "argument --strategy: invalid choice: 'best'"),
        ("layers.json --target nosuch", '"nosuch" is not defined'),
        (
            "layers.json --target opencl",
            "--target is 'opencl', but tvm_ipc has no collectives",
        ),
        ("layers.json --barrier-budget -1", "--barrier-budget is -1"),
        ("layers.json --size n", "--size is 'n'; it must have the form n=64"),
        ("layers.json --text -o -", "--text and --output - both write to the standard output"),
        ("layers.json -o missing/page.html", "cannot write missing/page.html"),
        ("layers.json --sequence-parallel", "--sequence-parallel needs --demo"),
        ("layers.json --overlap 65", "--overlap is 65; it must be 1 to 64 chunks, or a file"),
        ("layers.json --overlap missing", "--overlap missing: cannot read the calibration"),
        ("layers.json --streams 0", "--streams is 0; it must be at least 1"),
        ("layers.json --page", "unrecognized arguments: --page"),
        ("gather.json --world-size 2", "over 3 workers"),
        ("malformed.json", "not well-formed"),
        ("malformed.json --size n=3", "TVM cannot lower malformed.json"),
        ("--demo --world-size 3", "--demo with --world-size 3: heads 8 cannot be split evenly"),
    ],
)
def test_mistakes_are_told_in_a_line(
    saved: Path, capfd: pytest.CaptureFixture[str], arguments: str, words: str
) -> None:
    make_files()
    before = sorted(saved.iterdir())
    assert explain(*arguments.split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    ours = [line for line in err.splitlines() if line.startswith("tvm-ipc explain: ")]
    assert len(ours) == 1
    assert words in ours[0]
    assert "Traceback" not in err
    assert [path for path in sorted(saved.iterdir()) if path.suffix == ".html"] == []
    assert set(before) <= set(saved.iterdir())


def make_files() -> None:
    files: dict[str, str] = {
        "empty.json": "",
        "broken.json": "{",
        "other.json": json.dumps({"a": 1}),
        "number.json": tvm.ir.save_json(3),
        "kernels.json": tvm.ir.save_json(tvm.IRModule({"spare": Layers["spare"]})),
        "broken.py": "def f(:",
        "unknown.py": Layers.script().replace("gelu", "nosuch"),
        "raises.py": "1 / 0",
        "exits.py": "raise SystemExit(0)",
        "nothing.py": "x = 1",
        "gather.json": tvm.ir.save_json(gathering()),
        "malformed.json": tvm.ir.save_json(malformed()),
    }
    for name, content in files.items():
        Path(name).write_text(content)
    Path("bytes.json").write_bytes(b"\xff\xfe\x00")


def gathering() -> tvm.IRModule:
    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            with R.dataflow():
                y = R.ccl.allgather(x, 3, in_group=False)
                R.output(y)
            return y

    return Module


def malformed() -> tvm.IRModule:
    """A function that returns a variable of another one."""
    x, y = (relax.Var(name, relax.TensorType((4,), "float32")) for name in "xy")
    body = relax.SeqExpr([], y)
    return tvm.IRModule({"main": relax.Function([x], body, relax.TensorType((4,), "float32"))})


def test_traceback_on_request(saved: Path) -> None:
    with pytest.raises(Exception, match="cannot read missing"):
        explain("missing.json", "--traceback")


def test_reader_that_leaves_is_no_error(
    saved: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        monkeypatch.setattr("sys.stdout", closed)
        assert explain("layers.json", "--text") == 1


def test_help_warns_of_programs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        explain("--help")
    out = " ".join(capsys.readouterr().out.split())
    assert (
        "A .py file is executed as a Python program, so explain only files that you trust." in out
    )


@pytest.mark.usefixtures("saved")
def test_programs_for_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        explain("--demo", "--text", "--target", "cuda", "--sequence-parallel", "--overlap=2") == 0
    )
    out = " ".join(capsys.readouterr().out.split())
    assert 'target {"kind": "cuda", "arch": "sm_90"} 2 workers' in out
    assert "in the order of each GPU's stream" in out
    assert "and its norm, in tvm_ipc.allreduce_rms_norm" in out
    assert "16 of 18 transfers overlap with computation." in out
    assert explain("--demo", "--target", '{"kind": "cuda", "arch": "sm_80"}') == 0
    assert "GPU's stream" in Path("explain-demo.html").read_text().replace("&#x27;", "'")
    capsys.readouterr()
    assert explain("layers.json", "--text") == 0
    assert "GPU" not in capsys.readouterr().out
