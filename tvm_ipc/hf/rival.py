# SPDX-License-Identifier: Apache-2.0
"""The same model and prompt in PyTorch, on as many cores."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tvm_ipc.errors import ModelError
from tvm_ipc.hf.folder import Folder
from tvm_ipc.hf.options import Options
from tvm_ipc.hf.packages import needed
from tvm_ipc.runtime.apart import apart
from tvm_ipc.runtime.config import threads_per_worker


@dataclass(frozen=True)
class Theirs:
    """What PyTorch said, and what it took: seconds to the first token, and to the others."""

    tokens: list[int]
    first: float
    rest: float
    threads: int

    @property
    def per_second(self) -> float | None:
        """Tokens in a second, after the first one."""
        return (len(self.tokens) - 1) / self.rest if len(self.tokens) > 1 else None


def pytorch(folder: Folder, options: Options, prompt: list[int], count: int) -> Theirs:
    """Return what PyTorch says in a process of its own, always the likeliest token."""
    given = {
        "path": str(folder.path),
        "dtype": options.dtype or folder.dtype,
        "threads": options.workers * threads_per_worker(options.workers),
        "prompt": prompt,
        "count": count,
    }
    return Theirs(**apart("tvm_ipc.hf.rival:warm", given, purpose="to compare with PyTorch"))


def warm(given: dict[str, Any], _progress: Callable[[str], None]) -> dict[str, Any]:
    """Return what PyTorch says, and what it takes after a first time to warm up."""
    torch, transformers = needed("to compare with PyTorch")
    prompt, threads = given["prompt"], given["threads"]
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        given["path"], dtype=getattr(torch, given["dtype"]), local_files_only=True
    ).eval()
    try:
        likeliest(torch, model, prompt, 2)
        tokens, first, rest = likeliest(torch, model, prompt, given["count"])
    except RuntimeError as error:  # such as experts of a few bytes, which PyTorch does not multiply
        first_line = next(iter(str(error).splitlines()), "")
        raise ModelError(f"--bench: PyTorch cannot run the model: {first_line}") from error
    return asdict(Theirs(tokens, first, rest, threads))


def likeliest(
    torch: Any, model: Any, prompt: list[int], count: int
) -> tuple[list[int], float, float]:
    """Return the likeliest tokens after a prompt, and seconds to the first and to the others."""
    tokens: list[int] = []
    start = first = time.perf_counter()
    with torch.inference_mode():
        ids, past = torch.tensor([prompt]), None
        while len(tokens) < count:
            said = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            tokens.append(int(said.logits[0, -1].argmax()))
            if len(tokens) == 1:
                first = time.perf_counter()
            ids, past = torch.tensor([tokens[-1:]]), said.past_key_values
    return tokens, first - start, time.perf_counter() - first
