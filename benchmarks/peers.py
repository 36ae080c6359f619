# SPDX-License-Identifier: Apache-2.0
"""The peers: their environments, how their ranks are started, and how they are told what to do.

Every peer is a set of long-lived ranks that sleep between commands (the protocol is in peer.h),
so that measurements of different peers can alternate without paying for a start each time.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

HERE = Path(__file__).resolve().parent
OUT = HERE / "out"
PACKAGES = {
    "mpich": ("mpich", "mpi4py", "numpy"),
    "openmpi": ("openmpi", "mpi4py", "numpy"),
    "torch": ("torch==2.13.0", "numpy"),
    # The engines that engines.py compares with; each with what its converter needs.
    "torch-engine": ("torch==2.13.0", "transformers"),
    "openvino": ("openvino-genai", "optimum-intel[openvino]"),
    "onnxruntime": ("onnxruntime-genai", "onnx-ir", "torch", "transformers"),
    "ctranslate2": ("ctranslate2", "torch", "transformers"),
    "llama.cpp": ("llama-cpp-python", "gguf"),
}
START_SECONDS = 60.0


class OverLimitError(Exception):
    """A peer did not answer within the limit of one measurement, and was ended."""


class Contestant(Protocol):
    """What is measured: a peer, or one way of calling our own all-reduce."""

    name: str

    def prepare(self, dtype: str, count: int, limit: float) -> str: ...

    def run(self, iterations: int, rewriting: bool, limit: float) -> float: ...

    def close(self) -> None: ...


def environment(name: str) -> Path | None:
    """A virtual environment under out/ with the peer's packages, made on first use."""
    path = OUT / f"venv-{name}"
    stamp = path / "complete"
    wanted = " ".join(PACKAGES[name])
    if stamp.exists() and stamp.read_text() == wanted:
        return path
    print(f"installing {wanted} into {path}", file=sys.stderr, flush=True)
    shutil.rmtree(path, ignore_errors=True)
    steps = (
        [sys.executable, "-m", "venv", str(path)],
        [str(path / "bin/python"), "-m", "pip", "install", "-q", *PACKAGES[name]],
    )
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True)
        if done.returncode:
            print(f"no {name}: {done.stderr.strip()[-500:]}", file=sys.stderr)
            return None
    stamp.write_text(wanted)
    return path


def compiled(source: str, compiler: str, name: str) -> Path:
    """The program made from one of the C files here, rebuilt when the file changes."""
    text = (HERE / source).read_bytes() + (HERE / "peer.h").read_bytes() + compiler.encode()
    program = OUT / f"{name}-{hashlib.sha256(text).hexdigest()[:12]}"
    if not program.exists():
        OUT.mkdir(exist_ok=True)
        flags = ["-O3", "-march=native", "-Wall", "-Wextra", "-Werror"]
        subprocess.run([compiler, *flags, str(HERE / source), "-o", str(program)], check=True)
    return program


def read_limit(cores: int, mebibytes: int = 128) -> float:
    """Bytes that so many cores at once read in a second, each its own MiB."""
    program = compiled("read_limit.c", "cc", "read_limit")
    command = [str(program), str(cores), str(mebibytes), "7"]
    try:
        return float(subprocess.run(command, check=True, capture_output=True, timeout=60).stdout)
    except subprocess.TimeoutExpired:
        sys.exit(
            f"read_limit: {cores} processes did not read {mebibytes} MiB each, seven times in each "
            "way, in a minute; end other programs that use the processor or the memory"
        )


