# SPDX-License-Identifier: Apache-2.0
"""One file lists the private names of TVM, and they exist in the pinned release."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi

from tvm_ipc import packed_functions, tvm_moved_names, tvm_private_names
from tvm_ipc.runtime import shared_libraries
from tvm_ipc.runtime.disco_processes import Worker
from tvm_ipc.runtime.references import DModule, DPackedFunc, DRef
from tvm_ipc.runtime.session import Session
from tvm_ipc.tvm_private_names import Replaceable

PACKAGE = Path(__file__).resolve().parents[1] / "tvm_ipc"
MODULE = PACKAGE / "tvm_private_names.py"
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != MODULE]
#: Private names of other libraries: the standard library, mpi4py, transformers and PyTorch.
OF_OTHERS = {
    *("_exit", "_is_owned", "_ActionsContainer", "_actions", "_xoptions", "_name"),
    *("_handleof", "_sizeof"),
    *(
        "_apply_gate",
        "_can_set_experts_implementation",
        "_ep_plan",
        "_keys_to_ignore_on_load_unexpected",
        "_tp_plan",
    ),
    "_check",
}
#: Functions whose argument is the name of an attribute or a module.
TAKE_A_NAME = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "import_module"}
#: Functions that look up a global function.
LOOK_UP = {"get_global_func", "_get_cached_method", "function", "GetGlobal", "GetGlobalRequired"}


def is_private(name: str) -> bool:
    return name.startswith("__tvm_ffi") or (name.startswith("_") and not name.startswith("__"))


def is_of_tvm(name: str) -> bool:
    return name.split(".")[0] in ("tvm", "tvm_ffi")


def own_members() -> set[str]:
    """The attributes that classes of this package have."""
    members = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    targets = getattr(item, "targets", [getattr(item, "target", None)])
                    members |= {target.id for target in targets if isinstance(target, ast.Name)}
                    members |= {getattr(item, "name", "")}
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                members |= {node.attr} if ast.unparse(node.value) in ("self", "cls") else set()
    return members


def bound_to_tvm(tree: ast.AST) -> dict[str, str]:
    """The names in a file that are modules or members of TVM, and what they stand for."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if is_of_tvm(alias.name):
                    first = alias.name.split(".")[0]
                    names[alias.asname or first] = alias.name if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and is_of_tvm(node.module or ""):
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def strings_of(call: ast.Call) -> Iterator[str]:
    for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
            yield argument.value


