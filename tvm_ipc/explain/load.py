# SPDX-License-Identifier: Apache-2.0
"""Reads a module that was saved as JSON or as TVMScript."""

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

_MOST: Final = 1 << 30  # bytes; a module without its weights takes a fraction


class LoadError(Exception):
    """The file holds no module that can be read; the message is for its user."""


def load_module(path: Path, name: str | None = None) -> tvm.IRModule:
    """Return the module in a file.

    A `.py` file is run as the Python program that it is. Of several modules in it, `name` says
    which one is meant.
    """
    text = _read(path)
    mod = _run(path, name) if path.suffix == ".py" else _parse(path, text)
    if not any(isinstance(f, relax.Function) for _, f in mod.functions_items()):
        raise LoadError(f"the module in {path} has no Relax function")
    return mod


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:  # a pipe, too, or a device without an end
            data = file.read(_MOST + 1)
        if len(data) > _MOST:
            raise LoadError(f"{path} has more than {_MOST >> 30} GiB")
        return data.decode("utf-8")
    except OSError as error:
        raise LoadError(f"cannot read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise LoadError(
            f"{path} is no text; save the module with tvm.ir.save_json(mod) or mod.script()"
        ) from error


def _parse(path: Path, text: str) -> tvm.IRModule:
    if not text.lstrip().startswith("{"):
        raise LoadError(
            f"{path} is no JSON of tvm.ir.save_json; TVMScript is read from files that end in .py"
        )
    try:
        value = tvm.ir.load_json(text)
    except Exception as error:  # what TVM raises depends on what is wrong
        raise LoadError(f"{path} is no JSON of tvm.ir.save_json: {last_line(error)}") from error
    if not isinstance(value, tvm.IRModule):
        raise LoadError(f"{path} holds a {type(value).__name__}, not an IRModule")
    return value


def _run(path: Path, name: str | None) -> tvm.IRModule:
    folder = str(path.resolve().parent)
    sys.path.insert(0, folder)  # as Python does for a program
    try:
        with redirect_stdout(sys.stderr):  # what is printed is no part of the page
            # mod.script() prints its imports as comments.
            names = runpy.run_path(str(path), init_globals={"I": I, "R": R, "T": T, "tvm": tvm})
    except (Exception, SystemExit) as error:
        raise LoadError(f"{path} cannot be run: {_first_line(error)}") from error
    finally:
        with suppress(ValueError):  # the program may have removed it
            sys.path.remove(folder)
    modules = {key: value for key, value in names.items() if isinstance(value, tvm.IRModule)}
    if name is not None:
        if name not in modules:
            raise LoadError(f"{path} defines no module {name!r}; {_listed(modules)}")
        return modules[name]
    if len({id(mod) for mod in modules.values()}) > 1:
        raise LoadError(f"name one module of {path} with --module; {_listed(modules)}")
    if not modules:
        raise LoadError(f"{path} defines no module: a class under @I.ir_module, or an IRModule")
    return next(iter(modules.values()))


def _listed(modules: dict[str, tvm.IRModule]) -> str:
    return f"there is {', '.join(sorted(modules))}" if modules else "there is none"


def last_line(error: BaseException) -> str:
    """Return where TVM puts the reason."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    where = next((line[4:] for line in lines if line.startswith("--> ")), "")
    kind = "" if text.startswith("error: ") else f"{type(error).__name__}: "
    return f"{kind}{text.removeprefix('error: ')}{f' (at {where})' if where else ''}"
