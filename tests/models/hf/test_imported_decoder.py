# SPDX-License-Identifier: Apache-2.0
"""An imported model is found again for all plans and numbers of workers that it fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tvm

import tvm_ipc
from tests.models.hf.checkpoints import model_of, saved
from tvm_ipc.models.hf import torch_import
from tvm_ipc.models.hf.imported_decoder import Decoder, read_decoder, write_decoder

FIELDS = ("names", "plan", "caches", "vocabulary", "ignored", "heads")


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return torch_import.import_decoder(model_of("Llama", num_hidden_layers=1), 2)


def test_it_is_read_as_it_was_written(decoder: Decoder, tmp_path: Path) -> None:
    entry = tmp_path / "imported" / "key"
    assert read_decoder(entry, 2) is None
    write_decoder(entry, 2, decoder)
    assert len(list(entry.iterdir())) == 1
    for workers in (1, 2):
        again = read_decoder(entry, workers)
        assert again is not None
        tvm.ir.assert_structural_equal(again.module, decoder.module)
        for field in FIELDS:
            assert getattr(again, field) == getattr(decoder, field), field
    assert read_decoder(entry, 3) is None, "two heads cannot be shared by three ranks"
    write_decoder(entry, 3, decoder)
    assert read_decoder(entry, 4) is not None


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "writable"])
def test_a_damaged_one_is_not_read(damage: str, decoder: Decoder, tmp_path: Path) -> None:
    entry = tmp_path / "imported" / "key"
    write_decoder(entry, 2, decoder)
    (path,) = entry.iterdir()
    if damage == "writable":
        path.chmod(0o666)
    else:
        whole = path.read_bytes()
        path.write_bytes({"cut": whole[:-1], "empty": b"", "other": b"[]\n{}"}[damage])
    assert read_decoder(entry, 2) is None
    write_decoder(entry, 2, decoder)
    assert read_decoder(entry, 2) is not None


def test_a_folder_that_cannot_be_written(decoder: Decoder, tmp_path: Path) -> None:
    (tmp_path / "imported").write_text("a file is in the way")
    write_decoder(tmp_path / "imported" / "key", 2, decoder)


def test_other_numbers_of_workers_and_plans_need_no_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TVM_IPC_CACHE", str(tmp_path / "cache"))
    imported: list[int] = []
    import_decoder = torch_import.import_decoder

    def counted(model: Any, workers: int, **options: Any) -> Decoder:
        imported.append(workers)
        return import_decoder(model, workers, **options)

    monkeypatch.setattr(torch_import, "import_decoder", counted)
    saved(tmp_path / "model", "Llama", num_hidden_layers=2)
    steps: list[str] = []
    tokens = []
    for workers, plan in ((2, None), (1, None), (2, {})):
        with tvm_ipc.Session(workers) as session:
            model = tvm_ipc.models.load(
                tmp_path / "model", session, plan=plan, progress=steps.append
            )
            tokens.append(list(model.generate([1, 2, 3], max_new_tokens=4)))
    assert imported == [2]
    assert tokens[0] == tokens[1] == tokens[2]
    assert steps[:4] == [
        "importing TVM",
        "importing PyTorch and transformers",
        "comparing the layers of the model",
        "exporting the function prefill: 1 of 2 layers",
    ]
    assert "sharding the model for 1 worker" in steps
    assert steps.count("compiling: legalize") == steps.count("writing the library") == 3
