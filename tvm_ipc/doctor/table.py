# SPDX-License-Identifier: Apache-2.0
"""The doctor's facts as a table for people."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from tvm_ipc.doctor import gpus

#: Characters of a line before its fact.
_NAMES = 23
_NO_LIBRARY = "without the native library, see above"


def render(facts: dict[str, Any], width: int | None = None) -> str:
    """Set the facts as a table for people; lines break at a width, if there is one."""
    lines = [f"tvm-ipc {facts['version']}, Python {facts['python']}, {facts['system']}"]
    problem = facts["tvm"]["problem"]
    for title, rows in _sections(facts):
        lines += ["", title]
        for name, said in rows:
            # A library that cannot be loaded is why nothing else works, and is said once.
            text = said if problem is None or title == "TVM" else said.replace(problem, _NO_LIBRARY)
            first, *more = _broken(text, width and max(width - _NAMES, _NAMES))
            lines.append(f"  {name:<20} {first}")
            lines += [f"  {'':<20} {line}" for line in more]
    return "\n".join(lines)


def _broken(text: str, width: int | None) -> list[str]:
    lines = text.splitlines() or [""]
    if width is None:
        return lines
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return [part for line in lines for part in wrapper.wrap(line) or [""]]


def _sections(facts: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "Packages", [(p["package"], _package(p)) for p in facts["packages"]]
    tvm = facts["tvm"]
    yield (
        "TVM",
        [
            ("mode", tvm["mode"] or "unknown"),
            ("found broken", "\n".join(_defects(tvm)) or "nothing"),
            ("native library", tvm["library"] or f"not loaded: {tvm['problem']}"),
            *((name, value) for name, value in tvm["settings"].items() if value is not None),
        ],
    )
    yield (
        "Backends",
        [
            (name, ("available: " if b["available"] else "not available: ") + b["reason"])
            for name, b in facts["backends"].items()
        ],
    )
    yield "GPUs", list(gpus.rows(facts["gpus"], tvm["cuda"]))
    compiler = facts["cxx"]
    looked_for = tvm["problem"] is None
    yield (
        "C++ compiler",
        [
            ("command", compiler["command"] or ("none found" if looked_for else "not looked for")),
            ("version", compiler["version"] or "unknown"),
            ("links", "yes" if compiler["works"] else f"no: {compiler['reason']}"),
            *((name, value) for name, value in compiler["settings"].items() if value is not None),
        ],
    )
    products = facts["blas"]
    yield (
        "Matrix products",
        [
            ("OpenBLAS", products["library"] or f"not available: {products['reason']}"),
            ("kernels beside it", products["kernels"] or "unknown"),
        ],
    )
    cpu, memory, limits = facts["cpu"], facts["memory"], facts["limits"]
    yield (
        "Processor",
        [
            ("model", cpu["model"] or "unknown"),
            ("cores", f"{cpu['cores']} usable by this process"),
            ("instruction sets", ", ".join(cpu["instruction_sets"] or ()) or "unknown"),
            ("in use", cpu["instruction_set"] or "unknown"),
            *((name, value or "not set") for name, value in facts["threads"].items()),
        ],
    )
    yield (
        "Shared memory",
        [
            ("memfd", _yes_no(facts["system_calls"]["memfd"])),
            ("pidfd", _yes_no(facts["system_calls"]["pidfd"])),
            ("physical memory", _size(memory["physical"], "unknown")),
            ("cgroup memory.max", _size(memory["cgroup_limit"], "no limit")),
            ("RLIMIT_AS", _size(memory["address_space_limit"], "no limit")),
            ("RLIMIT_NOFILE", str(limits["open_files"] or "no limit")),
            ("default arena limit", _size(memory["default_arena_limit"], "unknown")),
            ("workers per session", f"at most {limits['max_workers'] or 'unknown'}"),
        ],
    )
    yield "Configuration", [(k, _plain(v)) for k, v in facts["configuration"].items()]


def _package(package: dict[str, Any]) -> str:
    installed, tested = package["installed"] or "missing", package["tested"]
    if tested is None:
        return f"{installed} (tvm-ipc is not installed, so the tested version is unknown)"
    return f"{installed} " + ("(tested)" if package["matches"] else f"(tested with {tested})")


def _defects(tvm: dict[str, Any]) -> Iterator[str]:
    for defect in tvm["found"]:
        yield f"{defect}: " + ("mended" if defect in tvm["mended"] else "not mended")


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[value]


def _size(number: int | None, absent: str) -> str:
    if number is None:
        return absent
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >> shift:
            return f"{number / (1 << shift):.1f} {unit}"
    return f"{number} bytes"


def _plain(value: Any) -> str:
    return "default" if value is None else str(value)
