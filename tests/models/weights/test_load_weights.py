# SPDX-License-Identifier: Apache-2.0
"""Every rank has its part of every weight, from whatever they are loaded."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tvm.contrib import tvmjs

import tvm_ipc
from tests.models.weights import weight_files
from tests.models.weights.weight_files import compare
from tvm_ipc.comm import Mesh, Replica, Shard
from tvm_ipc.errors import WeightsError
from tvm_ipc.models.weights import concat, stack
from tvm_ipc.spmd import ShardSpec

Arrays = Mapping[str, np.ndarray[Any, Any]]
SHAPES = ((), (0,), (1,), (7,), (2, 3), (5, 7), (33, 64), (3, 1, 4), (2, 3, 5, 2), (300, 700))


def arrays_of(*dtypes: str) -> dict[str, np.ndarray[Any, Any]]:
    draw = np.random.default_rng(0)
    return {
        f"layers.{k}.{dtype}": weight_files.random_array(draw, shape, dtype)
        for dtype in dtypes
        for k, shape in enumerate(SHAPES)
    }


FLOATS = arrays_of("float32", "float16", "bfloat16")
OTHERS = arrays_of("bool", "int8", "uint32", "int64", "float64", "float8_e4m3fn", "float8_e5m2")


@pytest.fixture(scope="module", params=[(1, True), (2, False), (3, True)], ids=str)
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    workers, threads = request.param
    with tvm_ipc.Session(workers, threads=threads, timeout=60) as opened:
        yield opened


def load(session: Any, source: Any, of: Arrays, cuts: Any = None, **options: Any) -> None:
    """Load weights, and compare the parts of each rank."""
    cuts = cuts or weight_files.cuts_of(of, session.num_workers)
    compare(session, tvm_ipc.load_weights(session, source, cuts, **options), cuts, of)


def load_as(session: Any, source: Any, of: Arrays, dtypes: Mapping[str, str]) -> None:
    load(session, source, of, weight_files.cuts_of(of, session.num_workers, **dtypes))


def sources(folder: Path, arrays: Arrays) -> tuple[Path, Arrays]:
    """A file of arrays, and the arrays."""
    return weight_files.write(folder / "model.safetensors", arrays), arrays


def test_a_file(session: Any, tmp_path: Path) -> None:
    arrays = {**FLOATS, **OTHERS}
    load(session, weight_files.write(tmp_path / "any_name.safetensors", arrays), arrays)


def test_a_folder(session: Any, tmp_path: Path) -> None:
    weight_files.write(tmp_path / "model.safetensors", FLOATS)
    load(session, str(tmp_path), FLOATS)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    load(session, tmp_path, FLOATS)


@pytest.mark.parametrize("links", [False, True])
def test_a_folder_with_an_index(session: Any, tmp_path: Path, links: bool) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    folder = weight_files.write_sharded(tmp_path / "snapshot", FLOATS, 3)
    if links:  # as the hub's cache has it
        for file in list(folder.glob("*.safetensors")):
            file.rename(tmp_path / "blobs" / file.name)
            file.symlink_to(f"../blobs/{file.name}")
    load(session, folder, FLOATS)
    load(session, folder / "model.safetensors.index.json", FLOATS)


@pytest.mark.parametrize("form", ["raw", "f32-to-bf16"])
@pytest.mark.parametrize("name", ["tensor-cache.json", "ndarray-cache.json"])
def test_what_tvm_wrote(session: Any, tmp_path: Path, form: str, name: str) -> None:
    arrays = {k: v for k, v in {**FLOATS, **OTHERS}.items() if v.size and "float8" not in k}
    arrays = {k: v for k, v in arrays.items() if form == "raw" or v.ndim}
    tvmjs.dump_tensor_cache(arrays, str(tmp_path), form, show_progress=False, shard_cap_mb=1)
    (tmp_path / "tensor-cache.json").rename(tmp_path / name)
    rounded = {
        k: v.astype("bfloat16") if form != "raw" and v.dtype == np.float32 else v
        for k, v in arrays.items()
    }
    load_as(session, tmp_path, rounded, {k: v.dtype.name for k, v in arrays.items()})
    assert len(list(tmp_path.glob("*.bin"))) > 1


def test_small_weights_are_in_large_pages(session: Any, tmp_path: Path) -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this system has no large pages")
    of = {f"w{k}": np.full((session.num_workers * 100, 1000), k, "float32") for k in range(40)}
    mesh = Mesh({"tp": session.num_workers})
    cuts = {k: ShardSpec(k, k, one.shape, "float32", mesh, (Shard(0),)) for k, one in of.items()}
    path = weight_files.write(tmp_path / "model.safetensors", of)
    session.import_python_module("tests.models.weights.weight_places")
    weights = tvm_ipc.load_weights(session, path, cuts)
    found = session.get_global_func("tests.in_large_pages")(*weights.values())
    for rank in range(session.num_workers):  # all but the last part of a large page
        assert found.debug_get_from_remote(rank) > 40 * 400_000 - (2 << 20)
    compare(session, weights, cuts, of)
    # Each of them keeps the memory that it is in.
    kept = weights["w17"]
    del weights
    session.sync()
    np.testing.assert_array_equal(session.get(kept, session.num_workers - 1), of["w17"][:100])


def test_a_mapping(session: Any) -> None:
    arrays = {**FLOATS, **OTHERS}
    load(session, arrays, arrays)
    strided = {"w": np.arange(70.0).reshape(7, 10)[::-1, ::3]}
    load(session, strided, strided)


FLOAT_NAMES = ("bfloat16", "float16", "float32", "float64")


@pytest.mark.parametrize("to", FLOAT_NAMES)
def test_floats_become_other_floats(session: Any, tmp_path: Path, to: str) -> None:
    arrays = arrays_of(*FLOAT_NAMES)
    for source in sources(tmp_path, arrays):
        load_as(session, source, arrays, dict.fromkeys(arrays, to))


def test_one_weight_in_two_types(session: Any, tmp_path: Path) -> None:
    arrays = {"w": np.arange(6, dtype="float32")}
    both = {"narrow": arrays["w"], "w": arrays["w"]}
    cuts = {
        name: ShardSpec(name, name, (6,), dtype, Mesh({"tp": session.num_workers}), (Replica(),))
        for name, dtype in (("narrow", "bfloat16"), ("w", "float32"))
    }
    for source in sources(tmp_path, arrays):
        load(session, source, both, cuts, names={"narrow": "w"})


def test_integers_become_wider_ones(session: Any, tmp_path: Path) -> None:
    arrays = arrays_of("int8", "uint32")
    path = weight_files.write(tmp_path / "model.safetensors", arrays)
    load_as(session, path, arrays, dict.fromkeys(arrays, "int64"))


def test_a_mesh_of_two_axes_and_its_other_order(session: Any, tmp_path: Path) -> None:
    workers = session.num_workers
    of = {"w": np.arange(77, dtype="float32").reshape(7, 11)}
    for axes, ranks in (({"dp": workers, "tp": 1}, None), ({"a": workers}, range(workers)[::-1])):
        mesh = Mesh(axes, ranks)
        placements = (Shard(1), Shard(0))[: len(axes)]
        cuts = {"w": ShardSpec("w", "w", (7, 11), "float32", mesh, placements)}
        for source in sources(tmp_path, of):
            load(session, source, of, cuts)


def test_names(session: Any, tmp_path: Path) -> None:
    table = np.arange(12, dtype="float32").reshape(3, 4)
    path = weight_files.write(tmp_path / "model.safetensors", {"model.table": table})
    both = {"inner.model.table": table, "inner.head": table}
    cuts = weight_files.cuts_of(both, session.num_workers)
    alike = dict.fromkeys(both, cuts["inner.head"])

    def name_of(name: str) -> str:
        return {"inner.head": "model.table"}.get(name, name.removeprefix("inner."))

    for names in ({"inner.model.table": "model.table", "inner.head": "model.table"}, name_of):
        for source in (path, {"model.table": table}):
            load(session, source, both, cuts, names=names)
            shared = tvm_ipc.load_weights(session, source, alike, names=names)
            assert shared["inner.head"] is shared["inner.model.table"], "it is loaded once"
    with pytest.raises(ValueError, match=r"there is no parameter 'inner\.heat'; .*'inner\.head'"):
        tvm_ipc.load_weights(session, path, cuts, names={"inner.heat": "model.table"})


def test_weights_that_are_one_parameter(session: Any, tmp_path: Path) -> None:
    """Stacked, one after the other, and both, in every type and divided along every axis."""
    draw = np.random.default_rng(5)
    arrays = {
        f"experts.{k}.{what}": weight_files.random_array(draw, (3, 4), "bfloat16")
        for k in range(5)
        for what in ("gate", "up")
    }
    arrays |= {f"vector.{k}": weight_files.random_array(draw, (k,), "bfloat16") for k in range(4)}
    arrays["number"] = weight_files.random_array(draw, (), "bfloat16")
    both = [concat([f"experts.{k}.gate", f"experts.{k}.up"]) for k in range(5)]
    names: dict[str, Any] = {
        "both.0": stack(both),
        "both.1": stack(both),
        "both.2": stack(both, axis=1),
        "both.3": stack(both),
        "last": stack([f"experts.{k}.up" for k in range(5)], axis=2),
        "beside": concat(["experts.0.up", stack(["vector.3"] * 4, axis=1)], axis=0),
        "vector": concat([f"vector.{k}" for k in range(4)]),
        "in_turn": concat([concat(["vector.1", "vector.2"]), concat(["vector.3", "vector.1"])]),
        "numbers": stack(["number", "number", "number"]),
    }

    def made(name: Any) -> np.ndarray[Any, Any]:
        if isinstance(name, str):
            return arrays[name]
        parts = [made(part) for part in name.parts]
        return np.stack(parts, name.axis) if name.new else np.concatenate(parts, name.axis)

    wanted = {name: made(called) for name, called in names.items()}
    for dtype in ("bfloat16", "float32"):
        cuts = weight_files.cuts_of(wanted, session.num_workers, **dict.fromkeys(wanted, dtype))
        for source in sources(tmp_path, arrays):
            load(session, source, wanted, cuts, names=names)


def test_weights_that_cannot_be_joined(session: Any) -> None:
    arrays = {"a": np.ones((2, 3)), "b": np.ones((2, 4)), "c": np.ones((2, 3), "float32")}
    cut = weight_files.cuts_of({"w": np.ones((2, 2, 3))}, session.num_workers)
    for name, said in {
        stack(
            ["a", "b"]
        ): r"'a' and 1 more, for 'w', cannot be fused: some are \(2, 3\), and others",
        concat(["a", "b"]): r"some are \(2, 3\), and others \(2, 4\)",
        concat(["a", "a"], axis=2): r"their shape is \(2, 3\), which has no axis 2",
        stack(["a", "c"]): r"some are float64, and others float32",
        concat(["a", "b"], axis=1): r"'w', has shape \(2, 7\); the program expects \(2, 2, 3\)",
        stack(["a", "d"]): r"'d', for 'w', is missing; no name is similar",
    }.items():
        with pytest.raises(WeightsError, match=said):
            tvm_ipc.load_weights(session, arrays, cut, names={"w": name})
    for wrong in ("a", [], 3, ["a", 3], {"a": 1}, [""]):
        for join in (stack, concat):
            with pytest.raises((TypeError, ValueError), match=f"^{join.__name__}: names"):
                join(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^stack: axis is the number of an axis, 0 or more, not"):
        stack(["a"], axis=-1)


def test_inputs_are_no_weights(session: Any) -> None:
    mesh = Mesh({"tp": session.num_workers})
    ids = ShardSpec("ids", "ids", (4,), "int64", mesh, (Shard(0),), is_input=True)
    w = ShardSpec("w", "w", (4,), "float32", mesh, (Shard(0),))
    weights = tvm_ipc.load_weights(session, {"w": np.ones(4)}, {"ids": ids, "w": w})
    assert list(weights) == ["w"]


def test_ranks_without_a_part(session: Any, tmp_path: Path) -> None:
    """Those of another stage of a pipeline."""
    whole = np.arange(6, dtype="float32")
    last = session.num_workers - 1
    cuts = {"w": ShardSpec("w", "w", (6,), "float32", Mesh({"tp": 1}, [last]), (Replica(),))}
    for source in sources(tmp_path, {"w": whole}):
        weight = tvm_ipc.load_weights(session, source, cuts)["w"]
        assert session.get(weight, last).tolist() == whole.tolist()
        if last:
            assert weight.debug_get_from_remote(0) is None


def test_all_that_is_wrong_is_said_at_once(session: Any, tmp_path: Path) -> None:
    arrays = {
        "model.norm.weight": np.ones(4, "float32"),
        "model.up.weight": np.ones((4, 6), "float32"),
        "model.ids": np.ones(3, "int64"),
        "model.table": np.ones((5, 4), "float32"),
        "rotary.inv_freq": np.ones(2, "float32"),
    }
    path = weight_files.write(tmp_path / "model.safetensors", arrays)
    wanted = {
        "norm.weight": np.ones(4, "float32"),
        "model.up.weight": np.ones((6, 4), "float32"),
        "model.ids": np.ones(3, "int32"),
        "model.table": np.ones((5, 4), "int8"),
        "head": np.ones((5, 4), "float32"),
    }
    cuts = weight_files.cuts_of(wanted, session.num_workers)
    for source, where in ((path, str(path)), (arrays, "the dict")):
        with pytest.raises(WeightsError) as raised:
            tvm_ipc.load_weights(session, source, cuts)
        assert str(raised.value).splitlines() == [
            f"load_weights: {where} does not match the program:",
            "  'norm.weight' is missing; a similar name is 'model.norm.weight'",
            "  'head' is missing; a tensor of its shape is 'model.table'",
            "  'model.norm.weight' is not the weight of any parameter",
            "  'rotary.inv_freq' is not the weight of any parameter",
            "  'model.up.weight' has shape (4, 6); the program expects (6, 4), its transpose",
            "  'model.ids' has type int64; the program expects int32, and the conversion would "
            "change values",
            "  'model.table' has type float32; the program expects int8, and the conversion would "
            "change values",
            *str(raised.value).splitlines()[-2:],
        ]
    right = {"model.table": wanted["head"]}
    for source in (path, arrays):
        load(session, source, right, ignore=["*.inv_freq", "model.[nu]*", "model.ids"])


def test_of_many_the_first_are_said(session: Any) -> None:
    arrays = {f"w{k}": np.ones(1) for k in range(30)}
    cuts = weight_files.cuts_of(arrays, session.num_workers)
    with pytest.raises(WeightsError, match="and 20 more are missing") as raised:
        tvm_ipc.load_weights(session, {f"v{k}": np.ones(1) for k in range(40)}, cuts)
    assert "and 30 more are not the weight of any parameter" in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1 + 11 + 11 + 2


def test_numbers_that_become_infinite_are_refused(session: Any, tmp_path: Path) -> None:
    arrays = {"w": np.array([1.0, 70000.0], "float32")}
    said = re.escape("load_weights: 'w': 70000.0 does not fit into float16")
    for source in sources(tmp_path, arrays):
        with pytest.raises((tvm_ipc.errors.WorkerError, WeightsError), match=said):
            load_as(session, source, arrays, {"w": "float16"})
        load(session, source, arrays)


def test_a_session_with_too_few_workers(session: Any) -> None:
    cuts = weight_files.cuts_of({"w": np.ones(4)}, session.num_workers + 1)
    with pytest.raises(ValueError, match=r"open it with \d"):
        tvm_ipc.load_weights(session, {"w": np.ones(4)}, cuts)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"source": {3: [1]}}, r"source, a name is a name, not 3"),
        ({"source": {"w": "text"}}, r"source, 'w' is an array of numbers, not 'text'"),
        ({"source": {"w": [[1], [1, 2]]}}, r"source, 'w' is an array of numbers, not \[\[1"),
        ({"source": {"w": None}}, r"source, 'w' is an array of numbers, not None"),
        ({"shards": {3: None}}, r"shards, a name is a name, not 3"),
        ({"shards": {"w": 3}}, r"shards, of 'w' is a ShardSpec, as in parallel\.shards, not 3"),
        ({"names": {"w": 3}}, r"names, of 'w' is a name, not 3"),
        ({"names": {3: "w"}}, r"names: there is no parameter 3"),
        ({"names": lambda _: None}, r"names, of 'w' is a name, not None"),
    ],
)
def test_wrong_arguments(session: Any, given: dict[str, Any], said: str) -> None:
    cuts = weight_files.cuts_of({"w": np.ones(4)}, session.num_workers)
    with pytest.raises((TypeError, ValueError), match=f"^load_weights: {said}"):
        tvm_ipc.load_weights(session, **{"source": {"w": np.ones(4)}, "shards": cuts, **given})


def test_progress_is_shown_on_a_terminal_alone_and_not_at_once(
    session: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = weight_files.write(tmp_path / "model.safetensors", FLOATS)
    cuts = weight_files.cuts_of(FLOATS, session.num_workers)
    name = list(cuts)[-1]
    cases = (True, True, 0.0), (False, True, 0.0), (True, False, 0.0), (True, True, 60.0)
    for progress, terminal, after in cases:
        reader, writer = pty.openpty() if terminal else os.pipe()
        with os.fdopen(writer, "w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            monkeypatch.setattr("tvm_ipc.runtime.terminal_progress_line._SOON", after)
            tvm_ipc.load_weights(session, path, cuts, progress=progress)
            monkeypatch.undo()
            shown = ""
            while select.select([reader], [], [], 0.2)[0]:  # a terminal passes on piece by piece
                shown += os.read(reader, 1 << 16).decode()
        os.close(reader)
        if progress and terminal and not after:
            assert f"] 100% loading {name}" in shown
            assert shown.endswith("\r\x1b[K"), "nothing of it is left"
        else:
            assert shown == ""


def test_beyond_4_gib_of_a_file(session: Any, tmp_path: Path) -> None:
    """Of a file of which most was never written, and takes no room."""
    size = (1 << 32) + 4096
    ends = {"begin": np.arange(9, dtype="float32"), "w": np.arange(6, dtype="float32")}
    header = {
        "begin": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]},
        "huge": {"dtype": "I8", "shape": [1 << 12, size >> 12], "data_offsets": [36, 36 + size]},
        "w": {"dtype": "F32", "shape": [6], "data_offsets": [36 + size, 60 + size]},
    }
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write(weight_files.with_header(json.dumps(header).encode(), ends["begin"].tobytes()))
        file.seek(size, os.SEEK_CUR)
        file.write(ends["w"].tobytes())
    load(session, path, ends, ignore=["huge"])
