# SPDX-License-Identifier: Apache-2.0
"""Compare the speeds of the demo's runs in a table that names the cores of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm_ipc.arguments import counted
from tvm_ipc.examples.tensor_parallel_decoder.generate import Generation
from tvm_ipc.nodes import cli_hosts
from tvm_ipc.this_machine import available_cores
from tvm_ipc.tools.demo.options import Options
from tvm_ipc.tools.format import table_lines


@dataclass(frozen=True)
class Row:
    """The speed of some workers, with a label that names their cores."""

    label: str
    generation: Generation


def label(options: Options, workers: int, cores: int | None = None) -> str:
    """Return the label of a row: how many workers there are, and on how many cores.

    `cores` defaults to one per worker; workers beyond the cores of this machine share them.
    """
    text = counted(workers, "worker")
    if options.on_gpus:
        return text
    hosts = options.hosts
    if hosts is not None and not isinstance(hosts, int) and workers >= cli_hosts.count(hosts):
        return f"{text} on {cli_hosts.count(hosts)} machines"
    return f"{text} on {counted(cores or min(workers, available_cores()), 'core')}"


def lines(options: Options, rows: Sequence[Row]) -> list[str]:
    """Return the lines of the table; the first row is the reference of the speedups."""
    first = rows[0].generation
    headers = ["prefill, tokens/s", "speedup"]
    if options.tokens > 1:
        headers += ["decode, tokens/s", "speedup"]
    table = []
    for row in rows:
        generation = row.generation
        cells = [
            f"{options.prompt_length / generation.prefill:.0f}",
            f"{first.prefill / generation.prefill:.2f}x",
        ]
        if options.tokens > 1:
            cells += [
                f"{(options.tokens - 1) / generation.decode:.0f}",
                f"{first.decode / generation.decode:.2f}x",
            ]
        table.append([row.label, *cells])
    return table_lines(headers, table)
