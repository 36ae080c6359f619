#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs a kit: the tests of GPUs and the benchmark, with what lies beside this file.

    DIR/run [--results FOLDER] [--seconds N]      all of it
    DIR/run -- python -m pytest tests/gpu -k graph   one command, in the same environment

Wants NVIDIA's driver, Python 3.10 or newer, NumPy and pytest. Installs nothing: the wheels are
unpacked into a temporary folder. Without a GPU, what needs one is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

KIT = Path(__file__).resolve().parent
BENCHMARK = KIT / "benchmarks" / "allreduce_cuda.py"


@dataclass(frozen=True)
class Step:
    """A command, the file for what it prints, and its share of the seconds that are left."""

    name: str
    command: list[str]
    share: float


def check_machine() -> dict[str, object]:
    """What the kit was made for; ends with words where this machine is something else."""
    about: dict[str, object] = json.loads((KIT / "kit.json").read_text())
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    pythons = about["pythons"]
    assert isinstance(pythons, list)
    problems = []
    if version not in pythons:
        problems.append(f"this Python is {version}; the kit has wheels for {', '.join(pythons)}")
    if platform.machine() != about["machine"]:
        problems.append(f"this machine is {platform.machine()}; the kit is for {about['machine']}")
    missing = [name for name in ("numpy", "pytest") if importlib.util.find_spec(name) is None]
    if missing:
        problems.append(f"{sys.executable} has no {' and no '.join(missing)}")
    here = platform.libc_ver()[1]
    if numbers(here) < numbers(str(about["glibc"])):
        problems.append(f"glibc is {here}; the kit was compiled with {about['glibc']}")
    if problems:
        raise SystemExit("This kit cannot run here: " + "; ".join(problems))
    return about


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


def unpack(site: Path) -> None:
    """Put the wheels for this Python where it can import them."""
    tag = f"cp{sys.version_info[0]}{sys.version_info[1]}"
    for wheel in sorted((KIT / "wheels").glob("*.whl")):
        if {"py3", "py2.py3", tag} & set(wheel.stem.split("-")[-3:-2]):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)


def environment(site: Path) -> dict[str, str]:
    """Of all commands: the kit's packages come before those of the machine."""
    before = os.environ.get("PYTHONPATH", "")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(site), before])),
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "TVM_USE_RUNTIME_LIB": "1",
        "TVM_IPC_TEST_PROGRAMS": str(KIT / "programs"),
    }


def steps(results: Path) -> list[Step]:
    python = sys.executable
    tests = [python, "-m", "pytest", "tests/gpu", f"--junitxml={results / 'tests.xml'}"]
    bench = [python, str(BENCHMARK), "--json", str(results / "allreduce_cuda.json")]
    bench += ["--programs", str(KIT / "programs")]
    return [
        Step("machine", ["nvidia-smi"], 0.1),
        Step("doctor", [python, "-m", "tvm_ipc", "doctor", "-v"], 0.2),
        Step("tests", tests, 0.6),
        Step("allreduce_cuda", bench, 1.0),
    ]


def run(step: Step, results: Path, variables: dict[str, str], seconds: float) -> dict[str, object]:
    """Run a step, which shows its output and keeps it; it ends when its time is over."""
    print(f"=== {step.name}: {' '.join(step.command)} (at most {seconds:.0f} s)", flush=True)
    started = time.monotonic()
    if shutil.which(step.command[0]) is None:
        print(f"{step.command[0]} is not on this machine", flush=True)
        return {"name": step.name, "status": "not here", "seconds": 0.0}
    with (results / f"{step.name}.txt").open("w") as file:
        process = subprocess.Popen(
            step.command,
            cwd=KIT,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None
        # Ends what it started, too; the output ends with it.
        clock = subprocess.Popen(
            [sys.executable, "-c", END_LATER, str(seconds), str(process.pid)],
            stdin=subprocess.PIPE,
        )
        for line in process.stdout:
            file.write(line)
            print(line, end="", flush=True)
        code = process.wait()
        late = clock.poll() is not None
        clock.kill()
        clock.wait()
    status = "over its time" if late else "passed" if code == 0 else f"exit status {code}"
    return {"name": step.name, "status": status, "seconds": round(time.monotonic() - started, 1)}


#: Ends a process group after some seconds. A process of its own, since the output is waited for.
END_LATER = f"""
import os, sys, time
time.sleep(float(sys.argv[1]))
os.killpg(int(sys.argv[2]), {int(signal.SIGKILL)})
"""


def main() -> int:
    parser = argparse.ArgumentParser(prog="run", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--results", type=Path, default=Path("results"), help="folder to write to")
    parser.add_argument("--seconds", type=float, default=540, help="for all of it (default 540)")
    parser.add_argument("command", nargs="*", help="after `--`: run this, and nothing else")
    options = parser.parse_args()
    end = time.monotonic() + options.seconds
    about = check_machine()
    with tempfile.TemporaryDirectory(prefix="tvm-ipc-kit-") as site:
        unpack(Path(site))
        variables = environment(Path(site))
        if options.command:
            return subprocess.run(options.command, cwd=KIT, env=variables).returncode
        results = options.results.resolve()
        results.mkdir(parents=True, exist_ok=True)
        done = [
            run(step, results, variables, max(1.0, step.share * (end - time.monotonic())))
            for step in steps(results)
        ]
    summary = {"kit": about, "python": sys.version, "platform": platform.platform(), "steps": done}
    (results / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print("=== summary")
    for one in done:
        print(f"{one['name']:16} {one['status']:16} {one['seconds']:7} s")
    return int(any(one["status"] not in ("passed", "not here") for one in done))


if __name__ == "__main__":
    sys.exit(main())
