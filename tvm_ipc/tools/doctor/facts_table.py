# SPDX-License-Identifier: Apache-2.0
"""Format the facts of `tvm-ipc doctor` as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from tvm_ipc.tools.doctor import gpus
from tvm_ipc.tools.format import bytes_text

#: Width of the indentation and the label of a row, in characters.
_LABEL_WIDTH = 23
_NO_LIBRARY = "the native library is not loaded, see above"


def render(facts: dict[str, Any], width: int | None = None) -> str:
    """Return the facts as a table; long lines are wrapped at `width` if it is given."""
    lines = [f"tvm-ipc {facts['version']}, Python {facts['python']}, {facts['system']}"]
    problem = facts["tvm"]["problem"]
    for title, rows in _sections(facts):
        lines += ["", title]
        for name, value in rows:
            # Most rows have the same reason if the library cannot be loaded: print it once.
            text = value
            if problem is not None and title != "TVM":
                text = value.replace(problem, _NO_LIBRARY)
            first, *more = _wrap(text, width and max(width - _LABEL_WIDTH, _LABEL_WIDTH))
            lines.append(f"  {name:<20} {first}")
            lines += [f"  {'':<20} {line}" for line in more]
    return "\n".join(lines)


def _wrap(text: str, width: int | None) -> list[str]:
    lines = text.splitlines() or [""]
    if width is None:
        return lines
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return [piece for line in lines for piece in wrapper.wrap(line) or [""]]


def _sections(facts: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    yield "Packages", [(p["package"], _package(p)) for p in facts["packages"]]
    tvm = facts["tvm"]
    yield (
        "TVM",
        [
            ("mode", tvm["mode"] or "unknown"),
            ("defects found", "\n".join(_defects(tvm)) or "none"),
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
    searched = tvm["problem"] is None
    yield (
        "C++ compiler",
        [
            ("command", compiler["command"] or ("none found" if searched else "not searched")),
            ("version", compiler["version"] or "unknown"),
            ("can link", "yes" if compiler["works"] else f"no: {compiler['reason']}"),
            *((name, value) for name, value in compiler["settings"].items() if value is not None),
        ],
    )
    blas = facts["blas"]
    yield (
        "Matmul",
        [
            ("OpenBLAS", blas["library"] or f"not available: {blas['reason']}"),
            ("OpenBLAS kernels", blas["kernels"] or "unknown"),
        ],
    )
    cpu, memory, limits = facts["cpu"], facts["memory"], facts["limits"]
    yield (
        "Processor",
        [
            ("model", cpu["model"] or "unknown"),
            ("cores", f"{cpu['cores']} usable by this process"),
            ("instruction sets", ", ".join(cpu["instruction_sets"] or ()) or "unknown"),
            ("instruction set used", cpu["instruction_set"] or "unknown"),
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
    yield "Configuration", [(k, _setting(v)) for k, v in facts["configuration"].items()]


def _package(package: dict[str, Any]) -> str:
    installed, tested = package["installed"] or "missing", package["tested"]
    if tested is None:
        return f"{installed} (tvm-ipc is not installed, so the tested version is unknown)"
    return f"{installed} " + ("(tested)" if package["matches"] else f"(tested with {tested})")


def _defects(tvm: dict[str, Any]) -> Iterator[str]:
    for defect in tvm["found"]:
        yield f"{defect}: " + ("patched" if defect in tvm["patched"] else "not patched")


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[value]


def _size(number: int | None, absent: str) -> str:
    return absent if number is None else bytes_text(number)


def _setting(value: Any) -> str:
    return "default" if value is None else str(value)
