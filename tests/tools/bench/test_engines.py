# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/engines.py`: its engines' processes, and what it reports of made-up times."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))
import engine_models
import engine_processes
import engine_report
import engines
import peers
from engine_processes import Contestant, EngineError, EngineProcess, Neighbour
from engine_report import BATCH, BESIDE, NOBODY, Case, Key, Results, Start

SIZES = {**engine_models.SMALL}
PROMPTS = [[5, 6, 7]]
#: A llama.cpp that counts from the last token of the prompt on.
FAKE = """
import os, time
__version__ = "0.9"

class Llama:
    def __init__(self, model_path, n_threads, **options):
        print("what a library prints is no answer", flush=True)
        self._path = model_path
        if model_path == "missing":
            raise ValueError("no such file")

    def reset(self):
        pass

    def generate(self, prompt, **options):
        while True:
            prompt = [prompt[-1] + 1]
            if prompt[-1] == 9 and self._path == "abort":
                os.abort()
            if prompt[-1] == 9 and self._path == "slow":
                time.sleep(60)
            yield prompt[-1]
"""

#: tvm_ipc with a model that does the same, for one prompt and, with `batches`, for several.
FAKE_OURS = """
from itertools import count, islice
from types import SimpleNamespace

class Model:
    def __init__(self, path):
        self._batches = path == "batches"

    def generate(self, prompt, max_new_tokens, *, stop):
        if not isinstance(prompt[0], list):
            return islice(count(prompt[-1] + 1), max_new_tokens)
        if not self._batches:
            raise TypeError("generate: prompt is no sequence of tokens")
        return [self.generate(one, max_new_tokens, stop=stop) for one in prompt]

runtime_only = lambda: None
Session = lambda workers: None
models = SimpleNamespace(load=lambda path, session, dtype: Model(path))
"""


@pytest.fixture
def start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., EngineProcess]]:
    (tmp_path / "llama_cpp.py").write_text(FAKE)
    (tmp_path / "fake_tvm_ipc.py").write_text(FAKE_OURS)
    (tmp_path / "sitecustomize.py").write_text(  # before what finds an editable installation
        "import sys, fake_tvm_ipc\nsys.modules['tvm_ipc'] = fake_tvm_ipc\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    processes = []

    def function(path: str = "model", engine: str = "llama.cpp") -> EngineProcess:
        task = {"path": path, "dtype": "float32", "context": 512}
        contestant = Contestant(engine, 2, cores=(min(os.sched_getaffinity(0)),))
        processes.append(EngineProcess(contestant, sys.executable, task, tmp_path, 60))
        return processes[-1]

    yield function
    for process in processes:
        process.close()


def test_a_process_answers_with_tokens_times_and_memory(start: Any) -> None:
    process = start()
    assert process.version == "0.9 (llama-cpp-python)"
    tokens, first, rest = process.generate(PROMPTS, 4)
    assert tokens == [[8, 9, 10, 11]]
    assert 0 < first < 1
    assert 0 < rest < 1
    assert 1 < process.memory() < 500


def test_an_engine_without_batches_gives_the_reason_and_goes_on(start: Any) -> None:
    process = start()
    with pytest.raises(EngineError, match=r"^the Python API takes one prompt$"):
        process.generate([[5], [6]], 2)
    assert process.generate([[5]], 2)[0] == [[6, 7]]


def test_ours_takes_several_prompts_once_generate_does(start: Any) -> None:
    process = start("batches", "tvm_ipc")
    assert process.generate([[5]], 3)[0] == [[6, 7, 8]]
    assert process.generate([[5], [70]], 3)[0] == [[6, 7, 8], [71, 72, 73]]
    with pytest.raises(EngineError, match=r"^`generate` of this version takes one prompt$"):
        start("one", "tvm_ipc").generate([[5], [70]], 3)


@pytest.mark.parametrize(
    ("path", "limit", "message"),
    [
        ("abort", 60, "its process ended by SIGABRT"),
        ("slow", 0.5, "no answer in 0.5 s"),
    ],
)
def test_an_engine_that_fails_is_an_error_with_the_reason(
    start: Any, path: str, limit: float, message: str
) -> None:
    process = start(path)
    process._limit = limit
    with pytest.raises(EngineError) as error:
        process.generate(PROMPTS, 4)
    assert str(error.value) == message
    process._process.kill()


def test_a_model_that_cannot_be_loaded_is_an_error_with_the_reason(start: Any) -> None:
    with pytest.raises(EngineError, match=r"^ValueError: no such file$"):
        start("missing")


def test_an_interpreter_that_cannot_start_the_adapter_is_an_error(tmp_path: Path) -> None:
    contestant = Contestant("llama.cpp", 1)
    with pytest.raises(EngineError, match=r"^its process ended with 1: it printed nothing$"):
        EngineProcess(contestant, "/bin/false", {}, tmp_path, 10)


def test_contestants_of_ours_divide_threads_among_workers_or_do_not() -> None:
    found = engine_processes.contestants(["tvm_ipc", "torch"], 2)
    assert [(c.label, c.threads, c.workers) for c in found] == [
        ("tvm_ipc, 1 worker", 2, 1),
        ("tvm_ipc, 2 workers", 2, 2),
        ("PyTorch, eager", 2, 1),
    ]
    assert len(engine_processes.contestants(["tvm_ipc", "torch"], 1)) == 2


def test_an_engine_that_is_missing_has_a_pip_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_processes, "OUT", tmp_path)
    missing = {"openvino": "/bin/false"}
    assert engine_processes.find_python("openvino", missing, False) is None
    assert engine_processes.pip_command("openvino").startswith("pip install openvino-genai ")
    assert engine_processes.find_python("tvm_ipc", {}, False) == sys.executable
    for engine in engine_processes.LABELS:
        if engine != "tvm_ipc":
            name, modules = engine_processes.ENVIRONMENTS[engine]
            assert peers.PACKAGES[name]
            assert modules


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
@pytest.mark.parametrize("kind", engine_processes.NEIGHBOURS)
def test_a_neighbour_runs_on_its_core_until_the_block_ends(kind: str) -> None:
    core = max(os.sched_getaffinity(0))
    with Neighbour(kind, core) as neighbour:
        process = neighbour._process
        assert process is not None
        assert os.sched_getaffinity(process.pid) == {core}
        assert process.poll() is None
        assert os.getpriority(os.PRIO_PROCESS, process.pid) == (19 if kind == "niced" else 0) or (
            os.getpriority(os.PRIO_PROCESS, 0) > 0
        )
    assert process.poll() is not None


