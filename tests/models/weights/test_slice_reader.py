# SPDX-License-Identifier: Apache-2.0
"""A part of a file is what NumPy says it is, however the part lies in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.weights import weight_files
from tvm_ipc.index_spans_per_axis import Span, Spans, extract, shape_of
from tvm_ipc.models.weights import safetensors_header, slice_reader
from tvm_ipc.models.weights.slice_reader import SliceReader, convert, fill_zeros


def part_of(path: Path, name: str, runs: Spans, dtype: str) -> np.ndarray[Any, Any]:
    one = safetensors_header.read_tensors(path)[name]
    part = np.full(shape_of(runs), 77, np.dtype(dtype))
    with SliceReader(one.file.path, one.file.state, one.dtype, one.shape, one.offset) as file:
        fill_zeros(runs, part)
        file.read(runs, (0,) * len(one.shape), part)
    return part


def random_runs(draw: np.random.Generator, shape: tuple[int, ...]) -> Spans:
    found = []
    for extent in shape:
        runs: list[Span] = []
        for _ in range(int(draw.integers(1, 3))):
            if draw.random() < 0.5:
                runs.append((0, extent))
            else:
                start = int(draw.integers(0, extent + 1))
                runs.append((start, int(draw.integers(0, extent - start + 1))))
        if draw.random() < 0.2:
            runs.append((None, int(draw.integers(0, 3))))
        found.append(tuple(runs))
    return tuple(found)


@pytest.mark.parametrize(
    "sizes", [(1 << 20, 1 << 15, 1 << 26), (64, 16, 24), (200, 1 << 15, 7), (1 << 20, 1, 1 << 26)]
)
def test_random_parts(
    sizes: tuple[int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in zip(("_BUFFER_BYTES", "_LONG_ROW", "_MAX_READ"), sizes, strict=True):
        monkeypatch.setattr(slice_reader, name, size)
    draw = np.random.default_rng(3)
    for _ in range(150):
        shape = tuple(int(n) for n in draw.integers(0, 7, draw.integers(0, 5)))
        dtype = str(draw.choice(["float32", "bfloat16", "int8", "bool", "float64"]))
        whole = weight_files.random_array(draw, shape, dtype)
        before = weight_files.random_array(draw, (3,), "uint8")  # so that nothing is aligned
        path = weight_files.write(tmp_path / "x.safetensors", {"before": before, "w": whole})
        runs = random_runs(draw, shape)
        wanted = "float32" if dtype == "bfloat16" and draw.random() < 0.5 else dtype
        np.testing.assert_array_equal(
            part_of(path, "w", runs, wanted), extract(whole, runs).astype(wanted), strict=True
        )


def test_only_the_part_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0
    preadv = slice_reader.os.preadv

    def counting(file: int, views: Any, place: int) -> int:
        nonlocal read
        read += sum(len(view) for view in views)
        return int(preadv(file, views, place))

    whole = np.arange(1 << 20, dtype="float32").reshape(64, 16384)
    path = weight_files.write(tmp_path / "x.safetensors", {"w": whole})
    monkeypatch.setattr(slice_reader.os, "preadv", counting)
    for runs in ((((16, 16),), ((0, 16384),)), (((0, 64),), ((4096, 4096),))):
        read = 0
        found = part_of(path, "w", runs, "float32")
        np.testing.assert_array_equal(found, extract(whole, runs))
        assert read == whole.nbytes // 4


@pytest.mark.parametrize(
    ("found", "wanted", "number"),
    [
        ("float32", "float16", 70000.0),
        ("bfloat16", "float16", -65536.0),
        ("float64", "float32", 1e39),
        ("float32", "bfloat16", -3.4028235e38),
        ("float64", "bfloat16", 1e300),
    ],
)
def test_numbers_that_do_not_fit(found: str, wanted: str, number: float) -> None:
    array = np.array([1.0, np.inf, -np.inf, np.nan]).astype(found)
    found_again = np.empty(4, np.dtype(wanted))
    convert(array, found_again)
    np.testing.assert_array_equal(found_again.astype("float64"), [1.0, np.inf, -np.inf, np.nan])
    array[0] = number
    with pytest.raises(ValueError, match=rf"does not fit into {wanted}"):
        convert(array, found_again)
