# SPDX-License-Identifier: Apache-2.0
"""Run one engine for `engines.py`, in a process and a Python environment of its own.

    python engine_adapters.py

reads one JSON object per line from standard input, and answers each with one on standard output:

    {"do": "load", "engine": "openvino", "path": ..., "dtype": "float32", "threads": 2, ...}
    {"do": "generate", "prompts": [[5, 17, ...]], "count": 32}

What the libraries print goes to standard error. This file needs nothing but the engine: a library
is imported when its engine is loaded, so an environment has to hold only one of them.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import version
from typing import Any

#: The tokens of each prompt, the seconds until all prompts have one, and from there to the last.
Timed = tuple[list[list[int]], float, float]


class UnsupportedError(Exception):
    """The engine has no such type, or no such call; the message is a reason for the table."""


class Clock:
    """Record the times of the first and the last token."""

    def __init__(self, prompts: int = 1) -> None:
        self._prompts, self._tokens = prompts, 0
        self.start = self.first = self.last = time.perf_counter()

    def tick(self, tokens: int = 1) -> None:
        self._tokens += tokens
        self.last = time.perf_counter()
        if self._tokens <= self._prompts:
            self.first = self.last

    def timed(self, tokens: list[list[int]]) -> Timed:
        """Return the tokens and times; every token must have been counted."""
        if self._tokens != (wanted := sum(map(len, tokens))):
            raise RuntimeError(f"{wanted} tokens, but a time for {self._tokens} of them")
        return tokens, self.first - self.start, self.last - self.first


class TvmIpc:
    """tvm_ipc, through its public API; `TVM_NUM_THREADS` has the threads of each worker."""

    def __init__(self, task: dict[str, Any]) -> None:
        import tvm_ipc

        tvm_ipc.runtime_only()
        self._session = tvm_ipc.Session(task["workers"])
        self.version = version("tvm-ipc")
        self._model = tvm_ipc.models.load(task["path"], self._session, dtype=task["dtype"])

    def generate(self, prompts: list[list[int]], count: int) -> Timed:
        clock, steps = Clock(len(prompts)), []
        for step in zip(*self._streams(prompts, count), strict=True):
            clock.tick(len(prompts))
            steps.append(step)
        return clock.timed([list(tokens) for tokens in zip(*steps, strict=True)])

    def _streams(self, prompts: list[list[int]], count: int) -> Any:
        """Return an iterator over the tokens of each prompt."""
        if len(prompts) == 1:
            return [self._model.generate(prompts[0], count, stop=())]
        try:
            return self._model.generate(prompts, count, stop=())
        except TypeError as error:
            raise UnsupportedError("`generate` of this version takes one prompt") from error


class PyTorch:
    """The model and the key-value cache of transformers, eager or compiled by Inductor."""

    def __init__(self, task: dict[str, Any]) -> None:
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(task["threads"])
        self._torch, self.version = torch, torch.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            task["path"], dtype=getattr(torch, task["dtype"]), local_files_only=True
        ).eval()
        if task["engine"] == "torch-compiled":
            self._model = torch.compile(self._model, dynamic=True)

    def generate(self, prompts: list[list[int]], count: int) -> Timed:
        torch, clock, steps = self._torch, Clock(len(prompts)), []
        with torch.inference_mode():
            ids, past = torch.tensor(prompts), None
            for _ in range(count):
                output = self._model(
                    input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1
                )
                ids, past = output.logits[:, -1:].argmax(-1), output.past_key_values
                steps.append(ids[:, 0].tolist())
                clock.tick(len(prompts))
        return clock.timed([list(tokens) for tokens in zip(*steps, strict=True)])


class OpenVINO:
    """The `LLMPipeline` of OpenVINO GenAI, with keys and values in the type of the weights."""

    def __init__(self, task: dict[str, Any]) -> None:
        import openvino
        import openvino_genai

        self._openvino, self._genai = openvino, openvino_genai
        self.version = version("openvino-genai")
        dtype = {"float32": "f32", "bfloat16": "bf16"}[task["dtype"]]
        self._pipeline = openvino_genai.LLMPipeline(
            task["path"],
            "CPU",
            INFERENCE_PRECISION_HINT=dtype,
            KV_CACHE_PRECISION=dtype,
            DYNAMIC_QUANTIZATION_GROUP_SIZE=0,
            INFERENCE_NUM_THREADS=task["threads"],
        )

    def generate(self, prompts: list[list[int]], count: int) -> Timed:
        import numpy as np

        genai, tensor = self._genai, self._openvino.Tensor
        config = genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = count, True, False
        ids = np.array(prompts, np.int64)
        inputs = genai.TokenizedInputs(tensor(ids), tensor(np.ones_like(ids)))
        clock = Clock(len(prompts))
        result = self._pipeline.generate(inputs, config)
        clock.tick(len(prompts) * count)
        # A streamer runs in a thread of its own, which may see the first token late.
        clock.first = clock.start + result.perf_metrics.get_ttft().mean / 1e3
        return clock.timed([list(tokens) for tokens in result.tokens])


class OnnxRuntime:
    """The generator of ONNX Runtime GenAI on its CPU provider."""

    def __init__(self, task: dict[str, Any]) -> None:
        import onnxruntime_genai

        self._genai, self.version = onnxruntime_genai, version("onnxruntime-genai")
        config = onnxruntime_genai.Config(task["path"])
        threads = {"intra_op_num_threads": task["threads"]}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": threads}}}))
        try:
            self._model = onnxruntime_genai.Model(config)
        except RuntimeError as error:
            if "Could not find an implementation" not in str(error):
                raise
            raise UnsupportedError(f"no {task['dtype']} kernels on CPUs") from error

    def generate(self, prompts: list[list[int]], count: int) -> Timed:
        import numpy as np

        clock, length = Clock(len(prompts)), len(prompts[0]) + count
        options = {"batch_size": len(prompts), "min_length": length, "max_length": length}
        parameters = self._genai.GeneratorParams(self._model)
        parameters.set_search_options(do_sample=False, **options)
        generator = self._genai.Generator(self._model, parameters)
        generator.append_tokens(np.array(prompts, np.int32))
        steps: list[list[int]] = []
        while len(steps) < count:
            generator.generate_next_token()
            steps.append([int(token) for token in generator.get_next_tokens()])
            clock.tick(len(prompts))
        return clock.timed([list(tokens) for tokens in zip(*steps, strict=True)])


class CTranslate2:
    """The `Generator` of CTranslate2; tokens are texts there, `t5` for the token 5."""

    def __init__(self, task: dict[str, Any]) -> None:
        import ctranslate2

        self.version, dtype = ctranslate2.__version__, task["dtype"]
        if dtype not in ctranslate2.get_supported_compute_types("cpu"):
            raise UnsupportedError(f"no {dtype} on CPUs")
        threads = {"intra_threads": task["threads"], "inter_threads": 1}
        self._generator = ctranslate2.Generator(
            task["path"], device="cpu", compute_type=dtype, **threads
        )

    def generate(self, prompts: list[list[int]], count: int) -> Timed:
        clock = Clock(len(prompts))

        def count_token(_result: Any) -> bool:
            clock.tick()
            return False

        results = self._generator.generate_batch(
            [[f"t{token}" for token in prompt] for prompt in prompts],
            min_length=count,
            max_length=count,
            sampling_topk=1,
            include_prompt_in_result=False,
            callback=count_token,
        )
        return clock.timed([list(result.sequences_ids[0]) for result in results])


class LlamaCpp:
    """llama.cpp through llama-cpp-python.

    Keys and values are float16 in llama.cpp, which changes greedy tokens: float32 models have them
    in float32 here. For bfloat16 the default stays.
    """

    def __init__(self, task: dict[str, Any]) -> None:
        import llama_cpp

        self.version = f"{llama_cpp.__version__} (llama-cpp-python)"
        cache = {"type_k": 0, "type_v": 0} if task["dtype"] == "float32" else {}
        self._llama = llama_cpp.Llama(
            model_path=task["path"],
            n_ctx=task["context"],
            n_threads=task["threads"],
            n_threads_batch=task["threads"],
            verbose=False,
            **cache,
        )

    def generate(self, prompts: list[list[int]], count: int) -> Timed:
        if len(prompts) > 1:
            raise UnsupportedError("the Python API takes one prompt")
        clock, tokens = Clock(), []
        self._llama.reset()
        for token in self._llama.generate(prompts[0], temp=0.0, top_k=1, repeat_penalty=1.0):
            clock.tick()
            tokens.append(int(token))
            if len(tokens) == count:
                break
        return clock.timed([tokens])


ADAPTERS = {
    "tvm_ipc": TvmIpc,
    "torch": PyTorch,
    "torch-compiled": PyTorch,
    "openvino": OpenVINO,
    "onnxruntime": OnnxRuntime,
    "ctranslate2": CTranslate2,
    "llama.cpp": LlamaCpp,
}


def answer(task: dict[str, Any], engine: Any) -> tuple[dict[str, Any], Any]:
    """Do a task; return the answer, and the engine that later tasks use."""
    if task["do"] == "load":
        engine = ADAPTERS[task["engine"]](task)
        return {"version": engine.version}, engine
    tokens, first, rest = engine.generate(task["prompts"], task["count"])
    lengths = {len(of_prompt) for of_prompt in tokens}
    if len(tokens) != len(task["prompts"]) or lengths != {task["count"]}:
        raise RuntimeError(f"{sorted(lengths)} tokens; expected {task['count']} for each prompt")
    return {"tokens": tokens, "first": first, "rest": rest}, engine


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    engine: Any = None
    for line in sys.stdin:
        try:
            reply, engine = answer(json.loads(line), engine)
        except UnsupportedError as error:
            reply = {"unsupported": str(error)}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {str(error).strip() or 'no message'}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
