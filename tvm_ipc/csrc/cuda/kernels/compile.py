# SPDX-License-Identifier: Apache-2.0
"""Compile the CUDA kernels during the build, with NVRTC from the wheel nvidia-cuda-nvrtc.

``python compile.py SOURCE.cu TARGET IMAGE``: TARGET is ``sm_NN`` (machine code) or ``compute_NN``
(PTX). This needs no CUDA toolkit, no CUDA header and no GPU. It fails if a kernel uses local
memory: that is far slower than registers, and nobody would notice.
"""

from __future__ import annotations

import ctypes
import importlib.util
import struct
import sys
import time
from pathlib import Path

#: The CUDA version of apache-tvm's wheel and of the driver that it needs. The driver may reject
#: code from a later version.
VERSION = (13, 0)
#: The folder that include paths such as ``cuda/kernels/...`` start from.
CSRC = Path(__file__).parents[2]
OPTIONS = (
    "--std=c++17",
    f"--include-path={CSRC}",
    # Give the same bits as the CPU's reductions: no fused operations, and division, square roots
    # and subnormal numbers as in IEEE 754.
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ftz=false",
    "--device-as-default-execution-space",
)
#: Attributes of functions in the section .nv.info of a cubin.
FRAME_SIZE, MIN_STACK_SIZE = 0x11, 0x12


class CompileError(Exception):
    """An error to report to the user who builds."""


def find_nvrtc() -> Path:
    """Return the path of NVRTC; raise if it is not installed or has another version."""
    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        for path in sorted(Path(folder).glob(f"cu{VERSION[0]}/lib/libnvrtc.so.{VERSION[0]}")):
            found = version(ctypes.CDLL(str(path)))
            if found != VERSION:
                raise CompileError(f"{path} is NVRTC {found[0]}.{found[1]}, not 13.0")
            return path
    raise CompileError("the wheel nvidia-cuda-nvrtc is not installed")


def version(nvrtc: ctypes.CDLL) -> tuple[int, int]:
    """Return the version of a loaded library."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


class Program:
    """A source file that NVRTC compiles."""

    def __init__(self, nvrtc: ctypes.CDLL, source: Path) -> None:
        self.nvrtc = nvrtc
        self.handle = ctypes.c_void_p()
        text, name = source.read_bytes(), str(source).encode()
        self.call("nvrtcCreateProgram", ctypes.byref(self.handle), text, name, 0, None, None)

    def call(self, function: str, *args: object) -> None:
        """Call a function of NVRTC; raise an error with its message and the compiler's log."""
        status = getattr(self.nvrtc, function)(*args)
        if status != 0:
            self.nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            said = self.nvrtc.nvrtcGetErrorString(status).decode()
            raise CompileError(f"{function}: {said}\n{self.log()}")

    def log(self) -> str:
        """Return the compiler's log."""
        size = ctypes.c_size_t()
        if not self.handle or self.nvrtc.nvrtcGetProgramLogSize(self.handle, ctypes.byref(size)):
            return ""
        text = ctypes.create_string_buffer(size.value)
        self.nvrtc.nvrtcGetProgramLog(self.handle, text)
        return text.value.decode()

    def compile(self, options: tuple[str, ...]) -> None:
        """Compile the source."""
        strings = [option.encode() for option in options]
        array = (ctypes.c_char_p * len(strings))(*strings)
        self.call("nvrtcCompileProgram", self.handle, len(strings), array)

    def get(self, what: str) -> bytes:
        """Return the image, ``CUBIN`` or ``PTX``; PTX ends in a NUL."""
        size = ctypes.c_size_t()
        self.call(f"nvrtcGet{what}Size", self.handle, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        self.call(f"nvrtcGet{what}", self.handle, image)
        return image.raw


def compiled(source: Path, target: str) -> bytes:
    """Return the image of a source for a target."""
    path = find_nvrtc()
    # NVRTC loads this library by its name alone, and finds it if it is already loaded.
    builtins = ".".join(map(str, VERSION))
    ctypes.CDLL(str(path.with_name(f"libnvrtc-builtins.so.{builtins}")))
    nvrtc = ctypes.CDLL(str(path))
    program = Program(nvrtc, source)
    program.compile((*OPTIONS, f"--gpu-architecture={target}"))
    if warnings := program.log().strip():
        raise CompileError(f"{source.name} for {target}:\n{warnings}")
    image = program.get("CUBIN" if target.startswith("sm_") else "PTX")
    found = frames(image)
    if any(found.values()):
        names = ", ".join(f"{name} ({size} bytes)" for name, size in found.items() if size)
        raise CompileError(f"{source.name} for {target}: kept in memory of threads: {names}")
    return image


def frames(image: bytes) -> dict[str, int]:
    """Return how many bytes of local memory a thread of each function uses."""
    if not image.startswith(b"\x7fELF"):
        return {"": image.count(b"\t.local ")}
    sections = elf_sections(image)
    symbols, names = sections[".symtab"], sections[".strtab"]
    found: dict[str, int] = {}
    info, at = sections[".nv.info"], 0
    while at < len(info):
        form, attribute, size = struct.unpack_from("<BBH", info, at)
        # Form 4 is followed by `size` bytes; the others have their value in place of the size.
        if form == 4 and attribute in (FRAME_SIZE, MIN_STACK_SIZE):
            symbol, frame = struct.unpack_from("<II", info, at + 4)
            (offset,) = struct.unpack_from("<I", symbols, 24 * symbol)
            name = names[offset : names.index(b"\0", offset)].decode()
            found[name] = max(found.get(name, 0), frame)
        at += 4 + (size if form == 4 else 0)
    return found


def elf_sections(image: bytes) -> dict[str, bytes]:
    """Return the bytes of each section of an ELF file, by name."""
    (start,) = struct.unpack_from("<Q", image, 40)
    size, count, names_at = struct.unpack_from("<HHH", image, 58)
    headers = [struct.unpack_from("<IIQQQQ", image, start + i * size) for i in range(count)]
    nothing = 8  # the type of a section without bytes in the file
    names = image[headers[names_at][4] :]
    return {
        names[name : names.index(b"\0", name)].decode(): image[offset : offset + length]
        for name, kind, _, _, offset, length in headers
        if kind != nothing
    }


def main(source: str, target: str, image: str) -> None:
    """Write the image of a source for a target into a file."""
    started = time.perf_counter()
    try:
        made = compiled(Path(source), target)
    except CompileError as error:
        sys.exit(f"compile.py: {error}")
    Path(image).write_bytes(made)
    seconds = time.perf_counter() - started
    print(f"{Path(source).name} for {target}: {len(made)} bytes in {seconds:.1f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
