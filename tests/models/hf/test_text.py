# SPDX-License-Identifier: Apache-2.0
"""A model continues texts and chats with its own tokenizer and chat template."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tvm_ipc
from tests.models.hf.checkpoints import continued, saved_with
from tests.models.hf.tokenizers_of_tests import CLOSE, END, ROLE, START, TEMPLATE, of_bytes
from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf import load_and_generate as module
from tvm_ipc.models.hf.load_and_generate import Model
from tvm_ipc.models.hf.model_folder import read_folder
from tvm_ipc.models.hf.model_steps import ModelSteps
from tvm_ipc.models.hf.read_config_and_tokenizer import tokenizer as read_tokenizer

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Où?"},
    {"role": "assistant", "content": "Là."},
    {"role": "user", "content": "Et hier?"},
]
CONTEXT = 200


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT}
    return folder, saved_with(of_bytes(), folder, **sizes)


@pytest.fixture(scope="module")
def model(trained: tuple[Path, Any], cache: Path) -> Iterator[Model]:
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        yield tvm_ipc.models.load(trained[0], session)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the model generate these tokens."""

    def script(tokens: list[int]) -> None:
        rest = iter(tokens)
        monkeypatch.setattr(module.Sampler, "__call__", lambda *_: next(rest))

    return script


def test_text_is_what_transformers_decodes(trained: tuple[Path, Any], model: Model) -> None:
    tokens = continued(trained[1], [START, *b"Hello"], 24)
    stream = model.generate("Hello", 24, stop=[])
    assert isinstance(stream, tvm_ipc.models.TextStream)
    assert "".join(stream) == of_bytes().decode(tokens, skip_special_tokens=True)
    assert (stream.tokens, stream.finish_reason) == (tokens, "length")
    assert list(model.generate([START, *b"Hello"], 24, stop=[])) == tokens, "tokens for tokens"
    drawn = ["".join(model.generate("a", 9, temperature=2.0, seed=1, top_k=50)) for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_a_chat_is_what_transformers_makes_of_it(trained: tuple[Path, Any], model: Model) -> None:
    for messages in (CHAT, CHAT[1:2], tuple(CHAT)):
        prompt = of_bytes().apply_chat_template(
            list(messages), add_generation_prompt=True, return_dict=False
        )
        assert prompt.count(START) == 1
        assert model.tokenize(messages) == prompt
        stream = model.generate(messages, 12, stop=[])
        "".join(stream)
        assert stream.tokens == continued(trained[1], prompt, 12)


def test_the_first_token_is_there_once(model: Model) -> None:
    """In a text of a chat template as well."""
    assert model.tokenize("Hi") == [START, *b"Hi"] == model.tokenize("<s>Hi")
    text = of_bytes().apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert model.tokenize(text) == model.tokenize(CHAT)
    assert model.tokenize(CHAT)[:2] == [START, ROLE]
    assert model.tokenize([1, 2]) == [1, 2]
    assert model.tokenize("") == [START], "which begins a text"


def test_what_ends_a_text(model: Model, scripted: Any) -> None:
    for tokens, stop, text, reason in (
        ("a漢b\n\nc".encode(), "\n\n", "a漢b", "stop"),
        ("a漢b\n\nc".encode(), ["no", "b\n"], "a漢", "stop"),
        ([*b"ab", CLOSE, *b"c"], ["<close>"], "ab", "stop"),
        ([*b"ab", CLOSE, *b"c"], [CLOSE, "x"], "ab", "stop"),
        ([*b"ab", END, *b"c"], [], "abc", "length"),
        ([*b"abc"], ["bcd"], "abc", "length"),
    ):
        scripted(list(tokens))
        stream = model.generate("Hello", len(tokens), stop=stop)
        assert ("".join(stream), stream.finish_reason) == (text, reason), stop


def test_end_tokens_of_the_model(
    trained: tuple[Path, Any], tmp_path: Path, scripted: Any, model: Model
) -> None:
    """They end a text that has stop strings, too, and are not part of it."""
    folder = Path(shutil.copytree(trained[0], tmp_path / "model"))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, ord("!")]}))
    ours = Model(model.session, read_folder(folder), model.compiled)
    for stop in (None, ["\n"]):
        scripted(list(b"ab!c"))
        stream = ours.generate("Hello", 4, stop=stop)
        assert ("".join(stream), stream.finish_reason) == ("ab", "stop")
        assert stream.tokens == list(b"ab!")
    scripted(list(b"ab!c"))
    assert "".join(ours.generate("Hello", 4, stop=[ord("c"), "\n"])) == "ab!"
    scripted(list(b"ab!c"))
    assert list(ours.generate([1], 4)) == list(b"ab!"), "tokens have all of them"


