# SPDX-License-Identifier: Apache-2.0
"""A controller on the first of two nodes, whose module and weights the other one does not have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm.script import ir as I
from tvm.script import relax as R

import tvm_ipc
from tvm_ipc.comm import Mesh, Shard
from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses
from tvm_ipc.spmd import ShardSpec

#: Each node has one of its own.
FOLDER = Path("/dev/shm")


@I.ir_module
class Sum:
    @R.function
    def main(x: R.Tensor((1000,), "float32")) -> R.Tensor((1000,), "float32"):
        with R.dataflow():
            total = R.ccl.allreduce(x, "sum", False)
            R.output(total)
        return total


def main(places: NodeAddresses) -> None:
    library = FOLDER / "sum.so"
    pipeline = tvm_ipc.get_pipeline(tvm.target.Target("llvm"), world_size=2)
    tvm.compile(Sum, target="llvm", relax_pipeline=pipeline).export_library(str(library))
    with tvm_ipc.Session(2, hosts=places, timeout=60) as session:
        module = session.load_vm_module(library)
        x = session.scatter(np.arange(2000, dtype="float32").reshape(2, 1000))
        total = module["main"](x)
        for rank in (0, 1):
            assert (session.get(total, rank) == np.arange(1000, 3000, 2)).all()
        rows = np.random.default_rng(1).random((2, 1 << 20), "float32")
        assert (session.get(session.put(rows), 1) == rows).all()
        check_weights(session, rows)
    library.unlink()


def check_weights(session: tvm_ipc.Session, numbers: np.ndarray[Any, Any]) -> None:
    """Rows are divided, of a file that the first node alone has."""
    file = FOLDER / "model.safetensors"
    of_w = {"dtype": "F32", "shape": numbers.shape[::-1], "data_offsets": [0, numbers.nbytes]}
    header = json.dumps({"w": of_w}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + numbers.tobytes())
    shape = tuple(of_w["shape"])
    cut = ShardSpec("w", "w", shape, "float32", Mesh({"tp": 2}), (Shard(0),))
    weights = tvm_ipc.load_weights(session, file, {"w": cut})
    for rank in (0, 1):
        assert (session.get(weights["w"], rank) == cut.shard(numbers.reshape(shape), rank)).all()
    file.unlink()


if __name__ == "__main__":
    main(
        NodeAddresses(
            **{**json.loads(sys.argv[1]), "shell": Path(json.loads(sys.argv[1])["shell"])}
        )
    )
