# SPDX-License-Identifier: Apache-2.0
"""What is damaged, or was made to do harm, is one line that says what is wrong where."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tests.models.weights import weight_files
from tests.models.weights.weight_files import with_header
from tvm_ipc.errors import WeightsError, WorkerError
from tvm_ipc.models.weights import safetensors_header
from tvm_ipc.models.weights.list_checkpoint_tensors import read_checkpoint

W = np.arange(12, dtype="float32").reshape(3, 4)
V = np.arange(5, dtype="int8")
ARRAYS = {"w": W, "v": V}
GOOD = weight_files.safetensors(ARRAYS)
#: Text of a header, for which `file` is the file and `w` its tensor.
HUGE = "9" * 5000


def entry(**changes: Any) -> bytes:
    return weight_files.safetensors(ARRAYS, w=changes)


def header(text: str) -> bytes:
    return with_header(text.encode(), bytes(W.tobytes()))


ONE = '"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]'
DAMAGED = {
    "empty": (b"", r"is not a safetensors file: it has 0 bytes"),
    "a text": (b"hello", r"is not a safetensors file: it has 5 bytes"),
    "a header of 10 GB": ((10**10).to_bytes(8, "little") + b"{}", r"would have 10000000000 bytes"),
    "the longest header": (b"\xff" * 8 + b"{}", r"would have 18446744073709551615 bytes"),
    "cut off in the header": (
        GOOD[:40],
        r"is truncated: its header has \d+ bytes, and the file 40",
    ),
    "cut off in the data": (GOOD[:-1], r"is truncated: its tensors end at byte \d+"),
    "longer": (GOOD + b"x", r"is damaged: 1 bytes follow its last tensor"),
    "no JSON": (header("{"), r"the header of .* is damaged: "),
    "no text": (with_header(b"\xff\xfe"), r"the header of .* is damaged: "),
    "a list": (header("[]"), r"it is not a JSON object"),
    "nested": (header("[" * 100000), r"nested too deeply|is damaged"),
    "a name twice": (header(f'{{"w": {{{ONE}}}, "w": {{{ONE}}}}}'), r"it has 'w' twice"),
    "a number": (header('{"w": 3}'), r"tensor 'w' is described by 3; expected an object with ex"),
    "no shape": (
        header('{"w": {"dtype": "F32", "data_offsets": [0, 48]}}'),
        r"expected an object with exactly dtype, shape and data_offsets",
    ),
    "a field more": (
        entry(more=1),
        r"expected an object with exactly dtype, shape and data_offsets",
    ),
    "an unknown type": (entry(dtype="F4"), r"tensor 'w' has the type 'F4'; supported .* BOOL, I8"),
    "a type that is a list": (entry(dtype=["F32"]), r"has the type \['F32'\]"),
    "a negative extent": (entry(shape=[-3, -4]), r"has the shape \[-3, -4\]"),
    "an extent of a fraction": (entry(shape=[3.0, 4]), r"has the shape \[3\.0, 4\]"),
    "an extent that is true": (entry(shape=[True, 12]), r"has the shape \[True, 12\]"),
    "an extent beyond 63 bits": (entry(shape=[1 << 63, 0]), r"has the shape "),
    "a shape that is too large": (entry(shape=[1 << 62] * 30), r"has 48 bytes; a tensor "),
    "many axes": (entry(shape=[1] * 1000), r"has the shape "),
    "a number of 5000 digits": (header(f'{{"w": {{{ONE[:-7]}[0, {HUGE}]}}}}'), r"is damaged"),
    "an offset": (entry(data_offsets=[0]), r"has the data_offsets \[0\]"),
    "offsets backwards": (entry(data_offsets=[48, 0]), r"has the data_offsets \[48, 0\]"),
    "negative offsets": (entry(data_offsets=[-48, 0]), r"has the data_offsets \[-48, 0\]"),
    "another size": (entry(data_offsets=[0, 47]), r"has 47 bytes; a tensor \(3, 4\) of F32 has 48"),
    "tensors that overlap": (entry(data_offsets=[4, 52]), r"'v' overlap|'w' and 'v'|bytes of no"),
    "tensors in one place": (
        weight_files.safetensors(ARRAYS, v={"data_offsets": [43, 48]})[:-5],
        r"is damaged: 'w' and 'v' overlap",
    ),
    "tensors beyond the end": (entry(data_offsets=[1000, 1048]), r"there are \d+ bytes of no ten"),
    "a gap": (entry(data_offsets=[5, 53], shape=[12]), r"bytes of no tensor|overlap"),
    "infinity": (header('{"w": Infinity}'), r"tensor 'w' is described by inf"),
    "half a character": (header('{"\\ud800": 3}'), r"tensor '\\ud800' is described by 3"),
}


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_file(what: str, tmp_path: Path) -> None:
    data, said = DAMAGED[what]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    for given in (path, tmp_path):
        with pytest.raises(WeightsError, match=said) as raised:
            read_checkpoint(given)
        text = str(raised.value)
        assert str(path) in text
        assert len(text.splitlines()) == 1
        assert len(text) < 600


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "model.safetensors").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "pickle").mkdir()
    (tmp_path / "pickle" / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        weight_files.write(tmp_path / "two" / f"{name}.safetensors", ARRAYS)
    (tmp_path / "loop.safetensors").symlink_to("loop.safetensors")
    for given, said in {
        "pipe.safetensors": r"is not a regular file",
        "": r"model\.safetensors is not a regular file",
        "empty": r"has no weights: there is no model\.safetensors",
        "pickle": r"may be a pickle, which can run any code",
        "pickle/pytorch_model.bin": r"may be a pickle",
        "pickle/none.bin": r"cannot be read: No such file",
        "two": r"has 2 files of weights, and none is model\.safetensors; pass .* a\.saf.*, b\.saf",
        "none": r"cannot be read: No such file or directory",
        "loop.safetensors": r"cannot be read: Too many levels",
    }.items():
        with pytest.raises(WeightsError, match=said):
            read_checkpoint(tmp_path / given)


def index(folder: Path, text: Any, name: str = "model.safetensors.index.json") -> None:
    weight_files.write(folder / "a.safetensors", ARRAYS)
    (folder / name).write_text(text if isinstance(text, str) else json.dumps(text))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", r"index\.json is damaged"),
        ([], r"is not a JSON object"),
        ({}, r"it has no weight_map"),
        ({"weight_map": 3}, r"it has no weight_map"),
        ({"weight_map": {"w": 3}}, r"3 is not a file name"),
        ({"weight_map": {"w": ""}}, r"'' is not a file name"),
        ({"weight_map": {"w": "a\0b"}}, r"is not a file name"),
        (
            {"weight_map": {"w": "../../etc/passwd"}},
            r"names '../../etc/passwd'; it may name only f",
        ),
        ({"weight_map": {"w": "/etc/passwd"}}, r"names '/etc/passwd'; it may name only files in i"),
        ({"weight_map": {"w": ".."}}, r"names '\.\.'; it may name only"),
        ({"weight_map": {"w": "."}}, r"names '\.'; it may name only"),
        ({"weight_map": {"w": "\ud800"}}, r"cannot be read"),
        ({"weight_map": {"w": "b.safetensors"}}, r"b\.safetensors cannot be read: No such file"),
        ({"weight_map": {"u": "a.safetensors"}}, r"a\.safetensors has no tensor 'u', which .*json"),
    ],
)
def test_a_damaged_index(text: Any, said: str, tmp_path: Path) -> None:
    index(tmp_path, text)
    with pytest.raises(WeightsError, match=said) as raised:
        read_checkpoint(tmp_path)
    assert len(str(raised.value).splitlines()) == 1


RECORD = {"name": "w", "shape": [3, 4], "dtype": "float32", "format": "raw", "nbytes": 48}
RECORD |= {"byteOffset": 0}


def shard(**changes: Any) -> dict[str, Any]:
    size = len(GOOD)
    file = {"dataPath": "a.safetensors", "format": "raw-shard", "nbytes": size}
    return {"records": [{**file, "records": [{**RECORD, **changes}]}]}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ({}, r"it has no list of records"),
        ({"records": [3]}, r"3 is not a record of a file"),
        ({"records": [{"records": [RECORD]}]}, r"None is not a file name"),
        ({"records": [{"dataPath": "../a", "records": []}]}, r"names '\.\./a'; it may name only"),
        (
            {"records": [{"dataPath": "a.safetensors", "nbytes": 1, "records": []}]},
            r"a\.safetensors has \d+ bytes; .* specifies 1",
        ),
        (shard(name=3), r"is not a record of a tensor"),
        (shard(dtype="object"), r"has the type 'object' and the format 'raw'; supported are"),
        (shard(dtype=">f4"), r"has the type '>f4'"),
        (shard(dtype="<f4, <f4"), r"has the type '<f4, <f4'"),
        (shard(dtype="S4"), r"has the type 'S4'"),
        (shard(dtype=None), r"has the type None"),
        (shard(format="zip"), r"the format 'zip'; supported are"),
        (shard(shape=[-3, -4]), r"has the shape \[-3, -4\]"),
        (shard(byteOffset=-1), r"the byteOffset -1"),
        (shard(byteOffset=1 << 40), r"ends at byte \d+ of .*a\.safetensors, which has"),
        (shard(nbytes=47), r"has 47 bytes; a tensor \(3, 4\) of float32 has 48"),
        (shard(format="f32-to-bf16"), r"has 48 bytes; a tensor \(3, 4\) of bfloat16 has 24"),
        ({"records": [*shard()["records"], *shard()["records"]]}, r"it has 'w' twice"),
    ],
)
def test_a_damaged_text_of_tvm(text: Any, said: str, tmp_path: Path) -> None:
    index(tmp_path, text, "tensor-cache.json")
    with pytest.raises(WeightsError, match=said) as raised:
        read_checkpoint(tmp_path / "tensor-cache.json")
    assert len(str(raised.value).splitlines()) == 1


def test_random_damage(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Whatever bytes are changed: either tensors that are in the file, or a WeightsError."""
    draw = random.Random(4)
    path = tmp_path / "model.safetensors"
    refused = 0
    rounds = 300 * request.config.getoption("--operator-rounds")
    for _ in range(rounds):
        data = bytearray(GOOD)
        for _ in range(draw.randint(1, 4)):
            place = draw.randrange(len(data) - 50)
            match draw.randrange(4):
                case 0:
                    data[place] = draw.randrange(256)
                case 1:
                    data[place : place + draw.randint(0, 9)] = draw.randbytes(draw.randint(0, 9))
                case 2:
                    data[place] = draw.choice(b'{}[],:"0123456789-.eE')
                case 3:
                    del data[draw.randrange(len(data)) :]
                    data += bytes(60)
        path.write_bytes(data)
        try:
            found = safetensors_header.read_tensors(path)
        except WeightsError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1
            continue
        for one in found.values():
            size = int(np.prod(one.shape)) * np.dtype(one.dtype).itemsize
            assert 0 <= one.offset <= one.offset + size <= len(data)
    assert refused > rounds // 2


