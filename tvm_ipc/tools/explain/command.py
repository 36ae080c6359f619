# SPDX-License-Identifier: Apache-2.0
"""Parse the options of `tvm-ipc explain`, and run the command."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tvm_ipc.errors import IPCError, TransformError
from tvm_ipc.packed_functions import MAX_EXPOSED, MAX_WORKERS, AllReduceStrategy
from tvm_ipc.tools import terminal

if TYPE_CHECKING:  # loads TVM, which `--help` need not wait for
    import tvm

    from tvm_ipc.tools.inspection.explain_decisions_and_memory import Explanation

#: The target of `--target cuda`, which works on machines without a GPU.
_CUDA: Final = '{"kind": "cuda", "arch": "sm_90"}'
_STRATEGIES: Final = [strategy.name.lower() for strategy in AllReduceStrategy]


class UsageError(Exception):
    """Raised for options or modules that cannot be explained, with the reason."""


@dataclass(frozen=True)
class Options:
    """The options of the command."""

    module: Path | None
    name: str | None = None
    output: Path | None = None  #: None: print to the terminal only
    text: bool = False
    json: bool = False
    open: bool = False  #: whether to open the page in a browser
    target: str = "llvm"
    world_size: int = 2
    strategy: str = "auto"
    barrier_budget: int | None = None
    sequence_parallel: bool = False
    async_collectives: bool = False
    overlap: int | Path | None = None  #: a number of chunks, or the file of a calibration
    sizes: dict[str, int] = field(default_factory=dict)
    traceback: bool = False

    @property
    def to_stdout(self) -> bool:
        """Return whether the page is written to the standard output."""
        return self.output == Path("-")


def main(argv: Sequence[str], demo: Callable[[int, bool, str], tvm.IRModule]) -> int:
    """Explain a module and return the exit code; `demo` builds the module of `--demo`."""
    options = None
    try:
        options = parse(argv)
        return _run(options, demo)
    except (UsageError, TransformError) as error:
        terminal.stop_if_interrupted()  # TVM turns a Ctrl-C into other errors
        if options is not None and options.traceback:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        terminal.print_err("\n".join([f"tvm-ipc explain: {lines[0]}", *lines[1:]]))
        return 2


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    arguments = _parser().parse_args(argv)
    if arguments.demo == (arguments.module is not None):
        raise UsageError(
            "specify either the file of a module or --demo (see tvm-ipc explain --help)"
        )
    if arguments.demo and arguments.module_name is not None:
        raise UsageError("--module selects a module of a file and conflicts with --demo")
    if arguments.sequence_parallel and not arguments.demo:
        raise UsageError(
            "--sequence-parallel needs --demo, because it changes how the demo's model is built"
        )
    if not 1 <= arguments.world_size <= MAX_WORKERS:
        raise UsageError(f"--world-size is {arguments.world_size}; it must be 1 to {MAX_WORKERS}")
    if arguments.barrier_budget is not None and arguments.barrier_budget < 0:
        raise UsageError(
            f"--barrier-budget is {arguments.barrier_budget}; it must be a number of bytes"
        )
    module = None if arguments.demo else Path(arguments.module)
    output = Path(arguments.output) if arguments.output is not None else None
    if output is None and (arguments.open or not (arguments.text or arguments.json)):
        output = Path(f"explain-{module.stem if module is not None else 'demo'}.html")
    to_stdout = [name for name in ("--text", "--json") if getattr(arguments, name.strip("-"))]
    to_stdout += ["--output -"] * (output == Path("-"))
    if len(to_stdout) > 1:
        raise UsageError(
            f"{' and '.join(to_stdout[:2])} both write to the standard output; specify a file"
            if "--output -" in to_stdout
            else "--text and --json both write to the standard output; specify one of them"
        )
    if arguments.open and output == Path("-"):
        raise UsageError("--open needs a file, and --output is the standard output")
    return Options(
        module=module,
        name=arguments.module_name,
        output=output,
        text=arguments.text,
        json=arguments.json,
        open=arguments.open,
        target=_CUDA if arguments.target == "cuda" else arguments.target,
        world_size=arguments.world_size,
        strategy=arguments.strategy,
        barrier_budget=arguments.barrier_budget,
        sequence_parallel=arguments.sequence_parallel,
        async_collectives=arguments.async_collectives,
        overlap=_parse_overlap(arguments.overlap),
        sizes=dict(_parse_size(text) for text in arguments.size),
        traceback=arguments.traceback,
    )


def _run(options: Options, demo: Callable[[int, bool, str], tvm.IRModule]) -> int:
    terminal.load_tvm()
    from tvm_ipc.pipeline import parse_target
    from tvm_ipc.tools.explain import html_page, text_report
    from tvm_ipc.tools.explain.load_module import last_line
    from tvm_ipc.tools.inspection.explain_decisions_and_memory import OptionError, Question, explain

    source = options.module.name if options.module is not None else "the demo's decoder"
    question = Question(source, options.target, options.world_size, options.strategy, options.sizes)
    try:
        kind = parse_target("--target", options.target).kind.name
    except ValueError as error:
        raise UsageError(last_line(error)) from error
    terminal.progress(f"loading {source}")
    mod = _module(options, demo, "cuda" if kind == "cuda" else "cpu")
    pipeline = {
        "barrier_budget": options.barrier_budget,
        "async_collectives": options.async_collectives,
        "overlap": _overlap_of_pipeline(options),
    }
    try:
        if options.sizes:
            _check_sizes(mod, options.sizes)
        explanation = explain(
            mod,
            question,
            unsharded=_unsharded(options, demo),
            progress=terminal.progress,
            **pipeline,
        )
    except (TransformError, UsageError):
        raise
    except OptionError as error:
        raise UsageError(str(error)) from None
    except Exception as error:  # TVM raises many types
        raise UsageError(
            f"TVM cannot lower {source} for {options.target}: {last_line(error)} "
            "(more with --traceback)"
        ) from error
    page = b""
    if options.output is not None:
        # A file name may contain bytes that cannot be decoded.
        page = html_page.render(explanation).encode("utf-8", "xmlcharrefreplace")
    if options.to_stdout:
        terminal.print_bytes(page)
        return 0
    if options.output is not None:
        try:
            options.output.write_bytes(page)
        except OSError as error:
            raise UsageError(f"cannot write {options.output}: {error.strerror}") from error
    if options.json:
        terminal.print_out(_json_text(explanation))
    elif options.text:
        plain = not terminal.can_print(text_report.CHARACTERS)
        terminal.print_out(text_report.render(explanation, plain=plain))
    else:
        terminal.print_out(text_report.summary(explanation))
    if options.output is not None:
        _report_page(options.output, options)
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


def _unsharded(
    options: Options, demo: Callable[[int, bool, str], tvm.IRModule]
) -> tvm.IRModule | None:
    """Return the demo's model for one worker; None for a module of a file."""
    return demo(1, False, "cpu") if options.module is None else None


