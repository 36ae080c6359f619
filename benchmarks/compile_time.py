# SPDX-License-Identifier: Apache-2.0
"""How much of the time of compiling a module our passes take, and how that grows.

    python benchmarks/compile_time.py [--layers 20 80 320] [--shapes WORD] [--json results.json]
    python benchmarks/compile_time.py --ifs 10 100

The processor time of `get_pipeline`, pass by pass, next to that of TVM's default pipeline for the
same module, which has neither IPC memory nor our plan. Code generation comes after both and is left
out. All numbers are medians of rounds, in each of which everything is measured once, and so are the
ratios: other work on the machine slows down both sides of each.

The first module is a decoder. `OffloadBLAS` is shown there and not counted as ours: what it takes,
TVM's passes save on kernels that are not made. So the pipeline is also run without it. The others
are those of `shapes.py`, each at a size and at four times that. The power of growth is that of our
passes together; TVM's own passes are quadratic in some shapes, and their power is shown, too.

`LegalizeOps` is not counted as ours either: it takes the place of TVM's, and less time. So our
passes are compared with what TVM's own take in TVM's pipeline, and not with the rest of ours.

`--ifs` measures functions with so many ifs instead, by what is in their branches: the less there is
to compile in them for TVM, the more of the time is ours.

The exit code is 1 where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from functools import partial
from math import log
from pathlib import Path
from statistics import median

import zoo
from pass_times import OURS, Passes, medians, ours, pipeline, upstream
from report import layout, machine
from shapes import IFS, SHAPES, Shape

from tvm_ipc.examples.tensor_parallel_decoder.decoder_config import Config

#: Most time that our passes may add to TVM's pipeline for a decoder. What they take themselves is
#: shown as their share; part of it is saved later, where a plan of one storage leaves less to do.
MORE = 0.10
#: Linear is a power of 1; memory that no longer fits a cache adds to it, for TVM's passes too.
POWER = 1.2
#: Most that our passes may take together, whatever the shape: as much as TVM's pipeline.
AGAINST_UPSTREAM = 1.0


@dataclass(frozen=True)
class Times:
    """Seconds of compilations of a decoder."""

    layers: int
    upstream: float
    whole: float
    without_blas: float
    more: float  #: against TVM's pipeline
    more_without_blas: float
    passes: Passes  #: time of their own

    @property
    def share(self) -> float:
        return ours(self.passes) / self.whole


@dataclass(frozen=True)
class Growth:
    """What compiling a shape takes at its two sizes."""

    name: str
    sizes: tuple[int, int]
    upstream: float  #: at the second
    whole: float
    ours: float
    against_upstream: float  #: of our passes together
    power: float  #: of our passes
    upstream_power: float  #: of TVM's pipeline


def measure(layers: int, rounds: int) -> Times:
    """Compile a decoder of so many layers with both pipelines."""
    config = Config(layers, 2048, 32, 8, 8192, 32000, context=2048, dtype="float16")
    theirs, whole, plain = [], [], []
    passes: list[Passes] = []
    for _ in range(rounds):
        theirs.append(upstream(lambda: zoo.decoder(config)))
        seconds, each = pipeline(lambda: zoo.decoder(config))
        whole.append(seconds)
        passes.append(each)
        plain.append(pipeline(lambda: zoo.decoder(config), blas=False)[0])
    more, more_plain = (
        median(one / other for one, other in zip(mine, theirs, strict=True)) - 1
        for mine in (whole, plain)
    )
    median_seconds = median(theirs), median(whole), median(plain)
    return Times(layers, *median_seconds, more, more_plain, medians(passes))


def grow(shape: Shape, rounds: int) -> Growth:
    """Compile a shape at both sizes."""
    few, many = shape.sizes
    found: list[tuple[float, ...]] = []
    steps = log(many / few)
    for _ in range(rounds):
        theirs = [upstream(partial(shape.build, size)) for size in shape.sizes]
        (_, first), (whole, last) = (
            pipeline(partial(shape.build, size), blas=False) for size in shape.sizes
        )
        mine = ours(last)
        power, upstream_power = log(mine / ours(first)) / steps, log(theirs[1] / theirs[0]) / steps
        found.append((theirs[1], whole, mine, mine / theirs[1], power, upstream_power))
    return Growth(shape.name, shape.sizes, *map(median, zip(*found, strict=True)))


def ifs_table(sizes: list[int], rounds: int) -> str:
    """Compile functions with ifs with both pipelines, by turns."""
    rows = [["branches", "ifs", "TVM's pipeline ms", "ours ms", "against TVM's"]]
    for name, build in IFS.items():
        for size in sizes:
            theirs, whole = [], []
            for _ in range(rounds):
                theirs.append(upstream(lambda: build(size)))  # noqa: B023
                whole.append(pipeline(lambda: build(size), blas=False)[0])  # noqa: B023
            ratio = median(one / other for one, other in zip(whole, theirs, strict=True))
            seconds = [f"{median(found) * 1e3:.0f}" for found in (theirs, whole)]
            rows.append([name, str(size), *seconds, f"{ratio:.2f}"])
    return layout(rows)


def pass_table(found: list[Times], at: Times) -> str:
    """Every pass that takes a thousandth at least, in the order of its time at `at`."""
    counts = [str(times.layers) for times in found]
    rows = [["pass", *(f"ms at {n}" for n in counts), *(f"us/layer at {n}" for n in counts), ""]]
    rows[0].insert(-1, f"share at {at.layers}")
    for name, seconds in sorted(at.passes.items(), key=lambda item: -item[1]):
        if seconds >= 0.001 * at.whole or name in OURS:
            every = [times.passes.get(name, 0.0) for times in found]
            rows.append(
                [
                    name,
                    *(f"{each * 1e3:.1f}" for each in every),
                    *(
                        f"{each * 1e6 / times.layers:.0f}"
                        for each, times in zip(every, found, strict=True)
                    ),
                    f"{seconds / at.whole:.1%}",
                    "ours" if name in OURS else "",
                ]
            )
    return layout(rows)


def layers_table(found: list[Times]) -> str:
    rows = [["layers", "TVM's pipeline ms", "ours ms", "against TVM's", "without BLAS ms"]]
    rows[0] += ["against TVM's", "our passes ms", "share", "ms a layer"]
    for times in found:
        mine = ours(times.passes)
        rows.append(
            [
                str(times.layers),
                f"{times.upstream * 1e3:.0f}",
                f"{times.whole * 1e3:.0f}",
                f"{times.more:+.1%}",
                f"{times.without_blas * 1e3:.0f}",
                f"{times.more_without_blas:+.1%}",
                f"{mine * 1e3:.1f}",
                f"{times.share:.1%}",
                f"{mine * 1e3 / times.layers:.3f}",
            ]
        )
    return layout(rows)


def shapes_table(found: list[Growth]) -> str:
    rows = [["shape", "sizes", "TVM's pipeline ms", "ours ms", "our passes ms"]]
    rows[0] += ["against TVM's pipeline", "power", "TVM's power"]
    for growth in found:
        rows.append(
            [
                growth.name,
                f"{growth.sizes[0]}, {growth.sizes[1]}",
                f"{growth.upstream * 1e3:.0f}",
                f"{growth.whole * 1e3:.0f}",
                f"{growth.ours * 1e3:.0f}",
                f"{growth.against_upstream:.1%}",
                f"{growth.power:.2f}",
                f"{growth.upstream_power:.2f}",
            ]
        )
    return layout(rows)


def goals(found: list[Times], at: Times, shapes: list[Growth]) -> dict[str, bool]:
    made = {}
    for what, more in (("", at.more), (" without the BLAS", at.more_without_blas)):
        text = f"the pipeline{what} takes {more:+.1%} of TVM's at {at.layers} layers"
        made[f"{text}, at most {MORE:+.0%}"] = more <= MORE
    if len(found) > 1:
        first, last = found[0], found[-1]
        power = log(ours(last.passes) / ours(first.passes)) / log(last.layers / first.layers)
        text = f"our passes grow with layers to the power of {power:.2f}, at most {POWER}"
        made[text] = power <= POWER
    for growth in shapes:
        text = f"{growth.name}: our passes grow to the power of {growth.power:.2f}, at most {POWER}"
        made[text] = growth.power <= POWER
        text = f"{growth.name}: our passes take {growth.against_upstream:.0%} of TVM's pipeline"
        made[f"{text}, at most {AGAINST_UPSTREAM:.0%}"] = (
            growth.against_upstream <= AGAINST_UPSTREAM
        )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[20, 80, 320])
    parser.add_argument("--shapes", default="", help="only shapes with this in their name")
    parser.add_argument("--ifs", type=int, nargs="+", help="only functions with so many ifs")
    parser.add_argument("--rounds", type=int, default=5, help="how often everything is measured")
    parser.add_argument("--json", type=Path, help="write everything there, too")
    options = parser.parse_args()
    measure(1, 1)  # what is loaded and registered at first use
    if options.ifs:
        print(ifs_table(options.ifs, options.rounds))
        return 0
    found = [measure(layers, options.rounds) for layers in sorted(set(options.layers))]
    at = next((times for times in found if times.layers >= 80), found[-1])
    print(f"\na decoder of {at.layers} layers, prefill and decode, pass by pass\n")
    print(pass_table(found, at))
    print(f"\n{layers_table(found)}")
    shapes = [grow(shape, options.rounds) for shape in SHAPES if options.shapes in shape.name]
    print("\nother shapes, without the BLAS; times at the larger size\n")
    print(f"{shapes_table(shapes)}\n")
    held = goals(found, at, shapes)
    for goal, holds in held.items():
        print(f"{'met' if holds else 'MISSED'}: {goal}")
    if options.json is not None:
        document = {
            "machine": machine(),
            "times": [
                {**vars(times), "ours": ours(times.passes), "share": times.share} for times in found
            ],
            "shapes": [vars(growth) for growth in shapes],
            "goals": held,
        }
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        print(f"written: {options.json}")
    return 0 if all(held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
