# SPDX-License-Identifier: Apache-2.0
"""Weights as PyTorch, transformers and safetensors have them and write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

import tvm_ipc
from tests.models.weights import weight_files
from tvm_ipc import comm
from tvm_ipc.errors import WeightsError
from tvm_ipc.models.weights import safetensors_header as ours

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    with tvm_ipc.Session(2, threads=True, timeout=60) as opened:
        yield opened


def as_array(tensor: Any) -> np.ndarray[Any, Any]:
    """A tensor of PyTorch, of a type that NumPy need not know, by way of float64."""
    name = str(tensor.dtype).removeprefix("torch.")
    plain = tensor.detach().double() if tensor.dtype.is_floating_point else tensor.detach()
    return np.asarray(plain.numpy()).astype(name)


def compare(session: Any, source: Any, tensors: dict[str, Any], **options: Any) -> None:
    """Load all tensors, and compare each rank's parts."""
    arrays = {name: as_array(one) for name, one in tensors.items()}
    cuts = weight_files.cuts_of(arrays, 2)
    weights = tvm_ipc.load_weights(session, source, cuts, **options)
    weight_files.compare(session, weights, cuts, arrays)


def tensors_of_all_types() -> dict[str, Any]:
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn]
    types += [torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8]
    types += [torch.uint8, torch.bool]
    numbers = torch.arange(-30, 30).reshape(5, 12)
    found = {}
    for kind in types:
        name = str(kind).removeprefix("torch.")
        plain = numbers.abs() if kind == torch.uint8 else numbers
        found[name] = plain.to(kind).clone()
        found[f"{name}.number"] = plain[0, 3].to(kind).clone()
        found[f"{name}.nothing"] = plain[:0].to(kind).clone()
    return found


def test_what_safetensors_writes_and_state_dicts(session: Any, tmp_path: Path) -> None:
    tensors = tensors_of_all_types()
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_file(tensors, path)
    compare(session, path, tensors)
    compare(session, tensors, tensors)
    strided = {"w": torch.arange(40.0).reshape(4, 10).t()[::3], "v": torch.ones(3).expand(2, 3)}
    compare(session, strided, strided)
    assert set(ours.read_tensors(path)) == set(tensors)


def test_what_torch_save_wrote(session: Any, tmp_path: Path) -> None:
    tensors = tensors_of_all_types()
    path = tmp_path / "pytorch_model.bin"
    torch.save(tensors, path)
    with pytest.raises(WeightsError, match="may be a pickle") as raised:
        tvm_ipc.load_weights(session, tmp_path, {})
    assert "torch.load('pytorch_model.bin', weights_only=True, mmap=True)" in str(raised.value)
    compare(session, torch.load(path, weights_only=True, mmap=True), tensors)


@pytest.mark.parametrize(
    "tensor",
    [
        lambda: torch.empty(3, device="meta"),
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    ],
)
def test_tensors_without_plain_elements(session: Any, tensor: Any) -> None:
    cuts = weight_files.cuts_of({"w": np.ones(3, "float32")}, 2)
    with pytest.raises(WeightsError, match=r"'w': this tensor has no plain elements: its layout"):
        tvm_ipc.load_weights(session, {"w": tensor()}, cuts)


class Model(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A table that is used twice; buffers and a constant, which TVM makes constants of."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 6)
        self.up = torch.nn.Linear(6, 8)
        self.down = torch.nn.Linear(8, 6, bias=False)
        self.head = torch.nn.Linear(6, 10, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.linspace(-2, 2, 6))
        self.register_buffer("shift", torch.linspace(3, 1, 6), persistent=False)

    def forward(self, ids: Any) -> Any:
        x = self.table(ids) * self.scale + self.shift
        x = x + self.down(torch.relu(self.up(x))) + torch.tensor([0.5, -1.0]).repeat(3)
        return self.head(x)


def test_a_model_and_its_exported_program(session: Any, tmp_path: Path) -> None:
    from tvm.relax.frontend.torch import from_exported_program

    torch.manual_seed(1)
    model = Model().eval()
    ids = torch.randint(0, 10, (5,))
    program = torch.export.export(model, (ids,))
    mod = from_exported_program(program, keep_params_as_input=True)
    mod, _ = relax.frontend.detach_params(mod)
    names = program.graph_signature.inputs_to_parameters
    plan = {"up": "colwise", "down": "rowwise"}
    parallel = tvm_ipc.parallelize(mod, plan, 2, names=names)
    plan = {"p_up_weight": "colwise", "p_up_bias": "colwise", "p_down_weight": "rowwise"}
    without_names = tvm_ipc.parallelize(mod, plan, 2)
    pipeline = tvm_ipc.get_pipeline("llvm", 2)
    main = session.load_vm_module(tvm.compile(parallel.module, "llvm", relax_pipeline=pipeline))
    with torch.no_grad():
        logits = model(ids).numpy()
    state = dict(model.state_dict())
    path = tmp_path / "model.safetensors"
    safetensors_torch.save_model(model, path)  # what is shared has one name there
    (left,) = {"table.weight", "head.weight"} & ours.read_tensors(path).keys()
    shared = dict.fromkeys(("table.weight", "head.weight"), left)
    for source, cut, options in (
        (program, parallel.shards, {}),
        (program, without_names.shards, {}),
        (model, parallel.shards, {}),
        (tmp_path, parallel.shards, {"names": shared, "ignore": ["scale"]}),
        (state, parallel.shards, {"ignore": ["scale"]}),
    ):
        weights = tvm_ipc.load_weights(session, source, cut, **options)
        result = main["main"](session.put(ids.numpy()), *weights.values())
        (found,) = result.debug_get_from_remote(1)
        np.testing.assert_allclose(found.numpy(), logits, rtol=1e-5, atol=1e-5)
        tables = [one for name, one in weights.items() if "table" in name or "head" in name]
        assert tables[0] is tables[1], "what is shared is loaded once"


def test_a_checkpoint_of_transformers(session: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.Qwen2Config(
        hidden_size=48,
        intermediate_size=90,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        vocab_size=67,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    tensors = dict(model.state_dict())
    with pytest.raises(
        WeightsError, match=r"'lm_head\.weight' is missing; a tensor of its shape is 'mod"
    ):
        compare(session, tmp_path, tensors)
    compare(session, tmp_path, tensors, names={"lm_head.weight": "model.embed_tokens.weight"})
    compare(session, model, tensors)
    mesh = comm.Mesh({"tp": 2})
    cut = weight_files.ShardSpec("w", "w", (67, 48), "float32", mesh, (comm.Shard(0),))
    (weight,) = tvm_ipc.load_weights(
        session, tmp_path, {"w": cut}, names={"w": "model.embed_tokens.weight"}, ignore=["*"]
    ).values()
    whole = model.model.embed_tokens.weight.detach().float().numpy()
    np.testing.assert_array_equal(session.get(weight, 1), cut.shard(whole, 1))