def _module(
    options: Options, demo: Callable[[int, bool, str], tvm.IRModule], device: str
) -> tvm.IRModule:
    if options.module is not None:
        from tvm_ipc.tools.explain.load_module import LoadError, load_module

        try:
            return load_module(options.module, options.name)
        except LoadError as error:
            raise UsageError(str(error)) from error
    try:
        return demo(options.world_size, options.sequence_parallel, device)
    except ValueError as error:
        raise UsageError(f"--demo with --world-size {options.world_size}: {error}") from error


def _check_sizes(mod: tvm.IRModule, sizes: Mapping[str, int]) -> None:
    from tvm import relax

    functions = [f for _, f in mod.functions_items() if isinstance(f, relax.Function)]
    defined = {str(var.name) for f in functions for var in relax.analysis.defined_symbolic_vars(f)}
    for name in sizes:
        if name not in defined:
            raise UsageError(
                f"--size is '{name}={sizes[name]}', but the module's symbolic sizes are "
                f"{', '.join(sorted(defined)) or 'none'}"
            )


def _parse_overlap(text: str | None) -> int | Path | None:
    if text is None or not text.isdecimal():
        return None if text is None else Path(text)
    if not 1 <= int(text) <= MAX_EXPOSED:
        raise UsageError(f"--overlap is {text}; it must be 1 to {MAX_EXPOSED} chunks, or a file")
    return int(text)