def private_uses(source: str, members: set[str]) -> Iterator[str]:
    """Yield the private names of TVM that a file uses."""
    tree = ast.parse(source)
    of_tvm = bound_to_tvm(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if is_of_tvm(alias.name)]
        elif isinstance(node, ast.ImportFrom) and is_of_tvm(node.module or ""):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            chain = ast.unparse(node)
            known = node.attr in members or node.attr in OF_OTHERS
            names = [chain] if chain.split(".")[0] in of_tvm or not known else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in TAKE_A_NAME:
            names = [text for text in strings_of(node) if not {text} & (members | OF_OTHERS)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if re.fullmatch(r"(tvm|tvm_ffi)(\.\w+)+", node.value) else []
            names += [node.value] if node.value.startswith("__tvm_ffi") else []
        else:
            names = []
        yield from (name for name in names if any(map(is_private, name.split("."))))


def replacements(source: str) -> Iterator[str]:
    """Yield the attributes and functions of TVM that a file replaces."""
    tree = ast.parse(source)
    of_tvm = bound_to_tvm(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
            changed = [ast.unparse(node)]
        elif isinstance(node, ast.Call):
            function = ast.unparse(node.func).split(".")[-1]
            changed = [ast.unparse(node.args[0])] if function in ("setattr", "delattr") else []
            override = any(keyword.arg == "override" for keyword in node.keywords)
            if function == "register_global_func" and override:
                ours = [text for text in strings_of(node) if text.startswith("tvm_ipc.")]
                yield from [] if ours else [ast.unparse(node)]
        else:
            changed = []
        yield from (name for name in changed if name.split(".")[0] in of_tvm)


def lookups(source: str) -> Iterator[str]:
    """Yield the global functions of TVM that a file looks up by a text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in LOOK_UP:
            names = (text for text in strings_of(node) if re.fullmatch(r"\w+(\.\w+)+", text))
            yield from (name for name in names if not name.startswith("tvm_ipc."))


def moved_uses(source: str, moved: set[str]) -> Iterator[str]:
    """Yield the names that a file takes from where they are in one release of TVM."""
    tree = ast.parse(source)
    of_tvm = bound_to_tvm(tree)
    yield from moved & set(of_tvm.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            yield from {f"{of_tvm.get(first)}.{rest}"} & moved


def test_no_other_file_uses_such_a_name() -> None:
    members = own_members()
    for path in FILES:
        source = path.read_text()
        found = [*private_uses(source, members), *replacements(source), *lookups(source)]
        assert not found, f"{path}: add it to tvm_private_names.py, with the reason"


def test_names_that_have_moved_are_imported_from_one_file() -> None:
    file = PACKAGE / "tvm_moved_names.py"
    moved = set(bound_to_tvm(ast.parse(file.read_text())).values())
    assert {name.rpartition(".")[2] for name in moved} == set(tvm_moved_names.__all__)
    for path in FILES:
        if path != file:
            found = [*moved_uses(path.read_text(), moved)]
            assert not found, f"{path}: import it from tvm_moved_names.py"
    for source in ("from tvm import ir; ir.StringImm", "import tvm; tvm.ir.StringImm"):
        assert list(moved_uses(source, moved)) == ["tvm.ir.StringImm"]
    assert list(moved_uses("from tvm.ir import StringImm", moved)) == ["tvm.ir.StringImm"]


def test_native_library_looks_up_what_is_listed() -> None:
    pattern = re.compile(r'GetGlobal(?:Required)?\("([^"]+)"')
    found = {
        name
        for path in (PACKAGE / "csrc").rglob("*.cc")
        for name in pattern.findall(path.read_text())
        if not name.startswith("tvm_ipc.")
    }
    assert found == set(tvm_private_names.CALLED_BY_NATIVE_LIBRARY)


def test_sweeps_see_what_they_look_for() -> None:
    source = """
import tvm, tvm_ffi
from tvm.relax.expr import _update_type
from tvm_ffi import core
class Own:
    def _own(self): ...
tvm.base._LOADED_LIBS, core._own, x._of_tvm, x._own, os._exit
getattr(x, "_cache"), import_module("tvm.runtime.disco._ffi_api"), vars(x)["__tvm_ffi_type_info__"]
core.function = 1
setattr(tvm.runtime, "disco", 2)
tvm_ffi.register_global_func("runtime.disco.x", f, override=True)
tvm_ffi.register_global_func("tvm_ipc.x", f, override=True)
tvm.get_global_func("runtime.disco.empty"), tvm.get_global_func("tvm_ipc.x")
"""
    assert sorted(set(private_uses(source, {"_own"}))) == [
        "__tvm_ffi_type_info__",
        "_cache",
        "core._own",
        "tvm.base._LOADED_LIBS",
        "tvm.relax.expr._update_type",
        "tvm.runtime.disco._ffi_api",
        "x._of_tvm",
    ]
    assert sorted(replacements(source)) == [
        "core.function",
        "tvm.runtime",
        "tvm_ffi.register_global_func('runtime.disco.x', f, override=True)",
    ]
    assert list(lookups(source)) == ["runtime.disco.empty"]


def test_the_releases_are_those_that_are_pinned() -> None:
    pinned = {version.package: version.tested for version in shared_libraries.versions()}
    assert pinned == tvm_private_names.CHECKED_WITH
    for text in (tvm_private_names.__doc__ or "", tvm_moved_names.__doc__ or ""):
        assert f"apache-tvm {pinned['apache-tvm']}" in text
    assert f"apache-tvm-ffi {pinned['apache-tvm-ffi']}" in (tvm_private_names.__doc__ or "")


def listed(kind: type) -> list[Any]:
    """The constants of one type in the module, in tuples and tables too."""
    found = []
    for name, value in vars(tvm_private_names).items():
        if name.isupper():
            values = list(value.values()) if isinstance(value, dict) else [value]
            values = list(value) if isinstance(value, tuple) else values
            found += [v for v in values if isinstance(v, kind)]
    return found


def test_what_is_replaced_exists_and_says_why() -> None:
    replaced = listed(Replaceable)
    assert len(replaced) > 15
    for attribute in replaced:
        assert attribute.get() is not None
        (file,) = re.findall(r"\(([\w/]+\.py)\)", attribute.why)
        assert "tvm_private_names" in (PACKAGE / file).read_text()
    with pytest.raises(KeyError, match="is not listed"):
        tvm_private_names.replace_global_func("runtime.disco.empty", print)


def test_global_functions_exist() -> None:
    names = [text for text in listed(str) if re.fullmatch(r"[a-z]+(\.\w+)+", text)]
    functions = [name for name in names if not name.startswith("tvm.relax")]
    assert len(functions) > 8
    for name in {*functions, *tvm_private_names.REPLACED_FUNCTIONS}:
        assert tvm_ffi.get_global_func(name, allow_missing=True) is not None, name


def test_private_methods_that_are_overridden_are_listed() -> None:
    overridden = set()
    for cls in (Session, DRef, DPackedFunc, DModule, Worker):
        for base in cls.__mro__[1:]:
            if is_of_tvm(base.__module__):
                own = {name for name in vars(cls) if is_private(name)} - {"_abc_impl"}
                overridden |= own & vars(base).keys()
    assert overridden == set(tvm_private_names.OVERRIDDEN_METHODS)


def test_converters_of_torch_exist() -> None:
    pytest.importorskip("torch")
    importer = importlib.import_module(
        "tvm.relax.frontend.torch.exported_program_translator"
    ).ExportedProgramImporter
    for operator in tvm_private_names._TORCH_CONVERTERS:
        assert callable(tvm_private_names.torch_converter(importer, operator))


def test_packed_functions_are_not_tvms() -> None:
    """A name that is listed as TVM's is not one that this package declares."""
    declared = {function.name for function in packed_functions.FUNCTIONS}
    assert not declared & {tvm_private_names.MAKE_TUPLE, tvm_private_names.EMPTY}
