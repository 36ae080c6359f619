# SPDX-License-Identifier: Apache-2.0
"""Find and run the engines of `engines.py`, and keep a core busy beside them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers import HERE, OUT, PACKAGES, environment

LABELS = {
    "tvm_ipc": "tvm_ipc",
    "torch": "PyTorch, eager",
    "torch-compiled": "PyTorch, compiled",
    "openvino": "OpenVINO GenAI",
    "onnxruntime": "ONNX Runtime GenAI",
    "ctranslate2": "CTranslate2",
    "llama.cpp": "llama.cpp",
}
#: The environment of each engine in `peers.PACKAGES`, and what must be importable there.
ENVIRONMENTS = {
    "torch": ("torch-engine", ("torch", "transformers", "tokenizers")),
    "torch-compiled": ("torch-engine", ("torch", "transformers", "tokenizers")),
    "openvino": ("openvino", ("openvino_genai", "optimum.exporters.openvino")),
    "onnxruntime": ("onnxruntime", ("onnxruntime_genai", "onnx_ir", "torch", "transformers")),
    "ctranslate2": ("ctranslate2", ("ctranslate2", "torch", "transformers")),
    "llama.cpp": ("llama.cpp", ("llama_cpp", "gguf")),
}


class EngineError(Exception):
    """An engine cannot take part, or no longer; the message is a reason for the table."""


@dataclass(frozen=True)
class Contestant:
    """An engine with a number of threads; ours with a number of workers.

    Attributes
    ----------
    threads : the threads of all workers together.
    cores : the cores that its process may use; all of this process if None.
    """

    engine: str
    threads: int
    workers: int = 1
    cores: tuple[int, ...] | None = None

    @property
    def label(self) -> str:
        if self.engine != "tvm_ipc":
            return LABELS[self.engine]
        return f"tvm_ipc, {self.workers} worker{'s' if self.workers > 1 else ''}"


def contestants(engines: list[str], threads: int) -> list[Contestant]:
    """Return the contestants with a number of threads; ours has one worker, and one per thread."""
    found = [Contestant(engine, threads) for engine in engines]
    if "tvm_ipc" in engines and threads > 1:
        found.insert(engines.index("tvm_ipc") + 1, Contestant("tvm_ipc", threads, threads))
    return found


def pip_command(engine: str) -> str:
    return f"pip install {' '.join(PACKAGES[ENVIRONMENTS[engine][0]])}"


def find_python(engine: str, chosen: dict[str, str], install: bool) -> str | None:
    """Return an interpreter that has the engine: the chosen one, this one, or one below out/."""
    if engine == "tvm_ipc":
        return sys.executable
    name, modules = ENVIRONMENTS[engine]
    own = OUT / f"venv-{name}"
    pythons = [chosen[engine]] if engine in chosen else [sys.executable]
    if engine not in chosen and (own / "complete").exists():
        pythons.append(str(own / "bin/python"))
    for python in pythons:
        if _imports(python, modules):
            return python
    if engine not in chosen and install and (made := environment(name)) is not None:
        python = str(made / "bin/python")
        return python if _imports(python, modules) else None
    return None


def _imports(python: str, modules: tuple[str, ...]) -> bool:
    test = "import importlib.util as u, sys; sys.exit(None in map(u.find_spec, sys.argv[1:]))"
    with contextlib.suppress(OSError):
        return subprocess.run([python, "-c", test, *modules], capture_output=True).returncode == 0
    return False


def run_logged(command: list[str], log: Path, limit: float) -> float:
    """Run a program whose output goes to a file; return its seconds."""
    start = time.perf_counter()
    with log.open("a") as out:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, timeout=limit
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"not made in {limit:g} s") from None
    if done.returncode:
        raise EngineError(f"its converter failed: {last_line(log)}")
    return time.perf_counter() - start


def last_line(log: Path) -> str:
    """Return the last line that a program printed, cut at 160 characters."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next((line for line in reversed(lines) if line), "it printed nothing")[:160]


class EngineProcess:
    """The process of one contestant, with the protocol of `engine_adapters.py`."""

    def __init__(
        self, contestant: Contestant, python: str, task: dict[str, Any], folder: Path, limit: float
    ) -> None:
        """Start it, and load the model; `folder` has its caches and its log."""
        each = str(max(1, contestant.threads // contestant.workers))
        variables = {
            "OMP_NUM_THREADS": each,
            "TVM_NUM_THREADS": each,
            "TVM_IPC_CACHE": str(folder / "cache"),
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
        }
        folder.mkdir(parents=True, exist_ok=True)
        self.contestant, self._limit = contestant, limit
        self._log = folder / "log"
        command = [python, str(HERE / "engine_adapters.py")]
        if contestant.cores is not None:
            command = ["taskset", "-c", ",".join(map(str, contestant.cores)), *command]
        self.start = time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                bufsize=0,
            )
        facts = {"engine": contestant.engine, "threads": contestant.threads}
        try:
            loaded = self._ask({"do": "load", **facts, "workers": contestant.workers, **task})
        except BaseException:
            self.close()
            raise
        self.version: str = loaded["version"]

    def _ask(self, task: dict[str, Any]) -> dict[str, Any]:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        try:
            stdin.write(json.dumps(task).encode() + b"\n")
        except BrokenPipeError:
            raise EngineError(self._end()) from None
        reply = b""
        deadline = time.monotonic() + self._limit
        while not reply.endswith(b"\n"):
            if not select.select([stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise EngineError(f"no answer in {self._limit:g} s")
            data = os.read(stdout.fileno(), 1 << 16)
            if not data:
                raise EngineError(self._end())
            reply += data
        found: dict[str, Any] = json.loads(reply)
        if "unsupported" in found:
            raise EngineError(found["unsupported"])
        if "error" in found:
            raise EngineError(found["error"][:160])
        return found

    def _end(self) -> str:
        """Return the reason that the process ended."""
        code = self._process.wait(10)
        if code < 0:
            return f"its process ended by {signal.Signals(-code).name}"
        return f"its process ended with {code}: {last_line(self._log)}"

    def generate(
        self, prompts: list[list[int]], count: int
    ) -> tuple[list[list[int]], float, float]:
        """Return the tokens of each prompt, and seconds to the first ones and then to the last."""
        reply = self._ask({"do": "generate", "prompts": prompts, "count": count})
        return reply["tokens"], reply["first"], reply["rest"]

    def memory(self) -> float:
        """Return the memory (PSS) of its processes in MiB."""
        return sum(map(_pss, family(self._process.pid))) / 1024

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def family(pid: int) -> Iterator[int]:
    """Yield a process and all of its descendants."""
    yield pid
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                yield from family(int(child))


def _pss(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0


#: Programs that keep one core busy, by what they are called in the table.
NEIGHBOURS = {
    "plain": "while True: pass",
    "niced": "import os\nos.nice(19)\nwhile True: pass",
    "short-lived": """
import os, time
while True:
    if os.fork() == 0:
        end = time.perf_counter() + 0.02
        while time.perf_counter() < end: pass
        os._exit(0)
    os.wait()
""",
}


@dataclass
class Neighbour:
    """A program that keeps one core busy within a `with` statement."""

    kind: str
    core: int
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def __enter__(self) -> Neighbour:
        command = ["taskset", "-c", str(self.core), sys.executable, "-S", "-c"]
        self._process = subprocess.Popen([*command, NEIGHBOURS[self.kind]], start_new_session=True)
        time.sleep(0.2)  # it runs now
        return self

    def __exit__(self, *_error: object) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
