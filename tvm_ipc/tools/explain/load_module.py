# SPDX-License-Identifier: Apache-2.0
"""Load a module that was saved as JSON or as TVMScript."""

from __future__ import annotations

import runpy
import sys
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Final

import tvm
from tvm import relax
from tvm.script import ir as I  # noqa: N812
from tvm.script import relax as R  # noqa: N812
from tvm.script import tirx as T  # noqa: N812

from tvm_ipc.tools.explain.options import ModuleError

#: Largest accepted file, in bytes; a module without its weights is far smaller.
_MAX_BYTES: Final = 1 << 30


def load_module(path: Path, name: str | None = None) -> tvm.IRModule:
    """Return the module in a file.

    A `.py` file is executed as a Python program; `name` selects one of several modules in it.
    """
    text = _read(path)
    mod = _run(path, name) if path.suffix == ".py" else _parse(path, text)
    if not any(isinstance(f, relax.Function) for _, f in mod.functions_items()):
        raise ModuleError(
            f"the module in {path} has no Relax function; the pipeline compiles Relax functions"
        )
    return mod


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:  # may be a pipe, or a device that never ends
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise ModuleError(
                f"{path} is larger than {_MAX_BYTES >> 30} GiB; save the module without its weights"
            )
        return data.decode("utf-8")
    except OSError as error:
        raise ModuleError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModuleError(
            f"{path} is not a text file; save the module with tvm.ir.save_json(mod) or mod.script()"
        ) from error


def _parse(path: Path, text: str) -> tvm.IRModule:
    if not text.lstrip().startswith("{"):
        raise ModuleError(
            f"{path} is not JSON of tvm.ir.save_json; a file of TVMScript must end in .py"
        )
    try:
        value = tvm.ir.load_json(text)
    except Exception as error:  # TVM raises many types
        raise ModuleError(f"{path} is not JSON of tvm.ir.save_json: {last_line(error)}") from error
    if not isinstance(value, tvm.IRModule):
        raise ModuleError(f"{path} holds a {type(value).__name__}, not an IRModule")
    return value


def _run(path: Path, name: str | None) -> tvm.IRModule:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as Python does for a script
    try:
        with redirect_stdout(sys.stderr):  # the page may go to the standard output
            # mod.script() writes its imports as comments.
            names = runpy.run_path(str(path), init_globals={"I": I, "R": R, "T": T, "tvm": tvm})
    except (Exception, SystemExit) as error:
        raise ModuleError(f"{path} raised an error: {_first_line(error)}") from error
    finally:
        with suppress(ValueError):  # the script may have removed it
            sys.path.remove(folder)
    modules = {key: value for key, value in names.items() if isinstance(value, tvm.IRModule)}
    if name is not None:
        if name not in modules:
            raise ModuleError(f"{path} defines no module {name!r}; {_list_modules(modules)}")
        return modules[name]
    if len({id(mod) for mod in modules.values()}) > 1:
        raise ModuleError(
            f"{path} defines several modules; {_list_modules(modules)}: select one with --module"
        )
    if not modules:
        raise ModuleError(
            f"{path} defines no module; it must define a class with @I.ir_module, or an IRModule"
        )
    return next(iter(modules.values()))


def _list_modules(modules: dict[str, tvm.IRModule]) -> str:
    return f"it defines {', '.join(sorted(modules)) or 'none'}"


def last_line(error: BaseException) -> str:
    """Return the last line of an error, where TVM states the reason."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    location = next((line[4:] for line in lines if line.startswith("--> ")), "")
    kind = "" if text.startswith("error: ") else f"{type(error).__name__}: "
    return f"{kind}{text.removeprefix('error: ')}{f' (at {location})' if location else ''}"
