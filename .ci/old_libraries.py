# SPDX-License-Identifier: Apache-2.0
"""Libraries to link against, so that what is linked runs with older ones than this machine has.

A program asks for the newest version of each symbol that the libraries have which it was linked to,
and then runs with none that lacks it. Here each library of the system gets a stand-in without code,
which has, of each symbol, the newest version that a platform of wheels allows. What no version of a
symbol allows is not in them, and is an error of the linker, which names it.
"""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

#: Of the C library, until its version 2.34 moved what they had into libc.so.6.
MOVED = {"libdl.so.2": r"dl[a-z0-9_]+", "libpthread.so.0": r"pthread_\w+|sem_\w+"}
#: The names to link by of the libraries that every such platform has; and what loads them.
LIBRARIES = {
    "libc.so.6": "c",
    "libm.so.6": "m",
    "libstdc++.so.6": "stdc++",
    "libgcc_s.so.1": "gcc_s",
}
LOADER = {"x86_64": "ld-linux-x86-64.so.2", "aarch64": "ld-linux-aarch64.so.1"}
SYMBOL = re.compile(
    r" (?P<size>\w+) (?P<kind>FUNC|IFUNC|OBJECT) +(GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ "
    r"(?P<name>[^@ ]+)(?P<at>@@?)(?P<version>\S+)$"
)


@dataclass(frozen=True)
class Symbol:
    """What a library has under a name and a version."""

    name: str
    version: str
    is_data: bool
    size: int


def number(version: str) -> tuple[str, tuple[int, ...]]:
    """Of GLIBC_2.2.5: GLIBC and 2, 2, 5."""
    family, _, digits = version.partition("_")
    return family, tuple(int(part) for part in digits.split(".") if part.isdigit())


def symbols(library: Path) -> list[Symbol]:
    """Return the symbols that a library exports, in all their versions."""
    table = subprocess.run(
        ["readelf", "--wide", "--dyn-syms", str(library)],
        capture_output=True,
        text=True,
        check=True,
    )
    matches = [match for line in table.stdout.splitlines() if (match := SYMBOL.search(line))]
    linked = {match["name"] for match in matches if match["at"] == "@@"}
    return [
        Symbol(one["name"], one["version"], one["kind"] == "OBJECT", int(one["size"], 0))
        for one in matches
        if one["name"] in linked
    ]


def newest(found: list[Symbol], allowed: dict[str, list[str]]) -> dict[str, Symbol]:
    """Of each name the newest version among those that are allowed."""
    chosen: dict[str, Symbol] = {}
    for symbol in found:
        family, digits = number(symbol.version)
        if symbol.version.partition("_")[2] not in allowed.get(family, ()):
            continue
        before = chosen.get(symbol.name)
        if before is None or number(before.version)[1] < digits:
            chosen[symbol.name] = symbol
    return chosen


def write(folder: Path, name: str, link: str, has: list[Symbol], compiler: str) -> None:
    """Write a stub of a library under the name that programs link to."""
    code, versions = [".section .note.GNU-stack"], dict[str, list[str]]()
    for symbol in has:
        versions.setdefault(symbol.version, []).append(symbol.name)
        code += [
            ".data" if symbol.is_data else ".text",
            f".globl {symbol.name}",
            f".type {symbol.name}, %{'object' if symbol.is_data else 'function'}",
            f".size {symbol.name}, {max(symbol.size, 1)}",
            f"{symbol.name}: .skip {max(symbol.size, 1) if symbol.is_data else 4}",
        ]
    assembly, script = folder / f"{link}.s", folder / f"{link}.map"
    assembly.write_text("\n".join(code) + "\n")
    order = sorted(versions, key=number)
    script.write_text(
        "".join(f"{version} {{ {'; '.join(versions[version])}; }};\n" for version in order)
    )
    made = folder / f"lib{link}.so"
    command = [compiler, "-shared", "-nostdlib", f"-Wl,-soname,{name}"]
    command += [f"-Wl,--version-script={script}", "-o", str(made), str(assembly)]
    subprocess.run(command, check=True)


def make(folder: Path, compiler: str, policy: str, machine: str) -> None:
    """Make all of them in a folder; the policy is one of auditwheel's, such as manylinux_2_28."""
    from auditwheel import policy as of_auditwheel

    text = Path(of_auditwheel.__file__).with_name("manylinux-policy.json").read_text()
    (allowed,) = (
        one["symbol_versions"][machine] for one in json.loads(text) if one["name"] == policy
    )
    for name, link in {**LIBRARIES, LOADER[machine]: "loader"}.items():
        where = subprocess.run(
            [compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True
        ).stdout.strip()
        if not Path(where).is_absolute():
            raise SystemExit(f"{compiler} does not say where {name} is: is it a cross compiler?")
        found = symbols(Path(where))
        chosen = newest(found, allowed)
        apart: dict[str, list[Symbol]] = {}
        if link == "c":
            # What was elsewhere has a new version since it moved, which is not allowed.
            later = {one.name for one in found if one.name in chosen and one != chosen[one.name]}
            for library, pattern in MOVED.items():
                names = [one for one in later if re.fullmatch(pattern, one)]
                apart[library] = [chosen.pop(one) for one in sorted(names)]
        write(folder, name, link, list(chosen.values()), compiler)
        for library, has in apart.items():
            short = library.removeprefix("lib").split(".")[0]
            write(folder, library, short, has, compiler)