class Ranks:
    """One peer's processes, and a socket to each of them."""

    def __init__(
        self,
        name: str,
        ranks: int,
        commands: Callable[[str], list[list[str]]],
        files: Sequence[int] = (),
    ) -> None:
        """`commands` maps the controller's socket path to the command lines to start."""
        self.name = name
        self._ranks = ranks
        self._directory = tempfile.TemporaryDirectory(prefix="tvm-ipc-bench-")
        path = str(Path(self._directory.name) / "controller")
        self._links: list[socket.socket] = []
        self._pids: list[int] = []
        self._log = (OUT / f"{name.replace(' ', '-')}-{ranks}.log").open("w")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(ranks)
            self._processes = [
                subprocess.Popen(
                    command,
                    env=env,
                    pass_fds=files,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                )
                for command in commands(path)
            ]
            try:
                self._accept(listener)
            except Exception:
                self.close(gently=False)
                raise

    def _accept(self, listener: socket.socket) -> None:
        deadline = time.monotonic() + START_SECONDS
        met: dict[int, tuple[socket.socket, int]] = {}
        while len(met) < self._ranks:
            listener.settimeout(0.2)
            try:
                link, _ = listener.accept()
            except TimeoutError:
                dead = [p.args for p in self._processes if p.poll()]
                if dead or time.monotonic() > deadline:
                    raise OSError(f"{self.name} did not start; see {self._log.name}") from None
                continue
            link.settimeout(START_SECONDS)
            rank, pid = link.makefile("r").readline().split()
            met[int(rank)] = (link, int(pid))
        self._links = [met[rank][0] for rank in range(self._ranks)]
        self._pids = [met[rank][1] for rank in range(self._ranks)]

    def _ask(self, line: str, limit: float) -> list[str]:
        answers: dict[int, bytes] = dict.fromkeys(range(self._ranks), b"")
        deadline = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            for rank, link in enumerate(self._links):
                selector.register(link, selectors.EVENT_READ, rank)
            for link in self._links:
                link.sendall(line.encode() + b"\n")
            while selector.get_map():
                ready = selector.select(deadline - time.monotonic())
                if not ready:
                    self.close(gently=False)
                    raise OverLimitError(f"{self.name} did not answer in {limit:g} s")
                for key, _ in ready:
                    text = key.fileobj.recv(4096)  # type: ignore[union-attr]
                    if not text:
                        self.close(gently=False)
                        raise OSError(f"{self.name}: rank {key.data} ended; see {self._log.name}")
                    answers[key.data] += text
                    if answers[key.data].endswith(b"\n"):
                        selector.unregister(key.fileobj)
        return [answers[rank].decode().strip() for rank in range(self._ranks)]

    def prepare(self, dtype: str, count: int, limit: float) -> str:
        answers = set(self._ask(f"prepare {dtype} {count}", limit))
        return answers.pop() if len(answers) == 1 else "bad"

    def run(self, iterations: int, rewriting: bool, limit: float) -> float:
        return max(map(float, self._ask(f"run {iterations} {int(rewriting)}", limit)))

    def close(self, gently: bool = True) -> None:
        for link in self._links:
            link.close()
        deadline = time.monotonic() + (5.0 if gently else 0.0)
        while any(p.poll() is None for p in self._processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        # A launcher may start ranks in process groups of their own: their pids are known.
        left: set[Path] = set()
        for pid in self._pids if any(p.poll() is None for p in self._processes) else ():
            left |= _shared_files(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            try:
                process.wait(3.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for file in left:
            file.unlink(missing_ok=True)
        self._log.close()
        self._directory.cleanup()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def mpi_label(name: str, caller: str) -> str:
    label = {"mpich": "MPICH", "openmpi": "Open MPI"}[name]
    return label + {"single": "", "multiple": " threads", "mpi4py": " mpi4py"}[caller]


def _shared_files(pid: int) -> set[Path]:
    """Shared memory of a rank that is about to be killed and will not remove it any more."""
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        return {Path(w) for w in maps.split() if w.startswith("/dev/shm/")}
    return set()


def mpi(name: str, ranks: int, caller: str) -> Ranks | None:
    """MPICH or Open MPI with their defaults, from C (`single`, `multiple`) or from `mpi4py`."""
    venv = environment(name)
    if venv is None:
        return None
    launch = [str(venv / "bin/mpiexec"), "-n", str(ranks)]
    if name == "openmpi":
        launch.append("--allow-run-as-root")
        if ranks > cores():
            launch.append("--oversubscribe")
    if caller == "mpi4py":
        program = [str(venv / "bin/python"), str(HERE / "peer_python.py")]
    else:
        program = [str(compiled("peer_mpi.c", str(venv / "bin/mpicc"), f"peer_mpi-{name}"))]
    return Ranks(mpi_label(name, caller), ranks, lambda path: [[*launch, *program, path, caller]])


def gloo(ranks: int, python: str) -> Ranks:
    """torch.distributed over gloo, in the interpreter given."""

    def commands(path: str) -> list[list[str]]:
        head = [python, str(HERE / "peer_python.py"), path, "gloo"]
        return [[*head, str(rank), str(ranks), f"{path}.store"] for rank in range(ranks)]

    return Ranks("gloo", ranks, commands)


def limit(mode: str, ranks: int, largest: int) -> Ranks:
    """The bare memory: `copy`, `add` or `stream`; or `oneshot`, for two ranks."""
    program = str(compiled("peer_limit.c", "cc", "peer_limit"))
    file = os.memfd_create("tvm-ipc-bench")
    try:
        os.ftruncate(file, 4096 + 2 * largest)
        tail = [str(file), str(largest)] if mode == "oneshot" else []
        return Ranks(
            f"limit {mode}" if not tail else "bare one-shot",
            ranks,
            lambda path: [[program, path, str(rank), mode, *tail] for rank in range(ranks)],
            (file,),
        )
    finally:
        os.close(file)


def torch_python(install: bool) -> str | None:
    """An interpreter that has torch with gloo: this one, or one made for it on request."""
    test = "import torch.distributed as d; raise SystemExit(not d.is_gloo_available())"
    candidates: Sequence[str] = [sys.executable]
    if (OUT / "venv-torch/complete").exists() or install:
        venv = environment("torch")
        candidates = [sys.executable, *([str(venv / "bin/python")] if venv else [])]
    for python in candidates:
        if subprocess.run([python, "-c", test], capture_output=True).returncode == 0:
            return python
    return None
