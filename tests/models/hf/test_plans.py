# SPDX-License-Identifier: Apache-2.0
"""Which weights of a model are divided: by its own plan, by another, or by one that is found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tvm_ipc
from tests.models.hf.checkpoints import continued, model_of, saved
from tvm_ipc.__main__ import main
from tvm_ipc.comm import Shard
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.user_sharding_plan import (
    NAMED_PLANS,
    parse_plan,
    read_plan,
    shards_experts,
)
from tvm_ipc.tools.run import options

MLP_ALONE = {"gate_proj": "colwise", "up_proj": Shard(0), "mlp.down_proj.weight": "S[1]"}


@pytest.fixture(scope="module")
def decoder() -> Any:
    from tvm_ipc.models.hf.torch_import import import_decoder

    return import_decoder(model_of("Llama", num_hidden_layers=1), 2)


def divide(decoder: Any, plan: Any) -> Any:
    from tvm_ipc.models.hf.shard_imported_model import shard

    return shard(decoder, 2, parse_plan("load: plan", plan))


def test_plans(decoder: Any) -> None:
    """Both functions have the collectives of theirs."""
    assert divide(decoder, None).collectives == {"allreduce": 6, "allgather": 2}
    assert divide(decoder, MLP_ALONE).collectives == {"allreduce": 2}
    assert divide(decoder, {}).collectives == {}
    found = divide(decoder, "auto")
    assert found.notes[0].startswith("automatic sharding: ")
    assert found.collectives["allreduce"] >= 4


def test_named_plans_are_those_of_the_command() -> None:
    """The command names them without importing TVM."""
    assert options.NAMED_PLANS == NAMED_PLANS
    assert [parse_plan("load: plan", name) for name in NAMED_PLANS] == [*NAMED_PLANS]
    assert [name for name in NAMED_PLANS if shards_experts(name)] == ["experts"]
    assert shards_experts({"experts.down_proj": "grouped_gemm", "q_proj": "colwise"})
    assert not shards_experts({"experts.down_proj": "rowwise"})


class Experts(SimpleNamespace):
    """The experts of a layer, with the usual gate."""

    @staticmethod
    def _apply_gate(*_: Any) -> None:
        """Do nothing."""


@pytest.mark.parametrize("changed", [{"has_bias": True}, {"has_gate": False}, {"act": "tanh"}])
def test_experts_of_another_form_are_refused(changed: dict[str, Any]) -> None:
    from tvm_ipc.models.hf.transformers_experts import _run_experts

    form = {"has_gate": True, "has_bias": False, "is_transposed": False, "act": "silu", **changed}
    config = SimpleNamespace(hidden_act=form.pop("act"))
    module = Experts(config=config, is_concatenated=True, has_post_expert_norm=False, **form)
    with pytest.raises(ModelError, match="experts of another form than gate, up and down matrices"):
        _run_experts(module, None, None, None)


def test_a_plan_is_found_where_there_is_none(decoder: Any) -> None:
    from dataclasses import replace

    own = divide(replace(decoder, plan={}), None)
    assert own.notes == divide(decoder, "auto").notes


@pytest.mark.parametrize(
    ("plan", "error", "said"),
    [
        ({"q_prj": "colwise"}, ValueError, "'q_prj' matches no parameter; similar names are 'q_p"),
        ({"q_proj": "colwize"}, ValueError, "of 'q_proj' is a placement, such as .*'colwise'"),
        (
            {"q_proj": "S[2]"},
            ValueError,
            r"S\[2\]: 'model.layers.0.self_attn.q_proj.weight' has no axis 2",
        ),
        ({"ids": "S[1]"}, ValueError, "the plan shards 'ids', which is not a weight"),
        ({"past_0": "S[1]"}, ValueError, "'past_0' is in caches and in the plan"),
        ({"q_proj": 3}, TypeError, "load: plan, of 'q_proj' is a style such as 'colwise', or a pl"),
        ({3: "colwise"}, TypeError, "load: plan, a pattern is a name"),
        (
            "best",
            ValueError,
            "load: plan is 'auto', 'experts', a mapping from patterns .*, not 'best'",
        ),
        (["q_proj"], TypeError, "load: plan is 'auto', 'experts', a mapping from patterns"),
    ],
)
def test_plans_that_are_refused(plan: Any, error: type[Exception], said: str, decoder: Any) -> None:
    with pytest.raises(error, match=said):
        divide(decoder, plan)


def test_files(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"q_proj": "colwise", "o_proj": "S[1]"}')
    assert read_plan(str(path)) == {"q_proj": "colwise", "o_proj": "S[1]"}
    for text, said in [
        ("[]", "the file has a list; it must have a JSON object"),
        ("{", "the file cannot be read as JSON"),
        ('{"q_proj": ["S[0]"]}', r"'q_proj' maps to \['S\[0\]'\]; it must map to a style"),
    ]:
        path.write_text(text)
        with pytest.raises(ModelError, match=said):
            read_plan(str(path))
    # From the command each is one line.
    saved(tmp_path / "model", "Llama", num_hidden_layers=1)
    path.write_text(json.dumps({"q_prj": "colwise"}))
    for plan, code, said in [
        (str(path), 1, "'q_prj' matches no parameter; similar names are 'q_proj'"),
        (
            "none.json",
            2,
            "--plan none.json: there is no such file; specify auto or experts, or a file with",
        ),
        ("experts", 1, "transformers has no plan that shards experts of this model"),
    ]:
        capfd.readouterr()
        assert main(["run", str(tmp_path / "model"), "--tokens", "1", "--plan", plan]) == code
        out, err = capfd.readouterr()
        (line,) = err.splitlines()
        assert out == ""
        assert said in line


@pytest.mark.parametrize("plan", ["auto", MLP_ALONE, {}], ids=["auto", "mlp", "nothing"])
@pytest.mark.parametrize("workers", [2, 3])
def test_every_plan_says_the_same(
    workers: int, plan: Any, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    if not pytestconfig.getoption("--every-model"):
        pytest.skip("--every-model tries all plans on workers")
    model = saved(tmp_path, "Llama", num_hidden_layers=1)
    prompt = [5, 61, 17, 3, 44]
    with tvm_ipc.Session(workers, threads=True, timeout=60) as session:
        ours = tvm_ipc.models.load(tmp_path, session, plan=plan)
        assert list(ours.generate(prompt, 8, stop=[])) == continued(model, prompt, 8)