def test_cancellation(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PREFILL_CHUNK", 4)
    steps: list[int] = []
    step = ModelSteps._call

    def count(self: ModelSteps, *how: Any) -> Any:
        steps.append(len(how[1]))
        return step(self, *how)

    monkeypatch.setattr(ModelSteps, "_call", count)
    stream = model.generate("Hello, world", 8, cancelled=lambda: len(steps) >= 2)
    assert (list(stream), stream.finish_reason) == ([], "cancelled")
    assert steps == [4, 4], "of 13 tokens"
    assert list(model.generate([1, 2], 8, cancelled=lambda: True)) == []
    steps.clear()
    stream = model.generate("Hello", 8, stop=[], cancelled=lambda: len(steps) >= 4)
    assert len("".join(stream)) > 0
    assert (len(stream.tokens), stream.finish_reason) == (3, "cancelled")
    assert len(list(model.generate([1], 3, stop=[]))) == 3, "the model goes on"


def test_prompts_that_are_refused(model: Model) -> None:
    for prompt, said in (
        ([], "prompt is a text, a list of chat messages, or a sequence of tokens, each 0 to 259, "),
        ([260], "each 0 to 259, not"),
        ("a" * 190, f"191 tokens and 16 new ones are more than the {CONTEXT}"),
        ([{"role": "user", "content": "a" * 190}], "new ones are more than the 200"),
        ("a\ud800", "has lone surrogates"),
    ):
        with pytest.raises(ValueError, match=said):
            model.generate(prompt)  # type: ignore[call-overload]
    for prompt, said in (
        (CHAT[0], "a list of chat messages"),
        (b"Hello", "a list of chat messages"),
        ([["Hello"]], "a list of chat messages"),
        (None, "a list of chat messages"),
        ([CHAT[0], "Hello"], "prompt: each message is such as"),
        ([{"role": "user"}], "has no text for 'content'"),
        ([{"role": 1, "content": "a"}], "has no text for 'role'"),
    ):
        with pytest.raises(TypeError, match=said):
            model.generate(prompt)  # type: ignore[call-overload]
    with pytest.raises(ModelError, match="template refuses the messages: unknown role robot"):
        model.generate([{"role": "robot", "content": "a"}])


def test_stops_that_are_refused(model: Model) -> None:
    for stop, said in (("", "not empty"), (["a", ""], "not empty")):
        with pytest.raises(ValueError, match=said):
            model.generate("Hello", stop=stop)
    for wrong in (1, b"a", ["a", 1.5], {"a": 1}):
        with pytest.raises(TypeError, match="stop is numbers of tokens, or strings"):
            model.generate("Hello", stop=wrong)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"stop is \['a'\] and has strings, but tokens are"):
        model.generate([1], stop=["a"])  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="cancelled is a function"):
        model.generate("Hello", cancelled=True)  # type: ignore[call-overload]


def with_tokenizer(model: Model, folder: Path, tokenizer: Any) -> Model:
    """The same model in a folder with another tokenizer, or with none."""
    source = model.folder.path
    folder.mkdir()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(source / name, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return Model(model.session, read_folder(folder), model.compiled)


def test_a_model_without_a_chat_template(model: Model, tmp_path: Path) -> None:
    ours = with_tokenizer(model, tmp_path / "plain", of_bytes(template=None))
    with pytest.raises(ModelError, match="plain: the tokenizer has no chat template, so chat mes"):
        ours.generate(CHAT)
    assert "".join(ours.generate("Hello", 3, stop=[])) == "".join(
        model.generate("Hello", 3, stop=[])
    )


def test_a_chat_template_that_is_wrong(model: Model, tmp_path: Path) -> None:
    ours = with_tokenizer(model, tmp_path / "wrong", of_bytes(TEMPLATE + "{% if"))
    with pytest.raises(ModelError, match=r"wrong: the chat template refuses .*: .*template"):
        ours.generate(CHAT)


def test_a_model_without_a_tokenizer(model: Model, tmp_path: Path) -> None:
    ours = with_tokenizer(model, tmp_path / "bare", None)
    for prompt in ("Hello", CHAT):
        with pytest.raises(ModelError, match=r"bare: there is no tokenizer .* generate\(\[1, 2, 3"):
            ours.generate(prompt)  # type: ignore[arg-type]
    assert len(list(ours.generate([1, 2], 3, stop=[]))) == 3


def test_empty_prompts(model: Model, tmp_path: Path) -> None:
    """Only a tokenizer that begins texts with a token has one for an empty text."""
    inner = of_bytes()
    inner.backend_tokenizer.post_processor = None
    inner = type(inner)(tokenizer_object=inner.backend_tokenizer, eos_token="</s>")
    ours = with_tokenizer(model, tmp_path / "bare", inner)
    assert ours.tokenize("Hi") == list(b"Hi")
    with pytest.raises(ValueError, match="prompt: the tokenizer returns no tokens for ''"):
        ours.generate("")
    assert "".join(model.generate("", 3, stop=[])) == "".join(
        of_bytes().decode(list(model.generate([START], 3, stop=[])))
    )


def test_a_tokenizer_of_another_model(model: Model, tmp_path: Path) -> None:
    tokenizer = of_bytes()
    tokenizer.add_tokens(["漢字"])
    ours = with_tokenizer(model, tmp_path / "other", tokenizer)
    with pytest.raises(ModelError, match="returns token 260, but the model has 260 tokens"):
        ours.generate("a漢字")


def test_the_program_of_the_page_runs(
    trained: tuple[Path, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "hugging_face.md").read_text()
    _, program = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    shutil.copytree(trained[0], tmp_path / "FOLDER")
    monkeypatch.chdir(tmp_path)
    capsys.readouterr()
    exec(compile(program, "hugging_face.md", "exec"), {})
    assert capsys.readouterr().out.endswith("length 64\n")


def test_the_tokenizer_is_read_once(model: Model) -> None:
    assert model.tokenizer is model.tokenizer
    assert read_tokenizer(model.folder).chat_template == TEMPLATE