def _overlap_of_pipeline(options: Options) -> Any:
    """Return the `overlap` option of the pipeline; a calibration is loaded from its file."""
    if not isinstance(options.overlap, Path):
        return options.overlap
    from tvm_ipc.calibration import Calibration

    try:
        return Calibration.load(options.overlap, workers=options.world_size, any_machine=True)
    except IPCError as error:
        raise UsageError(f"--overlap {options.overlap}: {error}") from error


def _parse_size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.isdecimal():
        raise UsageError(f"--size is {text!r}; it must have the form n=64")
    return name, int(value)


class _Parser(terminal.Parser):
    def error(self, message: str) -> NoReturn:
        """Raise a `UsageError` instead of exiting."""
        raise UsageError(f"{message} (see tvm-ipc explain --help)")


def _parser() -> argparse.ArgumentParser:
    default = Options(module=None)
    parser = _Parser(
        "tvm-ipc explain",
        description="Compile a module with the pipeline, print its headline figures (collectives, "
        "bytes, memory per worker), and write a page with its memory plan over time, "
        "the overlap of communication and computation, the decision about each collective with "
        "its reason, and a comparison with the memory plan of TVM. The module is not run.",
        epilog="A .py file is executed as a Python program, so explain only files that you trust. "
        "Exit code: 0 success, 1 failure, 2 invalid options or a module that cannot be compiled.",
        allow_abbrev=False,
    )
    source = parser.add_argument_group("module")
    source.add_argument(
        "module",
        nargs="?",
        help="file with the result of tvm.ir.save_json(mod), or .py file with the result of "
        "mod.script()",
    )
    source.add_argument("--demo", action="store_true", help="explain the model of tvm-ipc demo")
    source.add_argument(
        "--module",
        dest="module_name",
        metavar="NAME",
        help="name of the module in a .py file that defines several",
    )
    source.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N",
        help="value of a symbolic size in the report (default: its upper bound, or 128)",
    )
    _add_pipeline_options(parser.add_argument_group("pipeline"), default)
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="file of the HTML page, or - for the standard output (default: explain-MODULE.html)",
    )
    output.add_argument(
        "--text",
        action="store_true",
        help="print a text report; no page is written unless --output or --open is specified",
    )
    output.add_argument(
        "--json",
        action="store_true",
        help="print the figures, the memory plan and the decisions as JSON; no page is written "
        "unless --output or --open is specified",
    )
    output.add_argument("--open", action="store_true", help="open the page in a browser")
    output.add_argument("--traceback", action="store_true", help="print the traceback of an error")
    return parser


def _add_pipeline_options(group: argparse._ActionsContainer, default: Options) -> None:
    group.add_argument(
        "--target",
        default=default.target,
        help="TVM target: llvm, c, cuda (which means sm_90), or a JSON object such as "
        '{"kind": "llvm", "mcpu": ...} (default: llvm)',
    )
    group.add_argument(
        "--world-size",
        type=int,
        default=default.world_size,
        metavar="N",
        help=f"number of workers that the module is compiled for, 1 to {MAX_WORKERS} (default: 2)",
    )
    group.add_argument(
        "--strategy",
        choices=_STRATEGIES,
        default=default.strategy,
        help="algorithm of the all-reduces (default: auto)",
    )
    group.add_argument(
        "--barrier-budget",
        type=int,
        metavar="BYTES",
        help="memory that the planner may use to remove exit barriers (default: the pipeline's)",
    )
    group.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="with --demo: split the rows of the prompt over the workers, as tvm-ipc demo does",
    )
    group.add_argument(
        "--async-collectives",
        action="store_true",
        help="run collectives in a thread of each worker, concurrently with independent kernels",
    )
    group.add_argument(
        "--overlap",
        metavar="N|FILE",
        help="overlap matmuls with communication: in N chunks, or where the calibration in a file "
        "predicts a gain",
    )


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
