# SPDX-License-Identifier: Apache-2.0
"""Run `tvm-ipc explain`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tvm_ipc.errors import IPCError, TransformError
from tvm_ipc.tools import terminal
from tvm_ipc.tools.demo import default_model
from tvm_ipc.tools.explain.options import ModuleError, Options, parse
from tvm_ipc.tools.options import OptionError, refuse

if TYPE_CHECKING:  # loads TVM, which `--help` need not wait for
    import tvm

    from tvm_ipc.tools.inspection.explain_decisions_and_memory import Explanation


def main(argv: Sequence[str]) -> int:
    """Explain a module and return the exit code."""
    options = None
    try:
        options = parse(argv)
        return _run(options)
    except OptionError as error:
        return refuse("tvm-ipc explain", error)
    except (ModuleError, TransformError) as error:
        terminal.stop_if_interrupted()  # TVM turns a Ctrl-C into other errors
        if options is not None and options.traceback:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        terminal.print_err("\n".join([f"tvm-ipc explain: {lines[0]}", *lines[1:]]))
        return 2


def _run(options: Options) -> int:
    terminal.load_tvm()
    from tvm_ipc.pipeline import parse_target
    from tvm_ipc.tools.explain import html_page, text_report
    from tvm_ipc.tools.explain.load_module import last_line
    from tvm_ipc.tools.inspection.explain_decisions_and_memory import (
        PipelineOptionError,
        Question,
        explain,
    )

    source = options.module.name if options.module is not None else "the demo's decoder"
    question = Question(source, options.target, options.world_size, options.strategy, options.sizes)
    try:
        kind = parse_target("--target", options.target).kind.name
    except ValueError as error:
        raise ModuleError(last_line(error)) from error
    terminal.progress(f"loading {source}")
    mod = _module(options, "cuda" if kind == "cuda" else "cpu")
    pipeline = {
        "barrier_budget": options.barrier_budget,
        "async_collectives": options.async_collectives,
        "overlap": _overlap_of_pipeline(options),
        "streams": options.streams,
    }
    try:
        if options.sizes:
            _check_sizes(mod, options.sizes)
        explanation = explain(
            mod,
            question,
            unsharded=default_model(1) if options.demo else None,
            progress=terminal.progress,
            **pipeline,
        )
    except (TransformError, ModuleError):
        raise
    except PipelineOptionError as error:
        raise ModuleError(str(error)) from None
    except Exception as error:  # TVM raises many types
        raise ModuleError(
            f"TVM cannot lower {source} for {options.target}: {last_line(error)} "
            "(more with --traceback)"
        ) from error
    page, path = b"", options.page
    if path is not None:
        # A file name may contain bytes that cannot be decoded.
        page = html_page.render(explanation).encode("utf-8", "xmlcharrefreplace")
    if options.to_stdout:
        terminal.print_bytes(page)
        return 0
    if path is not None:
        try:
            path.write_bytes(page)
        except OSError as error:
            raise ModuleError(f"cannot write {path}: {error.strerror}") from error
    if options.json:
        terminal.print_out(_json_text(explanation))
    elif options.text:
        plain = not terminal.can_print(text_report.CHARACTERS)
        terminal.print_out(text_report.render(explanation, plain=plain))
    else:
        terminal.print_out(text_report.summary(explanation))
    if path is not None:
        _report_page(path, options)
    return 0


def _report_page(page: Path, options: Options) -> None:
    """Print where the page is, and open it if the options request that."""
    # With --json the standard output has nothing but the object.
    report = terminal.print_err if options.json else terminal.print_out
    if not options.json:
        report("")
    report(f"written: {page}")
    if options.open and not _open_in_browser(page):
        report(f"no browser was found; open {page.resolve().as_uri()} in one")


def _open_in_browser(page: Path) -> bool:
    """Open a page in the user's browser; return whether there is one."""
    import webbrowser

    try:
        return webbrowser.open(page.resolve().as_uri())
    except webbrowser.Error:
        return False


def _module(options: Options, device: str) -> tvm.IRModule:
    if options.module is not None:
        from tvm_ipc.tools.explain.load_module import load_module

        return load_module(options.module, options.name)
    try:
        return default_model(options.world_size, options.sequence_parallel, device)
    except ValueError as error:
        raise ModuleError(f"--demo with --world-size {options.world_size}: {error}") from error


def _check_sizes(mod: tvm.IRModule, sizes: Mapping[str, int]) -> None:
    from tvm import relax

    functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
    defined = {str(var.name) for f in functions for var in relax.analysis.defined_symbolic_vars(f)}
    for name in sizes:
        if name not in defined:
            raise ModuleError(
                f"--size is '{name}={sizes[name]}', but the module's symbolic sizes are "
                f"{', '.join(sorted(defined)) or 'none'}"
            )


def _overlap_of_pipeline(options: Options) -> Any:
    """Return the `overlap` option of the pipeline; a calibration is loaded from its file."""
    if not isinstance(options.overlap, Path):
        return options.overlap
    from tvm_ipc.calibration import Calibration

    try:
        return Calibration.load(options.overlap, workers=options.world_size, any_machine=True)
    except IPCError as error:
        raise ModuleError(f"--overlap {options.overlap}: {error}") from error


def _json_text(explanation: Explanation) -> str:
    """Return the headline figures, the memory plan and the decisions as a JSON object."""
    question, figures = explanation.question, explanation.figures
    content = {
        "source": question.source,
        "target": question.target,
        "workers": question.world_size,
        "strategy": question.strategy,
        "sizes": explanation.sizes,
        "collectives": [asdict(entry) for entry in figures.collectives],
        "parameters": [asdict(entry) for entry in figures.parameters],
        "estimates": [asdict(entry) for entry in figures.estimates],
        "memory": {
            function: {
                "plan": memory.ours,
                "tvm_plan": memory.upstream,
                "lower_bound": memory.least,
                "results": memory.results,
            }
            for function, memory in explanation.memory.items()
        },
        "decisions": [asdict(decision) for decision in explanation.report.decisions],
    }
    return json.dumps(content, indent=2)