@pytest.fixture(scope="module", params=[True, False], ids=["threads", "processes"])
def session(request: pytest.FixtureRequest) -> Iterator[Any]:
    with tvm_ipc.Session(2, threads=request.param, timeout=60) as opened:
        yield opened


def shortened(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 8)


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    path.unlink()
    weight_files.write(path, ARRAYS)


def written(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\0\0\0\0")
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shortened, "has changed since its header was read"),
        (replaced, "has changed since its header was read"),
        (written, "has changed since its header was read"),
        (removed, "No such file or directory"),
    ],
)
def test_a_file_that_changes_after_its_names_were_read(
    session: Any,
    change: Callable[[Path], None],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = weight_files.write(tmp_path / "model.safetensors", ARRAYS)
    cuts = weight_files.cuts_of(ARRAYS, 2)
    tvm_ipc.load_weights(session, path, cuts)
    names = safetensors_header.read_tensors

    def and_change(path: Path) -> Any:
        found = names(path)
        change(path)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(safetensors_header, "read_tensors", and_change)
        with pytest.raises(WorkerError, match=said) as raised:
            tvm_ipc.load_weights(session, path, cuts)
        first = str(raised.value).splitlines()[0]
        assert re.match(r"ranks? [01-]+: \w+: load_weights: '[wv]': ", first)
    weight_files.write(path, ARRAYS)
    weights = tvm_ipc.load_weights(session, path, cuts)
    assert session.get(weights["w"], 1).tolist() == cuts["w"].shard(W, 1).tolist()
