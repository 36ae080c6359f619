# SPDX-License-Identifier: Apache-2.0
"""A model that is imported into Relax for one device, and its files in the cache.

The import needs PyTorch and transformers, and takes most of the time of a compilation. The imported
program is the same for all plans, and for all numbers of workers that the key/value heads can be
sharded for. So it is cached on disk, apart from the compiled libraries.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import tvm

from tvm_ipc.models.hf.compile_cache import KvCacheSpec, check_ownership

PREFILL: Final = "prefill"
DECODE: Final = "decode"
DECODE_BATCH: Final = "decode_batch"


@dataclass(frozen=True, eq=False)
class Decoder:
    """A causal language model as Relax functions for one device.

    Attributes
    ----------
    module : the functions `prefill` and `decode`, or `decode_batch`.
    names : the names of the weights in checkpoints and plans, by the names of the parameters.
    plan : the model's own sharding plan; empty if it has none.
    caches : the keys and the values of each layer, in turn.
    vocabulary : the number of tokens in the vocabulary.
    ignored : regular expressions for names in checkpoints that are not parameters.
    heads : the key/value heads of a layer; None if the model does not specify them.
    """

    module: tvm.IRModule
    names: Mapping[str, str]
    plan: Mapping[str, str]
    caches: tuple[KvCacheSpec, ...]
    vocabulary: int
    ignored: tuple[str, ...]
    heads: int | None


def shards_heads(heads: int | None, workers: int) -> bool:
    """Return whether ranks share the key/value heads, which decides how attention is exported."""
    return heads is None or heads % workers == 0


def read_decoder(entry: Path, workers: int) -> Decoder | None:
    """Return the cached decoder that fits a number of workers; None if there is none.

    Parameters
    ----------
    entry : the folder of the model in the cache.
    workers : the number of ranks that will run the model.
    """
    for is_sharded in (True, False):
        path = _path(entry, is_sharded)
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            check_ownership(entry.parent, entry, path)
            head, _, body = path.read_text().partition("\n")
            if head != _digest(body):
                continue  # it is damaged, and written again
            fields = json.loads(body)
            if shards_heads(fields["heads"], workers) == is_sharded:
                caches = tuple(KvCacheSpec(*cache) for cache in fields.pop("caches"))
                module = tvm.ir.load_json(fields.pop("module"))
                ignored = tuple(fields.pop("ignored"))
                return Decoder(module=module, caches=caches, ignored=ignored, **fields)
    return None


def write_decoder(entry: Path, workers: int, decoder: Decoder) -> None:
    """Write a decoder to the cache atomically, and ignore errors of the file system."""
    fields = {
        "module": tvm.ir.save_json(decoder.module),
        "names": dict(decoder.names),
        "plan": dict(decoder.plan),
        "caches": [[cache.heads, cache.dim, cache.dtype] for cache in decoder.caches],
        "vocabulary": decoder.vocabulary,
        "ignored": list(decoder.ignored),
        "heads": decoder.heads,
    }
    body = json.dumps(fields)
    with contextlib.suppress(OSError):
        entry.mkdir(parents=True, exist_ok=True)
        check_ownership(entry.parent, entry)
        file, temporary = tempfile.mkstemp(prefix=".decoder-", dir=entry)
        with os.fdopen(file, "w") as out:
            out.write(f"{_digest(body)}\n{body}")
        Path(temporary).replace(_path(entry, shards_heads(decoder.heads, workers)))


def _path(entry: Path, is_sharded: bool) -> Path:
    return entry / f"decoder-{'sharded' if is_sharded else 'repeated'}.json"


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()
