# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc run --chat`: messages in, answers out, on a terminal and through pipes."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.models.hf.checkpoints import saved_with
from tests.models.hf.tokenizers_of_tests import END, TEMPLATE, of_bytes
from tvm_ipc.__main__ import main
from tvm_ipc.models.hf import load_and_generate as module
from tvm_ipc.models.hf.load_and_generate import Model

CONTEXT = 120
CTRL_C = 3
#: The labels of the command's notes on standard error.
LABELS = ("model ", "plan ", "chat ", "time ", "memory ", "PyTorch ")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sizes = {"max_position_embeddings": CONTEXT, "eos_token_id": END}
    saved_with(of_bytes(), folder, num_hidden_layers=1, **sizes)
    return folder


class Chat:
    """Runs the command with lines as its input; the model gives these answers.

    The byte of Ctrl-C in one is a Ctrl-C while the character before it is generated.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
        self.folder, self.patch, self.capfd = folder, monkeypatch, capfd
        self.asked: list[str] = []
        self.counts: list[int] = []

    def run(self, lines: str, *options: object, answers: tuple[str, ...], code: int = 0) -> Any:
        rest: list[int] = []
        remaining = list(answers)
        generate = Model.generate

        def spy(model: Model, prompt: Any, count: int, **how: Any) -> Any:
            self.asked.append(model.tokenizer.decode(model.tokenize(prompt)))
            self.counts.append(count)
            rest[:] = [*remaining.pop(0).encode(), END]
            if rest[0] == CTRL_C:
                os.kill(os.getpid(), signal.SIGINT)
            return generate(model, prompt, count, **how)

        self.asked.clear()
        self.counts.clear()
        self.patch.setattr(Model, "generate", spy)

        def sample(*_: object) -> int:
            if rest[1:2] == [CTRL_C]:
                os.kill(os.getpid(), signal.SIGINT)
            return rest.pop(0)

        self.patch.setattr(module.Sampler, "__call__", sample)
        self.patch.setattr(sys, "stdin", io.StringIO(lines))
        self.capfd.readouterr()
        ended = main(["run", str(self.folder), "--chat", "--threads", *map(str, options)])
        out, err = self.capfd.readouterr()
        self.patch.setattr(Model, "generate", generate)
        assert ended == code, (out, err)
        if code != 0:
            return out, err.splitlines()
        # Libraries may write lines of their own, such as PyTorch's warnings.
        notes = [line for line in err.splitlines() if line.startswith(LABELS)]
        assert notes and notes[0].startswith("model "), err
        return out, [line.removeprefix("chat").strip() for line in notes[1:]]


@pytest.fixture
def chat(trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Chat:
    return Chat(trained, monkeypatch, capfd)


def user(text: str) -> str:
    return f"<role>user:{text}<close>"


def assistant(text: str) -> str:
    return f"<role>assistant:{text}<close>"


ANSWER = "<role>assistant:"


def test_lines_of_a_pipe_are_answered(chat: Chat) -> None:
    """Each with all messages before it; empty lines are none."""
    out, notes = chat.run("Où?\n\n  \nEt hier?", answers=("Là.", "漢字"))
    assert out == "Là.\n漢字\n"
    assert notes == []
    assert chat.asked == [
        f"<s>{user('Où?')}{ANSWER}",
        f"<s>{user('Où?')}{assistant('Là.')}{user('Et hier?')}{ANSWER}",
    ]
    assert chat.run("", answers=()) == ("", [])


def test_system_message_and_stop_strings(chat: Chat) -> None:
    options = ("--system", "Be brief.", "--stop", "\nuser:", "--stop", "END")
    options += ("--max-new-tokens", "20")
    out, _ = chat.run("a\nb\n", *options, answers=("one\nuser: x", "twoEND"))
    assert out == "one\ntwo\n"
    system = "<s><role>system:Be brief.<close>"
    assert chat.asked[1] == f"{system}{user('a')}{assistant('one')}{user('b')}{ANSWER}"


def test_what_ctrl_c_leaves_of_an_answer(chat: Chat) -> None:
    """The chat keeps the printed text, and drops a message without an answer."""
    out, notes = chat.run("a\nb\nc\n", "--max-new-tokens", 20, answers=("12\x0334", "\x03", "5"))
    assert out == "12\n\n5\n"
    assert notes == ["the message was not answered, and is not part of the chat"]
    before = f"<s>{user('a')}{assistant('12')}"
    assert chat.asked[1:] == [f"{before}{user(text)}{ANSWER}" for text in "bc"]


def test_answers_that_are_cut(chat: Chat) -> None:
    out, notes = chat.run("a\n", "--max-new-tokens", 4, answers=("abcdefgh",))
    assert out == "abcd\n"
    assert notes == ["the answer was cut after 4 tokens because of --max-new-tokens 4"]
    out, notes = chat.run("a\n", "--max-new-tokens", 4, answers=("abc",))
    assert (out, notes) == ("abc\n", [])
    long = "x" * 200
    out, notes = chat.run("a\n", answers=(long,))
    (size,) = chat.counts
    assert size == CONTEXT - len(of_bytes()(chat.asked[0], add_special_tokens=False)["input_ids"])
    assert out == "x" * size + "\n"
    assert notes == [
        f"the answer was cut after {size} tokens because of the {CONTEXT} tokens that the model "
        "supports"
    ]


def test_a_chat_longer_than_the_context(chat: Chat) -> None:
    """The oldest messages are dropped, and the user is told; the system message stays."""
    options = ("--system", "S", "--max-new-tokens", 40)
    out, notes = chat.run("a\nb\nc\nd\n", *options, answers=("1" * 14, "22", "3" * 9, "4"))
    assert out == f"{'1' * 14}\n22\n{'3' * 9}\n4\n"
    dropped = (
        f"the chat is longer than the {CONTEXT} tokens that the model supports; the oldest 2 "
        "messages were dropped"
    )
    assert notes == [dropped, dropped]
    system = "<s><role>system:S<close>"
    assert chat.asked[2] == f"{system}{user('b')}{assistant('22')}{user('c')}{ANSWER}"
    assert chat.asked[3] == f"{system}{user('c')}{assistant('3' * 9)}{user('d')}{ANSWER}"


def test_a_message_longer_than_the_context(chat: Chat) -> None:
    """It is not sent; the chat goes on with what there was before."""
    out, notes = chat.run(f"a\n{'b' * 150}\nc\n", answers=("1", "2"))
    assert out == "1\n2\n"
    (note,) = notes
    assert "the message has 169 tokens with the chat template, and the model supports 120" in note
    assert "it was not sent, send a shorter one" in note
    assert chat.asked[1] == f"<s>{user('a')}{assistant('1')}{user('c')}{ANSWER}"


def test_input_that_is_no_text(
    trained: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out, notes = chat.run("a\udcff\nb\n", answers=("1",))
    assert out == "1\n"
    assert notes[0].endswith("it was not sent to the model")
    assert chat.asked == [f"<s>{user('b')}{ANSWER}"]


def test_models_that_cannot_chat(trained: Path, tmp_path: Path, chat: Chat) -> None:
    """The error comes before anything is compiled or loaded."""
    chat.folder = tmp_path / "plain"
    chat.folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(trained / name, chat.folder)
    out, (line,) = chat.run("a\n", answers=(), code=1)
    assert "there is no tokenizer" in line
    of_bytes(template=None).save_pretrained(chat.folder)
    out, (line,) = chat.run("a\n", answers=(), code=1)
    assert (out, line) == (
        "",
        f"tvm-ipc: {chat.folder}: the tokenizer has no chat template, so chat messages cannot be "
        "converted to a prompt; pass a text, or use a model that was trained for chats",
    )
    of_bytes(TEMPLATE.replace("'system', ", "")).save_pretrained(chat.folder)
    out, (line,) = chat.run("a\n", "--system", "S", answers=(), code=1)
    assert "the chat template refuses the messages: unknown role system" in line


def test_stop_strings_of_a_prompt(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The printed text equals the text of --json."""
    tokens = [*"a漢b\n\nc".encode()]
    printed = []
    for options in ((), ("--json",)):
        rest = list(tokens)
        monkeypatch.setattr(module.Sampler, "__call__", lambda *_, rest=rest: rest.pop(0))
        given = ["run", str(trained), "--threads", "--prompt", "x", "--stop", "\n\n", *options]
        assert main(given) == 0
        printed.append(capfd.readouterr().out)
    assert printed[0] == "a漢b\n"
    assert '"text": "a\\u6f22b"' in printed[1]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose answers do not end, with a context that leaves time for Ctrl-C."""
    folder = tmp_path_factory.mktemp("endless")
    saved_with(of_bytes(), folder, num_hidden_layers=1, max_position_embeddings=100_000)
    return folder


class Terminal:
    """The command as a process, on a terminal or with pipes."""

    def __init__(self, folder: Path, *, terminal: bool) -> None:
        command = [sys.executable, "-m", "tvm_ipc", "run", str(folder), "--chat"]
        command += ["--max-new-tokens", "50000"]
        self.text = ""
        if terminal:
            self._reader, theirs = pty.openpty()
            self._writer = self._reader
            streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
            self.process = subprocess.Popen(
                command,
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is a signal
                **streams,
            )
            os.close(theirs)
        else:
            self.process = subprocess.Popen(
                command,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            assert self.process.stdin is not None
            assert self.process.stdout is not None
            self._writer, self._reader = self.process.stdin.fileno(), self.process.stdout.fileno()

    def read_until(self, done: Callable[[str], bool]) -> str:
        """Read until the text since the last call is as it should be, and return it."""
        begin = len(self.text)
        deadline = time.monotonic() + 90
        while not done(self.text[begin:]):
            left = max(0, deadline - time.monotonic())
            assert select.select([self._reader], [], [], left)[0], self.text[-300:]
            data = b""
            with contextlib.suppress(OSError):  # a terminal that nobody has open
                data = os.read(self._reader, 4096)
            assert data, f"it ended: {self.text[-300:]}"
            self.text += data.decode(errors="replace")
        return self.text[begin:]

    def read_until_quiet(self) -> None:
        """Read until nothing has come for a second."""
        while select.select([self._reader], [], [], 1)[0]:
            assert os.read(self._reader, 4096), f"it ended: {self.text[-300:]}"

    def send(self, text: str) -> None:
        os.write(self._writer, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def end(self) -> int:
        if self.process.stdin is not None:
            self.process.stdin.close()
        with contextlib.suppress(OSError):
            while True:
                assert select.select([self._reader], [], [], 60)[0], self.text[-300:]
                data = os.read(self._reader, 4096)
                if not data:
                    break
                self.text += data.decode(errors="replace")
        return self.process.wait(timeout=60)


@pytest.fixture(params=[True, False], ids=["terminal", "pipes"])
def talk(request: pytest.FixtureRequest, endless: Path, cache: Path) -> Iterator[Terminal]:
    terminal = Terminal(endless, terminal=request.param)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()


def long(text: str) -> bool:
    return len(text) > 200


def test_ctrl_c_ends_the_answer_only(talk: Terminal) -> None:
    terminal = talk.process.stdin is None
    if terminal:
        talk.read_until(lambda text: text.endswith(">>> "))
        assert "Ctrl-C ends an answer, Ctrl-D ends the chat" in talk.text
    for _ in range(2):
        talk.send("Hello\n")
        talk.read_until(long)
        # On a terminal as a key, which the terminal makes a signal of.
        talk.send("\x03") if terminal else talk.interrupt()
        if terminal:
            talk.read_until(lambda text: text.endswith(">>> "))
        else:
            talk.read_until_quiet()
    if terminal:
        talk.send("half a line")
        talk.read_until(lambda text: text.endswith("half a line"))
        time.sleep(0.5)  # Python notices a signal while it waits, not while it handles a key
        talk.send("\x03")
        talk.read_until(lambda text: "another Ctrl-C" in text and text.endswith(">>> "))
        talk.send("\x04")
    assert talk.end() == 0, talk.text[-300:]
    assert "Traceback" not in talk.text
    assert "interrupted" not in talk.text


def test_second_ctrl_c_ends_the_program(talk: Terminal) -> None:
    if talk.process.stdin is None:
        talk.read_until(lambda text: text.endswith(">>> "))
    else:
        talk.read_until(lambda text: "weights loaded" in text)
    time.sleep(1)  # Python notices a signal while it waits for a line, not just before
    talk.interrupt()
    talk.read_until(lambda text: "another Ctrl-C" in text)
    time.sleep(1)
    talk.interrupt()
    assert talk.end() == 130
    assert talk.text.endswith("tvm-ipc: interrupted" + ("\r\n" if "\r" in talk.text else "\n"))
    assert "Traceback" not in talk.text
