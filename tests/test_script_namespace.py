# SPDX-License-Identifier: Apache-2.0
"""`R.comm` is there in TVMScript without an import of `tvm_ipc.comm`, in any order of imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
@I.ir_module
class Sum:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        y = R.comm.allreduce(x, "sum")
        return y

assert "R.comm.collective" in Sum.script()
import tvm_ipc.comm
assert R.comm is tvm_ipc.comm
print("works")
"""
SCRIPT = "from tvm.script import ir as I\nfrom tvm.script import relax as R\n"


@pytest.mark.parametrize(
    "imports",
    [
        "import tvm_ipc\n" + SCRIPT,
        "import tvm\n" + SCRIPT,
        SCRIPT + "import tvm_ipc\n",
        "import tvm_ipc.comm\n" + SCRIPT,
    ],
    ids=["tvm_ipc first", "tvm alone", "script first", "comm first"],
)
def test_r_comm_is_there(imports: str, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(imports + PROGRAM)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True)
    assert done.stdout == "works\n", done.stderr


def test_the_import_of_tvm_does_not_import_comm() -> None:
    code = "import tvm, sys; print('tvm_ipc.comm' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
