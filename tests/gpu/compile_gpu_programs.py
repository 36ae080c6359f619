# SPDX-License-Identifier: Apache-2.0
"""Compiles the programs of the kit, on a machine that needs no GPU and no CUDA toolkit.

    python tests/gpu/compile_gpu_programs.py [--only-steps] FOLDER [cpu] [sm_90] ...

With `--only-steps` there are only those that the benchmark compares with. It wants the extra
`dev`. TVM compiles for GPUs only where its library for them is loaded, and that wants NVIDIA's
driver; where there is none, an empty library takes its place.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.gpu import gpu_programs as programs

#: What TVM's library for GPUs takes from the driver.
_DRIVER = (
    *("cuDeviceGetName", "cuFuncSetAttribute", "cuGetErrorName", "cuGetErrorString"),
    *("cuLaunchKernelEx", "cuModuleGetFunction", "cuModuleLoadData", "cuModuleUnload"),
    "cuTensorMapEncodeTiled",
)


def stand_in_for_the_driver() -> None:
    """Load a libcuda.so.1 that has these names, and ends the process if one is called."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libcuda.so.1")
        code = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in _DRIVER)
        subprocess.run(
            [*("gcc", "-shared", "-fPIC", "-xc", "-"), "-Wl,-soname,libcuda.so.1", "-o", library],
            input=code,
            text=True,
            check=True,
        )
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def compiled(source: Any, name: str, graph: bool = False) -> Any:
    """What TVM and our pipeline make of a module for a target of the kit."""
    import tvm

    import tvm_ipc

    if name == "cpu":
        target = tvm.target.Target("llvm")
    else:
        target = tvm.target.Target({"kind": "cuda", "arch": name}, host={"kind": "llvm"})
    config = {"relax.backend.use_cuda_graph": graph}
    with target, tvm.transform.PassContext(opt_level=3, config=config):
        pipeline = tvm_ipc.get_pipeline(target, world_size=programs.RANKS, blas=False)
        made = tvm.compile(source, target=target, relax_pipeline=pipeline)
    if name != "cpu" and "cuda" not in kinds(made.mod):
        raise RuntimeError("TVM left the kernels out: its library for GPUs is missing")
    return made


def kinds(module: Any) -> set[str]:
    """The kinds of a module and of all that it imports."""
    return {module.kind}.union(*(kinds(one) for one in module.imports))


def main(folder: Path, targets: list[str], only_steps: bool) -> None:
    """Write `<program>.<target>.so` for each of them."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        stand_in_for_the_driver()
    folder.mkdir(parents=True, exist_ok=True)
    for target in targets:
        made = {
            one.name: compiled(programs.source(one.name), target, one.graph)
            for one in programs.PROGRAMS.values()
            if not only_steps and (target != "cpu" or not one.graph)
        }
        if target != "cpu":
            made[programs.STEPS] = compiled(programs.steps(), target)
        for name, program in made.items():
            program.export_library(str(folder / f"{name}.{target}.so"))


if __name__ == "__main__":
    arguments = sys.argv[1:]
    flag = "--only-steps" in arguments
    chosen = [one for one in arguments if one != "--only-steps"]
    main(Path(chosen[0]), chosen[1:] or list(programs.TARGETS), flag)
