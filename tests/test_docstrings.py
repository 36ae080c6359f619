# SPDX-License-Identifier: Apache-2.0
"""The docstrings of public names list all parameters, and their examples run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm

from tests.made_up_calibration import calibration

MODULES = [
    "tvm_ipc",
    *(f"tvm_ipc.{name}" for name in ("comm", "cpu", "gpu", "models", "nodes", "spmd", "transform")),
]
#: The modules that an example needs beside the dependencies of the wheel.
NEEDS = dict.fromkeys(
    (f"tvm_ipc.models.{name}" for name in ("load", "Batch", "BatchRequest", "Model", "TextStream")),
    ("torch", "transformers", "safetensors"),
)
#: Examples that run in a process of their own, before anything imports TVM.
IN_FRESH_PROCESS = {"tvm_ipc.runtime_only"}
#: A class with many short methods, whose text names parameters instead of listing them.
NAMES_PARAMETERS = "tvm_ipc.Session"
#: Runs the example of a function.
ALONE = """
import doctest, tvm_ipc
(test,) = doctest.DocTestFinder().find({name}, "{name}", module=False, globs={{}})
result = doctest.DocTestRunner().run(test)
assert result.failed == 0 < result.attempted
"""
SECTION = re.compile(r"^(\w+)\n-{3,}\n", re.MULTILINE)
ITEM = re.compile(r"^(\*{0,2}\w+) : ", re.MULTILINE)


def exported() -> dict[str, Any]:
    """Return the functions and classes that the modules export, by the first of their names."""
    names: dict[str, Any] = {}
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not any(
                value is other for other in names.values()
            ):
                names[f"{module_name}.{name}"] = value
    return names


def callables() -> dict[str, Callable[..., Any]]:
    """Return exported functions and classes, and the public methods of these classes."""
    names: dict[str, Callable[..., Any]] = {}
    for name, value in EXPORTED.items():
        names[name] = value
        for method_name, method in members(value).items() if inspect.isclass(value) else ():
            function = getattr(method, "__func__", method)
            if inspect.isfunction(function) and not method_name.startswith("_"):
                names[f"{name}.{method_name}"] = function
    return names


def members(value: type) -> dict[str, Any]:
    """Return what a class has of its own; of a session also the methods that are generated."""
    generated = [base for base in value.__bases__ if base.__name__ == "SessionCollectives"]
    return {name: m for one in (*generated, value) for name, m in vars(one).items()}


EXPORTED = exported()
CALLABLES = callables()


def save_model(folder: Path) -> None:
    """Save the small model that the examples of models load."""
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=100,
        eos_token_id=None,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizers = importlib.import_module("tokenizers")
    characters = {chr(code): code - 32 for code in range(32, 127)}
    model = tokenizers.models.BPE(characters, [])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(model))
    tokenizer.save_pretrained(folder)


def save_calibration(file: Path) -> None:
    """Save the calibration of a machine without a link, with times that were not measured."""
    calibration().save(file)


#: The files that examples read, by the names of the examples.
FILES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "tvm_ipc.Calibration": ("tvm-ipc-calibration.json", save_calibration),
    "tvm_ipc.models.load": ("model", save_model),
    "tvm_ipc.models.Batch": ("model", save_model),
    "tvm_ipc.models.BatchRequest": ("model", save_model),
    "tvm_ipc.models.Model": ("model", save_model),
    "tvm_ipc.models.TextStream": ("model", save_model),
}


def sections(value: Any) -> dict[str, str]:
    """Return the sections of a docstring by their titles."""
    _, *parts = SECTION.split(inspect.getdoc(value) or "")
    return dict(zip(parts[::2], parts[1::2], strict=True))


def documented(value: Any, title: str) -> list[str]:
    """Return the names that a section lists."""
    return [name.lstrip("*") for name in ITEM.findall(sections(value).get(title, ""))]


def parameters(value: Callable[..., Any]) -> list[str]:
    """Return the parameters that callers pass."""
    names = inspect.signature(value).parameters
    return [name for name in names if name not in {"self", "cls"} and not name.startswith("_")]


def passes() -> list[str]:
    return [
        name
        for name, value in EXPORTED.items()
        if inspect.isclass(value) and issubclass(value, tvm.transform.Pass)
    ]


def examples() -> Iterator[tuple[str, doctest.DocTest]]:
    """Yield the docstrings with examples, with the exported name that they belong to."""
    finder = doctest.DocTestFinder()
    for name, value in EXPORTED.items():
        found = finder.find(value, name, module=False, globs={})
        yield from ((name, test) for test in found if test.examples)


@pytest.mark.parametrize("name", CALLABLES)
def test_parameters_are_those_of_the_signature(name: str) -> None:
    value = CALLABLES[name]
    if name.startswith(f"{NAMES_PARAMETERS}."):
        texts = (inspect.getdoc(one) or "" for one in (value, EXPORTED[NAMES_PARAMETERS]))
        named = set(re.findall(r"`(\w+)", " ".join(texts)))
        assert set(parameters(value)) <= named | set(documented(value, "Parameters"))
    elif inspect.isclass(value) and "Parameters" not in sections(value):
        # The fields of a class of data are its parameters, and are documented once.
        assert set(parameters(value)) <= set(documented(value, "Attributes"))
    else:
        assert documented(value, "Parameters") == parameters(value)


@pytest.mark.parametrize("name", [name for name, v in CALLABLES.items() if not inspect.isclass(v)])
def test_a_function_documents_its_result(name: str) -> None:
    value = CALLABLES[name]
    returned = str(inspect.signature(value).return_annotation)
    title = "Yields" if returned.startswith("Iterator") else "Returns"
    first_line = (inspect.getdoc(value) or "").partition("\n")[0]
    if name.startswith(f"{NAMES_PARAMETERS}.") and returned != "None":
        assert "return" in first_line.lower()
    else:
        assert (title in sections(value)) == (returned != "None")


@pytest.mark.parametrize("name", EXPORTED)
def test_every_exported_name_has_an_example(name: str) -> None:
    assert ">>> " in sections(EXPORTED[name]).get("Examples", "")


@pytest.mark.parametrize("name", passes())
def test_a_pass_shows_the_program_before_and_after(name: str) -> None:
    text = inspect.getdoc(EXPORTED[name]) or ""
    before, after = ("Rejected", "Accepted") if "Verify" in name else ("Before", "After")
    for word in (before, after):  # a paragraph that ends in a colon, and an indented block of code
        assert re.search(rf"^{word}\b(?:.|\n(?!\n))*:\n\n {{4}}\S", text, re.MULTILINE), word


@pytest.mark.parametrize(
    ("name", "test"),
    [
        # Those with other dependencies import PyTorch and compile a model, which takes long.
        pytest.param(*pair, id=pair[1].name, marks=[pytest.mark.slow] * (pair[0] in NEEDS))
        for pair in examples()
    ],
)
def test_an_example_prints_what_it_shows(
    name: str,
    test: doctest.DocTest,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    run_python: Callable[..., str],
) -> None:
    for module in NEEDS.get(name, ()):
        pytest.importorskip(module, reason=f"the example needs {module}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TVM_IPC_CACHE", str(tmp_path_factory.getbasetemp() / "compiled_models"))
    if name in FILES:
        file, save = FILES[name]
        save(tmp_path / file)
    if name in IN_FRESH_PROCESS:
        run_python(ALONE.format(name=name))
        return
    assert doctest.DocTestRunner().run(test).failed == 0


def test_what_the_tests_look_at() -> None:
    assert {"tvm_ipc.Session", "tvm_ipc.transform.LegalizeOps"} <= EXPORTED.keys()
    assert {"tvm_ipc.Session.put", "tvm_ipc.comm.Division.of"} <= CALLABLES.keys()
    assert len(passes()) > 20
    assert documented(EXPORTED["tvm_ipc.comm.Mesh"], "Parameters") == ["axes", "ranks"]
