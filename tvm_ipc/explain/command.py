# SPDX-License-Identifier: Apache-2.0
"""The command line of `tvm-ipc explain`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

from tvm_ipc import terminal
from tvm_ipc.contract import MAX_SHOWN, MAX_WORKERS, AllReduceStrategy
from tvm_ipc.errors import IPCError, TransformError

if TYPE_CHECKING:  # loads TVM, which `--help` need not wait for
    import tvm

#: What `--target cuda` means, on a machine without a GPU too.
_CUDA: Final = '{"kind": "cuda", "arch": "sm_90"}'
_STRATEGIES: Final = [strategy.name.lower() for strategy in AllReduceStrategy]


class UsageError(Exception):
    """What was asked for cannot be done; the message says why."""


@dataclass(frozen=True)
class Options:
    """What to explain, and where to write it."""

    module: Path | None
    name: str | None = None
    output: Path | None = None  #: None: the terminal only
    text: bool = False
    target: str = "llvm"
    world_size: int = 2
    strategy: str = "auto"
    barrier_budget: int | None = None
    sequence_parallel: bool = False
    post_collectives: bool = False
    overlap: int | Path | None = None  #: a number of chunks, or the file of a calibration
    sizes: dict[str, int] = field(default_factory=dict)
    traceback: bool = False

    @property
    def to_stdout(self) -> bool:
        """Whether the page goes to the standard output."""
        return self.output == Path("-")


def main(argv: Sequence[str], demo: Callable[[int, bool, str], tvm.IRModule]) -> int:
    """Explain a module and return the exit code; `demo(workers, ...)` is that of `--demo`."""
    options = None
    try:
        options = parse(argv)
        return _run(options, demo)
    except (UsageError, TransformError) as error:
        terminal.stop_if_interrupted()  # TVM makes other errors of it
        if options is not None and options.traceback:
            raise
        lines = str(error).splitlines() or [type(error).__name__]
        terminal.complain("\n".join([f"tvm-ipc explain: {lines[0]}", *lines[1:]]))
        return 2


def parse(argv: Sequence[str]) -> Options:
    """Read the command line; `--help` prints and exits."""
    given = _parser().parse_args(argv)
    if given.demo == (given.module is not None):
        raise UsageError("give one of a module's file and --demo (see tvm-ipc explain --help)")
    if given.demo and given.module_name is not None:
        raise UsageError("--module chooses one of a file's modules, and --demo has no file")
    if given.sequence_parallel and not given.demo:
        raise UsageError(
            "--sequence-parallel is of the model of --demo; a file has its own program"
        )
    if not 1 <= given.world_size <= MAX_WORKERS:
        raise UsageError(f"--world-size is {given.world_size}; it must be 1 to {MAX_WORKERS}")
    if given.barrier_budget is not None and given.barrier_budget < 0:
        raise UsageError(f"--barrier-budget is {given.barrier_budget}; it is a number of bytes")
    module = None if given.demo else Path(given.module)
    output = Path(given.output) if given.output is not None else None
    if output is None and not given.text:
        output = Path(f"explain-{module.stem if module is not None else 'demo'}.html")
    if given.text and output == Path("-"):
        raise UsageError("--text and --output - would both write to the standard output")
    return Options(
        module=module,
        name=given.module_name,
        output=output,
        text=given.text,
        target=_CUDA if given.target == "cuda" else given.target,
        world_size=given.world_size,
        strategy=given.strategy,
        barrier_budget=given.barrier_budget,
        sequence_parallel=given.sequence_parallel,
        post_collectives=given.post_collectives,
        overlap=_overlap(given.overlap),
        sizes=dict(_size(text) for text in given.size),
        traceback=given.traceback,
    )


def _run(options: Options, demo: Callable[[int, bool, str], tvm.IRModule]) -> int:
    terminal.load_tvm()
    import tvm

    from tvm_ipc.explain import page, text
    from tvm_ipc.explain.load import last_line
    from tvm_ipc.inspection.explanation import Question, explain

    source = options.module.name if options.module is not None else "the demo's decoder"
    question = Question(source, options.target, options.world_size, options.strategy, options.sizes)
    try:
        kind = tvm.target.Target(options.target).kind.name
    except Exception as error:  # of many kinds
        raise UsageError(f"--target is {options.target!r}: {last_line(error)}") from error
    terminal.progress(f"loading {source}")
    mod = _module(options, demo, "cuda" if kind == "cuda" else "cpu")
    pipeline = {
        "barrier_budget": options.barrier_budget,
        "post_collectives": options.post_collectives,
        "overlap": _calibration(options),
    }
    try:
        if options.sizes:
            _check_sizes(mod, options.sizes)
        explanation = explain(mod, question, progress=terminal.progress, **pipeline)
    except (TransformError, UsageError):
        raise
    except Exception as error:  # of many kinds
        if str(error).startswith("get_pipeline: "):
            raise UsageError(str(error)) from error
        raise UsageError(
            f"TVM cannot lower {source} for {options.target}: {last_line(error)} "
            "(more with --traceback)"
        ) from error
    if options.text:
        terminal.say(text.render(explanation, plain=not terminal.can_say(text.CHARACTERS)))
    if options.output is None:
        return 0
    # A file's name may have bytes that are no text.
    html = page.render(explanation).encode("utf-8", "xmlcharrefreplace")
    if options.to_stdout:
        terminal.say_bytes(html)
        return 0
    try:
        options.output.write_bytes(html)
    except OSError as error:
        raise UsageError(f"cannot write {options.output}: {error.strerror}") from error
    terminal.say(f"written: {options.output}")
    return 0


def _module(
    options: Options, demo: Callable[[int, bool, str], tvm.IRModule], device: str
) -> tvm.IRModule:
    if options.module is not None:
        from tvm_ipc.explain.load import LoadError, load_module

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

    functions = [one for _, one in mod.functions_items() if isinstance(one, relax.Function)]
    known = {
        str(var.name) for one in functions for var in relax.analysis.defined_symbolic_vars(one)
    }
    for name in sizes:
        if name not in known:
            raise UsageError(
                f"--size is '{name}={sizes[name]}'; the module's symbolic sizes are "
                f"{', '.join(sorted(known)) or 'none'}"
            )


def _overlap(text: str | None) -> int | Path | None:
    if text is None or not text.isdecimal():
        return None if text is None else Path(text)
    if not 1 <= int(text) <= MAX_SHOWN:
        raise UsageError(f"--overlap is {text}; it must be 1 to {MAX_SHOWN} chunks, or a file")
    return int(text)


def _calibration(options: Options) -> Any:
    """Return what the pipeline is told of overlap."""
    if not isinstance(options.overlap, Path):
        return options.overlap
    from tvm_ipc.calibration import Calibration

    try:
        return Calibration.load(options.overlap, workers=options.world_size, any_machine=True)
    except IPCError as error:
        raise UsageError(f"--overlap {options.overlap}: {error}") from error


def _size(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not name.isidentifier() or not value.isdecimal():
        raise UsageError(f"--size is {text!r}; it must be like n=64")
    return name, int(value)


class _Parser(terminal.Parser):
    def error(self, message: str) -> NoReturn:
        """Raise instead of printing all options and exiting."""
        raise UsageError(f"{message} (see tvm-ipc explain --help)")


def _parser() -> argparse.ArgumentParser:
    default = Options(module=None)
    parser = _Parser(
        "tvm-ipc explain",
        description="Send a module through the pipeline, and show its memory plan over time, "
        "which communication goes on beside which computation, what was decided about each "
        "collective and why, and what TVM's own plan would take. Nothing of the module is run on "
        "workers.",
        epilog="A .py file is run as a Python program: explain only what you trust. "
        "Exit code: 0 done, 1 a failure, 2 wrong options, or a module that was refused.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "module",
        nargs="?",
        help="a file with what tvm.ir.save_json(mod) or, if it ends in .py, mod.script() returned",
    )
    parser.add_argument("--demo", action="store_true", help="explain the model of tvm-ipc demo")
    parser.add_argument(
        "--module",
        dest="module_name",
        metavar="NAME",
        help="which module of a .py file that defines several",
    )
    parser.add_argument(
        "--output",
        "-o",
        metavar="FILE",
        help="the page to write, - for the standard output (default explain-MODULE.html)",
    )
    parser.add_argument(
        "--text",
        action="store_true",
        help="show it in the terminal; a page is then written only with --output",
    )
    parser.add_argument(
        "--target",
        default=default.target,
        help="llvm, c or cuda, which is for sm_90; with options as JSON: "
        '{"kind": "llvm", "mcpu": ...} (default llvm)',
    )
    parser.add_argument(
        "--world-size",
        type=int,
        default=default.world_size,
        metavar="N",
        help=f"how many workers will run the module, 1 to {MAX_WORKERS} (default 2)",
    )
    parser.add_argument(
        "--strategy",
        choices=_STRATEGIES,
        default=default.strategy,
        help="of the all-reduces (default auto)",
    )
    parser.add_argument(
        "--barrier-budget",
        type=int,
        metavar="BYTES",
        help="memory that leaving out exit barriers may cost (default as in the pipeline)",
    )
    parser.add_argument(
        "--sequence-parallel",
        action="store_true",
        help="of --demo: workers divide the rows of the prompt, as in tvm-ipc demo",
    )
    parser.add_argument(
        "--post-collectives",
        action="store_true",
        help="collectives go on beside what does not need them, in a thread of each worker",
    )
    parser.add_argument(
        "--overlap",
        metavar="N|FILE",
        help="matrix products go on beside communication: in N chunks, or where the calibration "
        "in a file says that it pays",
    )
    parser.add_argument(
        "--size",
        action="append",
        default=[],
        metavar="NAME=N",
        help="what a symbolic size counts as; else its upper bound, or 128",
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error came from")
    return parser
