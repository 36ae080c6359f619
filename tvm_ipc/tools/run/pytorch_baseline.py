# SPDX-License-Identifier: Apache-2.0
"""Run the same model and prompt in PyTorch on as many cores, for `tvm-ipc run --bench`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from tvm_ipc.errors import ModelError
from tvm_ipc.models.hf.model_folder import ModelFolder
from tvm_ipc.models.hf.optional_deps import require
from tvm_ipc.runtime.config import threads_per_worker
from tvm_ipc.runtime.subprocess_call import run_in_child
from tvm_ipc.tools.run.options import Options


@dataclass(frozen=True)
class TimedTokens:
    """Generated tokens, with the seconds to the first one, and from there to the last."""

    tokens: list[int]
    first: float
    rest: float

    @property
    def per_second(self) -> float | None:
        """Tokens per second after the first one."""
        return (len(self.tokens) - 1) / self.rest if len(self.tokens) > 1 else None


@dataclass(frozen=True)
class BaselineRun(TimedTokens):
    """The tokens that PyTorch generated with a number of threads."""

    threads: int


def run_baseline(
    folder: ModelFolder, options: Options, prompt: list[int], count: int
) -> BaselineRun:
    """Generate `count` tokens with PyTorch in a child process, by greedy decoding."""
    arguments = {
        "path": str(folder.path),
        "dtype": options.dtype or folder.dtype,
        "threads": options.workers * threads_per_worker(options.workers),
        "prompt": prompt,
        "count": count,
    }
    return BaselineRun(
        **run_in_child(
            "tvm_ipc.tools.run.pytorch_baseline:generate_warm",
            arguments,
            purpose="to compare with PyTorch",
        )
    )


def generate_warm(arguments: dict[str, Any], _progress: Callable[[str], None]) -> dict[str, Any]:
    """Generate tokens with PyTorch after a warm-up; the child process calls this function."""
    torch, transformers = require("to compare with PyTorch")
    prompt, threads = arguments["prompt"], arguments["threads"]
    torch.set_num_threads(threads)
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        arguments["path"], dtype=getattr(torch, arguments["dtype"]), local_files_only=True
    ).eval()
    try:
        greedy_decode(torch, model, prompt, 2)
        tokens, first, rest = greedy_decode(torch, model, prompt, arguments["count"])
    except RuntimeError as error:  # such as experts whose rows are not aligned
        first_line = next(iter(str(error).splitlines()), "")
        raise ModelError(f"--bench: PyTorch cannot run the model: {first_line}") from error
    return asdict(BaselineRun(tokens, first, rest, threads))


def greedy_decode(
    torch: Any, model: Any, prompt: list[int], count: int
) -> tuple[list[int], float, float]:
    """Return the tokens of greedy decoding, and the seconds to the first one and to the others."""
    tokens: list[int] = []
    start = first = time.perf_counter()
    with torch.inference_mode():
        ids, past = torch.tensor([prompt]), None
        while len(tokens) < count:
            output = model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            tokens.append(int(output.logits[0, -1].argmax()))
            if len(tokens) == 1:
                first = time.perf_counter()
            ids, past = torch.tensor([tokens[-1:]]), output.past_key_values
    return tokens, first - start, time.perf_counter() - first