def test_weights_are_counted_without_the_embedding() -> None:
    full = engine_models.FULL
    embedding = full["vocab_size"] * full["hidden_size"]
    assert round((engine_models.weights_read(full) + embedding) / 1e6) == 316
    assert engine_models.cached_per_token(full) == 2 * 20 * 8 * 64


def test_names_of_weights_in_gguf_files() -> None:
    assert engine_models.gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert engine_models.gguf_name("model.norm.weight") == "output_norm.weight"
    name = "model.layers.12.self_attn.q_proj.weight"
    assert engine_models.gguf_name(name) == "blk.12.attn_q.weight"


def test_rows_of_queries_and_keys_are_in_the_order_of_llama_cpp() -> None:
    heads, size = 2, 6
    weight = np.arange(heads * size * 3, dtype=np.float32).reshape(heads * size, 3)
    rows = engine_models.rotating_neighbours(weight, heads)
    angles = np.exp(1j * np.arange(size // 2))

    def rotated(first: Any, second: Any) -> Any:
        return (first + 1j * second) * angles[:, None]

    for before, after in zip(
        weight.reshape(heads, size, 3), rows.reshape(heads, size, 3), strict=True
    ):
        halves = rotated(before[: size // 2], before[size // 2 :])
        np.testing.assert_array_equal(rotated(after[::2], after[1::2]), halves)


def test_engines_that_read_the_folder_of_transformers_have_no_conversion() -> None:
    for engine in engine_processes.LABELS:
        command = engine_models.conversion(engine, "python", Path("a"), Path("b"), "float32")
        assert (not command) == (engine in ("tvm_ipc", "torch", "torch-compiled"))


OURS, TWO, OTHER, SLOW = (
    Key(label, 2, "bfloat16", 128)
    for label in ("tvm_ipc, 1 worker", "tvm_ipc, 2 workers", "OpenVINO GenAI", "CTranslate2")
)


def results(**times: list[tuple[float, float]]) -> Results:
    found = Results(SIZES, tokens=11)
    keys = {"ours": OURS, "two": TWO, "other": OTHER, "slow": SLOW}
    for name, rounds in times.items():
        for number, (first, rest) in enumerate(rounds):
            found.add(keys[name], number, first, rest)
    return found


MADE_UP = {
    "ours": [(1.0, 1.0), (2.0, 1.0), (8.0, 1.0)],
    "two": [(1.0, 0.5), (1.0, 0.5), (1.0, 0.5)],
    "other": [(2.0, 0.4), (2.0, 0.4), (4.0, 0.4)],
    "slow": [(9.0, 9.0), (9.0, 9.0), (9.0, 9.0)],
}


def test_rates_are_medians_and_ratios_are_paired_by_round() -> None:
    found = results(**MADE_UP)
    assert found.rate(OURS, "prefill") == 64
    assert found.rate(TWO, "decode") == 20
    assert found.ratio(OURS, OTHER, "prefill") == 1  # of 2, 1 and 0.5
    assert found.best(OURS, "prefill", ours=True) == TWO
    assert found.best(OURS, "decode", ours=False) == OTHER
    assert engine_report.gain(found, OURS, "prefill") == 2
    assert engine_report.gain(found, OURS, "decode") == pytest.approx(0.8)
    assert found.rate(OURS._replace(prompt=512), "decode") is None


def test_a_round_that_one_engine_lacks_does_not_count() -> None:
    found = results(ours=[(1.0, 1.0)], other=[(2.0, 2.0), (50.0, 50.0)])
    assert found.ratio(OURS, OTHER, "prefill") == 2
    assert found.ratio(OURS, SLOW, "prefill") is None


def test_the_share_of_the_read_limit_counts_keys_and_values() -> None:
    found = results(two=[(1.0, 0.5)])
    assert found.read_share(TWO) is None
    read = engine_models.weights_read(SIZES) + engine_models.cached_per_token(SIZES) * 133.5
    found.limits[2] = 20 * read * 2 / 0.9
    assert found.read_share(TWO) == pytest.approx(0.9)
    assert "20.0 (90%)" in engine_report.speed_table(found, "decode")


def test_the_table_has_a_dash_where_an_engine_has_no_time_and_the_note_below() -> None:
    found = results(**MADE_UP)
    found.add(OTHER._replace(dtype="float32"), 0, 1.0, 1.0)
    found.notes[Case("CTranslate2", 2, "float32")] = "no such type"
    found.missing["llama.cpp"] = "pip install llama-cpp-python gguf"
    text = engine_report.report(found)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    assert ["2", "CTranslate2", "14.2", "-"] in rows
    assert ["2", "OpenVINO GenAI", "64.0", "128"] in rows
    assert ["2", "tvm_ipc against the best other", "2.00x", "-"] in rows
    assert "\n- CTranslate2, float32, 2 threads: no such type" in text
    assert "| llama.cpp | not installed: `pip install llama-cpp-python gguf` |" in text
    assert "Batches" not in text
    assert "Starts" not in text


def test_goals_are_met_at_their_limits_and_missed_below() -> None:
    found = results(two=[(1.0, 1.0)], other=[(1.1, 1.0)])
    assert list(engine_report.goals(found).values()) == [True, True, True]
    found = results(two=[(1.0, 1.0)], other=[(1.05, 0.99)])
    verdicts = engine_report.goals(found)
    assert [(goal.partition(":")[0], met) for goal, met in verdicts.items()] == [
        ("prefill, bfloat16, 128 tokens, 2 threads", True),
        ("decode, bfloat16, 128 tokens, 2 threads", False),
        ("prefill", False),
    ]


def test_goals_of_what_was_not_measured_are_left_out() -> None:
    assert engine_report.goals(results(two=[(1.0, 1.0)])) == {}


def test_beside_a_neighbour_one_thread_of_the_same_engine_is_the_measure() -> None:
    found = Results(SIZES, tokens=11)
    one = Key("tvm_ipc, 1 worker", 1, "bfloat16", 128, BESIDE, "plain")
    two = one._replace(label="tvm_ipc, 2 workers", threads=2)
    for kind in (NOBODY, "plain"):
        found.add(one._replace(beside=kind), 0, 1.0, 1.25)
        found.add(one._replace(beside=kind, pinned=True), 0, 1.0, 1.0)
        found.add(two._replace(beside=kind), 0, 1.0, 0.5)
    assert engine_report.against_pinned(found, one, "plain", "decode") == pytest.approx(0.8)
    assert engine_report.against_pinned(found, two, "plain", "decode") == 2
    missed = [goal for goal, met in engine_report.goals(found).items() if not met]
    assert [goal.partition(":")[0] for goal in missed] == [
        "decode beside a plain neighbour, bfloat16, tvm_ipc, 1 worker"
    ]
    assert "Prefill, tokens" not in engine_report.report(found)
    table = engine_report.neighbour_table(found, "decode")
    assert "| bfloat16 | 1       | tvm_ipc, 1 worker  | the other ones | 10.0 " in table


def test_a_batch_counts_the_tokens_of_all_prompts() -> None:
    found = Results(SIZES, tokens=11)
    one = Key("tvm_ipc, 2 workers", 2, "bfloat16", 128, BATCH)
    eight = one._replace(batch=8)
    found.add(one, 0, 1.0, 1.0)
    found.add(eight, 0, 2.0, 2.0)
    assert found.rate(eight, "decode") == 40
    assert found.rate(eight, "prefill") == 512
    assert found.ratio(eight, one, "decode") == 4
    assert list(engine_report.goals(found).values()) == [False]
    assert "4.00x" in engine_report.batch_table(found)


def test_other_tokens_than_those_of_pytorch_are_found() -> None:
    found = Results(SIZES, tokens=4)
    for label, equal in (("tvm_ipc, 1 worker", 3), ("tvm_ipc, 2 workers", 4), ("llama.cpp", 0)):
        found.starts[Case(label, 2, "float32")] = Start(0.0, 9.0, 1.0, 100.0, equal, 4)
    assert [case.label for case in engine_report.other_tokens(found)] == ["tvm_ipc, 1 worker"]
    assert "3 of 4" in engine_report.start_table(found)
    assert json.dumps(engine_report.as_json(found))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "1"], "--tokens must be 2 or more"),
        (["--prompts", "5000"], "--prompts at most 4064"),
        (["--rounds", "0"], "'0' is not a number above 0"),
        (["--python", "openvino"], "'openvino' is not ENGINE=PATH"),
        (["--engines", "tvm"], "invalid choice: 'tvm'"),
    ],
)
def test_wrong_options_are_named(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        engines.parse(arguments)
    assert message in capsys.readouterr().err


def test_an_interrupted_run_prints_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(setup: engines.Setup) -> None:
        setup.results.add(OURS, 0, 1.0, 1.0)
        raise KeyboardInterrupt

    monkeypatch.setitem(engines.MEASURE, "speed", measure)
    monkeypatch.setattr(engines, "measure_read_limits", lambda _setup: None)
    monkeypatch.setattr(engine_processes, "find_python", lambda *_: sys.executable)
    options = ["--parts", "speed", "--folder", str(tmp_path), "--json", str(tmp_path / "times")]
    assert engines.main(options) == 130
    assert "| 2       | tvm_ipc, 1 worker | 128 " in capsys.readouterr().out
    assert json.loads((tmp_path / "times").read_text())["times"][0]["threads"] == 2


def test_a_read_limit_that_takes_long_loses_no_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measure(setup: engines.Setup) -> None:
        setup.results.add(OURS, 0, 1.0, 1.0)
        monkeypatch.setattr(engines, "read_limit", peers.read_limit)

    def too_slow(command: list[str], **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, 60)

    monkeypatch.setitem(engines.MEASURE, "speed", measure)
    monkeypatch.setattr(engines, "read_limit", lambda *_: 1e9)
    monkeypatch.setattr(peers, "compiled", lambda *_: tmp_path / "read_limit")
    monkeypatch.setattr(peers.subprocess, "run", too_slow)
    monkeypatch.setattr(engine_processes, "find_python", lambda *_: sys.executable)
    assert engines.main(["--parts", "speed", "--folder", str(tmp_path), "--threads", "1"]) == 1
    said = capsys.readouterr()
    assert "end other programs that use the processor or the memory; these are the" in said.err
    assert "tvm_ipc, 1 worker" in said.out


def test_without_an_interpreter_that_makes_the_model_the_command_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = {"tvm_ipc": sys.executable}
    monkeypatch.setattr(engine_processes, "find_python", lambda engine, *_: found.get(engine))
    with pytest.raises(SystemExit, match=r"makes the model: pip install torch==.* transformers$"):
        engines.main(["--folder", str(tmp_path)])


@pytest.mark.slow
def test_all_parts_run_with_a_tiny_model(tmp_path: Path) -> None:
    if (
        importlib.util.find_spec("torch") is None
        or importlib.util.find_spec("transformers") is None
    ):
        pytest.skip("PyTorch and transformers make the model")
    options = "--quick --engines tvm_ipc torch --types float32 --threads 1 --prompts 8 --rounds 1"
    command = [sys.executable, str(engines.__file__), *options.split()]
    command += ["--neighbours", "plain", "--json", str(tmp_path / "times")]
    paths = [str(Path(engines.__file__).parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "times").read_text())
    assert {start["equal"] for start in document["starts"]} == {4}
    assert {time["part"] for time in document["times"]} == {"speed", "beside", "batch"}
    batches = [json.dumps(time) for time in document["times"] if time["part"] == "batch"]
    assert any("tvm_ipc" in time for time in batches)
