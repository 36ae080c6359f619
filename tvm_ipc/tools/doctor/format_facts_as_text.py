# SPDX-License-Identifier: Apache-2.0
"""Format the facts of `tvm-ipc doctor`: the verdict, and a table of the details."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

from tvm_ipc.packed_functions import backend_of_nodes
from tvm_ipc.tools.doctor import gpus
from tvm_ipc.tools.format import bytes_text

#: Width of the indentation and the label of a row, in characters.
_LABEL_WIDTH = 23
_NO_LIBRARY = "see the first line"
_Rows = list[tuple[str, str]]


def render(facts: dict[str, Any], width: int | None = None, *, verbose: bool = False) -> str:
    """Return the verdict and the details; long lines are wrapped at `width` if it is given.

    `verbose` adds paths, names of limits, and texts of other libraries as they are.
    """
    lines = [line for entry in facts["verdict"] for line in _wrap(entry["text"], width)]
    problem = facts["tvm"]["problem"]
    for title, rows in _sections(facts, verbose):
        lines += ["", title]
        for name, value in rows:
            # Most rows have the same reason if the library cannot be loaded: the verdict has it.
            text = value if problem is None else value.replace(problem, _NO_LIBRARY)
            first, *more = _wrap(text, width and max(width - _LABEL_WIDTH, _LABEL_WIDTH))
            lines.append(f"  {name:<20} {first}")
            lines += [f"  {'':<20} {line}" for line in more]
    if not verbose:
        lines += ["", *_wrap("tvm-ipc doctor -v prints paths and all settings.", width)]
    return "\n".join(lines)


def _wrap(text: str, width: int | None) -> list[str]:
    lines = text.splitlines() or [""]
    if width is None:
        return lines
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    return [piece for line in lines for piece in wrapper.wrap(line) or [""]]


def _sections(facts: dict[str, Any], verbose: bool) -> Iterator[tuple[str, _Rows]]:
    yield (
        "Versions",
        [
            ("tvm-ipc", facts["version"]),
            *((p["package"], _package(p)) for p in facts["packages"]),
            ("Python", facts["python"]),
            ("system", facts["system"]),
        ],
    )
    yield "TVM", _tvm_rows(facts["tvm"], verbose)
    yield "Backends", _backend_rows(facts, verbose)
    yield "GPUs", list(gpus.rows(facts["gpus"], facts["tvm"]["cuda"], verbose=verbose))
    yield "C++ compiler", _compiler_rows(facts["cxx"], facts["tvm"]["problem"] is None, verbose)
    yield "Matmul", _blas_rows(facts["blas"], verbose)
    yield "Processor", _processor_rows(facts, verbose)
    yield "Memory and limits", _limit_rows(facts, verbose)
    yield "Settings", [(k, _setting(v)) for k, v in facts["configuration"].items()]


def _tvm_rows(tvm: dict[str, Any], verbose: bool) -> _Rows:
    rows = [("mode", tvm["mode"] or "unknown")]
    rows.append(("known defects", "\n".join(_defects(tvm)) or "none"))
    if tvm["problem"] is not None:
        rows.append(("native library", f"not loaded: {tvm['problem']}"))
    elif verbose:
        rows.append(("native library", tvm["library"]))
    return rows + [(name, value) for name, value in tvm["settings"].items() if value is not None]


def _backend_rows(facts: dict[str, Any], verbose: bool) -> _Rows:
    mpi, rows = facts["node_launcher"], []
    for name, backend in facts["backends"].items():
        reason = backend["reason"]
        if name == backend_of_nodes() and not mpi["found"] and not verbose:
            reason = "no MPI is installed"
        rows.append((name, ("available: " if backend["available"] else "not available: ") + reason))
    if mpi["version"] is not None:
        rows.append(("MPI", f"{mpi['version']}" + (f", {mpi['launcher']}" if verbose else "")))
    return rows


def _compiler_rows(compiler: dict[str, Any], searched: bool, verbose: bool) -> _Rows:
    rows = [("command", compiler["command"] or ("none found" if searched else "not searched"))]
    if verbose:
        rows.append(("version", compiler["version"] or "unknown"))
    rows.append(("can link", "yes" if compiler["works"] else f"no: {compiler['reason']}"))
    settings = compiler["settings"].items()
    return rows + [(name, value) for name, value in settings if value is not None]


def _blas_rows(blas: dict[str, Any], verbose: bool) -> _Rows:
    if blas["library"] is None:
        return [("OpenBLAS", f"not available: {blas['reason']}")]
    if not verbose:
        # The text begins with the name and the version: OpenBLAS 0.3.34.481.3  USE64BITINT ...
        return [("OpenBLAS", (blas["library"].split()[1]))]
    return [
        ("OpenBLAS", blas["library"]),
        ("OpenBLAS library", blas["path"]),
        ("OpenBLAS kernels", blas["kernels"] or "unknown"),
    ]


def _processor_rows(facts: dict[str, Any], verbose: bool) -> _Rows:
    cpu = facts["cpu"]
    rows = [
        ("model", cpu["model"] or "unknown"),
        ("cores", f"{cpu['cores']} usable by this process"),
        ("instruction set used", cpu["instruction_set"] or "unknown"),
    ]
    if verbose:
        rows.append(("instruction sets", ", ".join(cpu["instruction_sets"] or ()) or "unknown"))
    return rows + [
        (name, value or "not set")
        for name, value in facts["threads"].items()
        if verbose or value is not None
    ]


def _limit_rows(facts: dict[str, Any], verbose: bool) -> _Rows:
    memory, limits, calls = facts["memory"], facts["limits"], facts["system_calls"]

    def raw(text: str, name: str) -> str:
        return f"{text} ({name})" if verbose else text

    rows = [
        ("physical memory", _size(memory["physical"], "unknown")),
        ("container's limit", raw(_size(memory["cgroup_limit"], "none"), "cgroup memory.max")),
        ("limit per process", raw(_size(memory["address_space_limit"], "none"), "RLIMIT_AS")),
        ("limit per arena", _size(memory["default_arena_limit"], "unknown")),
        ("open files", raw(str(limits["open_files"] or "no limit"), "RLIMIT_NOFILE")),
        ("workers per session", f"at most {limits['max_workers'] or 'unknown'}"),
    ]
    for name in ("memfd", "pidfd"):
        if verbose or calls[name] is False:
            rows.append((name, _yes_no(calls[name])))
    return rows


def _defects(tvm: dict[str, Any]) -> Iterator[str]:
    for defect in tvm["found"]:
        yield f"{defect}: " + ("patched" if defect in tvm["patched"] else "not patched")


def _package(package: dict[str, Any]) -> str:
    installed, tested = package["installed"] or "missing", package["tested"]
    if tested is None:
        return f"{installed} (tvm-ipc is not installed, so the tested version is unknown)"
    return f"{installed} " + ("(tested)" if package["matches"] else f"(tested with {tested})")


def _yes_no(value: bool | None) -> str:
    return {True: "yes", False: "no", None: "unknown"}[value]


def _size(number: int | None, absent: str) -> str:
    return absent if number is None else bytes_text(number)


def _setting(value: Any) -> str:
    return "default" if value is None else str(value)
