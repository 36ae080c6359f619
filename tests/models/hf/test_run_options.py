# SPDX-License-Identifier: Apache-2.0
"""Options of `tvm-ipc run`: numbers that are no choice, and options that conflict."""

from __future__ import annotations

import pytest

from tvm_ipc.tools.options import OptionError
from tvm_ipc.tools.run.options import parse

TOKENS = ["--tokens", "1"]
DRAWN = [*TOKENS, "--temperature", "1"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([*TOKENS, "--temperature", "-1"], "--temperature is -1.0; it must be a number, 0 or more"),
        ([*TOKENS, "--temperature", "nan"], "--temperature is nan"),
        ([*TOKENS, "--temperature", "inf"], "--temperature is inf"),
        ([*DRAWN, "--top-k", "0"], "--top-k is 0; it must be at least 1"),
        ([*DRAWN, "--top-p", "0"], "--top-p is 0.0; it must be above 0 and at most 1"),
        ([*DRAWN, "--top-p", "1.5"], "--top-p is 1.5"),
        ([*DRAWN, "--top-p", "nan"], "--top-p is nan"),
        ([*DRAWN, "--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["--tokens", "9" * 5000], "it must be a list of token ids such as 1,2,3"),
        ([*TOKENS, "--top-k=2"], "--top-k.* needs --temperature above 0"),
        ([*TOKENS, "--top-p=0.5"], "--top-p.* needs --temperature above 0"),
        ([*TOKENS, "--seed=0"], "--seed.* needs --temperature above 0"),
        (
            ["--bench", "--temperature", "1"],
            "--bench needs greedy decoding; leave --temperature out",
        ),
        (["--chat", "--prompt", "a"], "--chat conflicts with --prompt"),
        (["--chat", "--tokens", "1"], "--chat conflicts with --tokens"),
        (["--chat", "--json"], "--chat conflicts with --json"),
        (["--chat", "--bench"], "--chat conflicts with --bench"),
        (["--prompt", "a", "--system", "b"], "--system needs --chat"),
        (["--tokens", "1", "--stop", "b"], "--stop needs a text"),
        (["--bench", "--stop", "b"], "leave --stop out"),
    ],
)
def test_what_is_refused(options: list[str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse(["folder", *options])


def test_defaults() -> None:
    assert parse(["folder", "--bench"]).bench
    assert parse(["folder", "--chat"]).max_new_tokens == 512
    assert parse(["folder", "--prompt", "a"]).max_new_tokens == 64
    assert parse(["folder", "--chat", "--max-new-tokens", "7"]).max_new_tokens == 7
