# SPDX-License-Identifier: Apache-2.0
"""Collectives to try, what goes in, and what must come out, bit for bit."""

from __future__ import annotations

import functools
import itertools
import re
import threading
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.collective_results import Array, Member, result_of
from tvm_ipc.packed_functions import KINDS, REDUCED_TYPES, AllReduceStrategy, ReduceKind

SOURCES = Path(__file__).resolve().parents[2] / "tvm_ipc" / "csrc"
REDUCED = (
    *("float16", "bfloat16", "float32", "float64"),
    *("int8", "uint8", "int32", "int64", "uint64", "bool"),
)
MOVED = (*REDUCED, "float8_e4m3fn", "float8_e5m2")
MEMORIES = ("arena", "private", "mixed")
REDUCTIONS = tuple(kind.name for kind in KINDS.values() if kind.reduces)
#: Whose inputs have a part for each rank.
DIVIDED = tuple(kind.name for kind in KINDS.values() if kind.splits)
#: Those that Disco has too, from and to the first rank.
GATHERS = tuple(kind.name for kind in KINDS.values() if kind.disco and not kind.reduces)
#: All others with a packed function of their own.
EXCHANGES = (
    *(kind.name for kind in KINDS.values() if not (kind.packed or kind.disco or kind.reduces)),
    "all_to_all_parts",
)


def native_entries() -> dict[str, tuple[str, frozenset[str]]]:
    """The relation of send and recv of each collective, and the backends that have a kernel.

    They are those of the native core, which has a table of them.
    """
    text = (SOURCES / "core" / "collective_list.h").read_text()
    columns = r",[\s\\]*".join([r'"(\w+)"', r"k(\w+)", *[r"([01])"] * 3])
    backends = ("mpi", "cuda", "nccl")
    return {
        name: (relation, frozenset(["shm", *itertools.compress(backends, map(int, kernels))]))
        for name, relation, *kernels in re.findall(columns, text)
    }


_NATIVE = native_entries()
assert _NATIVE.keys() >= {kind.name for kind in KINDS.values() if kind.packed is None}
#: Those whose input and output must not overlap.
APART = (
    *(name for name, (relation, _) in _NATIVE.items() if relation in ("EqualAndApart", "Splits")),
    "all_to_all_parts",
)


def runs_on(operation: str, backend: str) -> bool:
    """Return whether a backend has an operation; all have those that are no collectives."""
    entry = _NATIVE.get(operation.removesuffix("_parts"))
    return entry is None or backend in entry[1]


def threshold(file: str, name: str) -> int:
    """A constant of the native core, in bytes."""
    text = (SOURCES / file).read_text()
    found = re.search(rf"constexpr size_t {name} = (\d+)u? << (\d+);", text)
    assert found, f"{name} is not in {file} in the form that this test reads"
    return int(found[1]) << int(found[2])


EAGER = threshold("shm/collectives.h", "kEagerBytes")
SLICE = threshold("shm/allreduce.cc", "kSliceBytes")
STAGE = threshold("core/shared_memory_layout.h", "kStageBytes")
PACKET = threshold("core/shared_memory_layout.h", "kPacketBytes")
STREAM = threshold("shm/collectives.h", "kStreamBytes")


@dataclass(frozen=True)
class Case:
    """One collective. `count` is of the smaller of its input and output."""

    operation: str
    count: int
    dtype: str = "float32"
    kind: int = ReduceKind.SUM
    strategy: int = AllReduceStrategy.DEFAULT
    flags: int = 0
    #: Where inputs lie: "arena", "private", or "mixed", which is one on even ranks, one on odd.
    memory: str = "private"
    in_place: bool = False
    #: Elements before the tensors in their storages.
    offset: int = 0
    #: Of a gather or scatter: whether it is one with a root and flags, or as Disco has it.
    rooted: bool = False
    #: How often it is done with the same memory, and the how many-th time this is.
    rounds: int = 1
    round: int = 0
    #: The node of each member; nothing: all are on one machine.
    nodes: tuple[int, ...] = ()


def sizes(ranks: int, dtype: str, thresholds: tuple[int, ...]) -> list[int]:
    """Small counts, those around the thresholds, and a large one that nothing divides."""
    width = numpy_type(dtype).itemsize
    # What is one more goes another way; with many ranks that has to do, for the time it takes.
    steps = (-1, 0, 1) if ranks <= 3 else (1,)
    around = {bytes_ // width + step for bytes_ in thresholds for step in steps}
    large = {3 * STAGE // width + 13} if ranks <= 3 else set()
    return sorted({0, 1, 7, 1000, ranks * 64 + 1} | around | large)


def reductions(dtype: str) -> list[ReduceKind]:
    return [kind for kind in ReduceKind if kind.takes(dtype)]


def _ways(ranks: int) -> tuple[int, ...]:
    """Bytes where an all-reduce begins to go another way, or to take one more piece."""
    return (EAGER, SLICE, STAGE, ranks * STAGE)


#: A number of kinds that is coprime to the numbers of strategies and memories.
_WAY_KINDS = (*list(ReduceKind)[:5], ReduceKind.TREE_SUM, ReduceKind.TREE_SUM)


def allreduces_by_way(ranks: int) -> Iterator[Case]:
    """Every size, strategy, memory, and in place or not; the rest takes turns."""
    turn = itertools.count()
    for count, strategy, memory, in_place in itertools.product(
        sizes(ranks, "float32", _ways(ranks)), AllReduceStrategy, MEMORIES, (False, True)
    ):
        i = next(turn)
        kind, flags, offset = _WAY_KINDS[i % len(_WAY_KINDS)], i % 2, (0, 0, 3, 64)[i % 4]
        yield Case("allreduce", count, "float32", kind, strategy, flags, memory, in_place, offset)


def allreduces_by_type(ranks: int, dtype: str) -> Iterator[Case]:
    """Every size and memory, and every reduction at some; the rest takes turns."""
    turn, kinds = itertools.count(), reductions(dtype)
    for count, memory in itertools.product(sizes(ranks, dtype, _ways(ranks)), MEMORIES):
        i = next(turn)
        kind, in_place, offset = kinds[i % len(kinds)], i % 3 == 0, (0, 1, 5)[i % 3]
        yield Case("allreduce", count, dtype, kind, i % 4, 0, memory, in_place, offset)
    for kind, count in itertools.product(kinds, (1, 33, 1000)):
        yield Case("allreduce", count, dtype, kind)


def allreduces_of_one(ranks: int, dtype: str, strategy: int, memory: str) -> Iterator[Case]:
    """The same inputs whatever the strategy and the memory."""
    kinds = (ReduceKind.SUM, ReduceKind.PROD, ReduceKind.TREE_SUM)
    for kind, count in itertools.product(kinds, sizes(ranks, dtype, (EAGER, SLICE))):
        yield Case("allreduce", count, dtype, kind, strategy, memory=memory)


def moves(ranks: int, dtype: str) -> Iterator[Case]:
    """Gathers and scatters of every size, memory, and in place or not."""
    turn = itertools.count()
    # The root of a scatter has a part for every rank in its buffer.
    counts = sizes(ranks, dtype, (STAGE, STAGE // ranks // 64 * 64))
    for operation, count, memory, in_place in itertools.product(
        GATHERS, counts, MEMORIES, (False, True)
    ):
        offset = (0, 1, 5)[next(turn) % 3]
        yield Case(operation, count, dtype, memory=memory, in_place=in_place, offset=offset)


def rooted_moves(ranks: int, dtype: str) -> Iterator[Case]:
    """Likewise, from and to every member, with a barrier at the end and without."""
    for i, case in enumerate(moves(ranks, dtype)):
        yield replace(case, flags=i // 2 % 2, rooted=True)


def permutes(ranks: int, dtype: str) -> Iterator[Case]:
    """Every size and memory."""
    turn = itertools.count()
    for count, memory in itertools.product(sizes(ranks, dtype, (EAGER, STAGE)), MEMORIES):
        i = next(turn)
        yield Case("permute", count, dtype, flags=i % 2, memory=memory, offset=(0, 1, 5)[i % 3])


def reduce_scatters(ranks: int, dtype: str) -> Iterator[Case]:
    """Every size, memory, and in place or not; every reduction at some sizes."""
    turn, kinds = itertools.count(), reductions(dtype)
    counts = sizes(ranks, dtype, (EAGER // ranks, STAGE // ranks // 64 * 64))
    for count, memory, in_place in itertools.product(counts, MEMORIES, (False, True)):
        i = next(turn)
        kind, flags, offset = kinds[i % len(kinds)], i % 2, (0, 1, 5)[i % 3]
        yield Case("reduce_scatter", count, dtype, kind, 0, flags, memory, in_place, offset)
    for kind, count in itertools.product(kinds, (1, 33, 1000)):
        yield Case("reduce_scatter", count, dtype, kind, memory="arena")


def reduces(ranks: int, dtype: str) -> Iterator[Case]:
    """Every size, memory, and in place or not; roots and reductions take turns."""
    turn, kinds = itertools.count(), reductions(dtype)
    for count, memory, in_place in itertools.product(
        sizes(ranks, dtype, _ways(ranks)), MEMORIES, (False, True)
    ):
        i = next(turn)
        kind, flags, offset = kinds[i % len(kinds)], i // 2 % 2, (0, 1, 5)[i % 3]
        yield Case("reduce", count, dtype, kind, 0, flags, memory, in_place, offset)


def all_to_alls(ranks: int, dtype: str) -> Iterator[Case]:
    """Every size and memory."""
    turn = itertools.count()
    counts = sizes(ranks, dtype, (EAGER // ranks, STAGE // ranks // 64 * 64))
    for count, memory in itertools.product(counts, MEMORIES):
        i = next(turn)
        yield Case("all_to_all", count, dtype, flags=i % 2, memory=memory, offset=(0, 1, 5)[i % 3])


def all_to_alls_of_parts(ranks: int, dtype: str) -> Iterator[Case]:
    """Parts that are empty, small, whole buffers and more, beside each other."""
    turn = itertools.count()
    counts = sizes(ranks, dtype, (EAGER // ranks**2, STAGE // ranks // 64 * 64))
    for count, memory in itertools.product(counts, MEMORIES):
        i = next(turn)
        flags, offset = i % 2, (0, 1, 5)[i % 3]
        yield Case("all_to_all_parts", count, dtype, flags=flags, memory=memory, offset=offset)


def messages(ranks: int, dtype: str) -> Iterator[Case]:
    """From each to the next, in packets and whole; and between two that both send first."""
    counts = sizes(ranks, dtype, (PACKET, 2 * PACKET))
    for count, memory in itertools.product(counts, ("arena", "private")):
        yield Case("ring", count, dtype, memory=memory, offset=count % 3)
    packets = 2 * PACKET // numpy_type(dtype).itemsize
    for count in (0, 1, 7, packets // 2, packets // 2 + 1, packets):
        yield Case("exchange", count, dtype)


def one_of_each(ranks: int) -> Iterator[Case]:
    """One small collective of each kind."""
    for operation in (*REDUCTIONS, *EXCHANGES, *GATHERS, "ring"):
        yield Case(operation, 300, memory="mixed")


def small_ones(ranks: int) -> Iterator[Case]:
    """A bit of everything."""
    for operation, count, memory in itertools.product(
        (*REDUCTIONS, *EXCHANGES, *GATHERS, "ring"),
        (0, 1, 300),
        ("arena", "private"),
    ):
        for rooted in {False, operation in GATHERS}:
            yield Case(operation, count, memory=memory, rooted=rooted)
    yield Case("allreduce", SLICE // 4 + 1, memory="arena")


def storm(ranks: int, seed: int, count: int) -> Iterator[Case]:
    """Many in a row in no order, each over memory that the one before it used."""
    generator = np.random.default_rng(seed)
    for _ in range(count):
        operation = generator.choice((*REDUCTIONS, *EXCHANGES, *GATHERS, "ring"))
        dtype = str(generator.choice(("float32", "bfloat16", "int8")))
        size = int(generator.choice((1, 90, 4000, 20000)))
        kind, strategy, flags, memory, place = generator.integers(0, (5, 4, 2, 3, 2)).tolist()
        rooted = operation in GATHERS and strategy > 1
        if operation not in REDUCTIONS:
            kind = 0
            flags = flags if rooted or operation in EXCHANGES else 0
        if operation in ("ring", *APART):
            place = 0  # who receives first would lose what it has to send
        yield Case(
            str(operation),
            size,
            dtype,
            kind,
            strategy,
            flags,
            MEMORIES[memory],
            bool(place),
            0,
            rooted,
        )


def again_and_again(ranks: int, dtype: str) -> Iterator[Case]:
    """Every kind, in place and not, eight times on the same memory; the rest takes turns."""
    turn, kinds = itertools.count(len(dtype)), itertools.cycle(reductions(dtype))
    reduces = REDUCTIONS if dtype in REDUCED_TYPES else ()
    counts = (7, EAGER // numpy_type(dtype).itemsize + 1)  # copied, and read where it lies
    for operation, in_place in itertools.product((*reduces, *EXCHANGES, *GATHERS), (False, True)):
        if in_place and operation in APART:
            continue  # refused: peers read what would be written
        i, kind = next(turn), next(kinds) if operation in REDUCTIONS else 0
        count, memory, way = counts[i % 2], MEMORIES[i // 2 % 3], AllReduceStrategy.AUTO
        rooted = operation in GATHERS
        yield Case(operation, count, dtype, kind, way, 0, memory, in_place, 0, rooted, rounds=8)


def beyond_the_caches(ranks: int) -> Iterator[Case]:
    """Outputs that are written past the caches."""
    yield Case("allreduce", STREAM // 4 + 5, memory="arena", offset=3)
    yield Case("allgather", STREAM // 4 // ranks + 5, offset=3)


# ---- what goes in and what comes out --------------------------------------------------------


def numpy_type(dtype: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, dtype, None) or dtype)


_lock = threading.Lock()


def _once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compute once for ranks that are threads of one process and ask at the same time."""
    cached = functools.lru_cache(maxsize=16)(function)

    @functools.wraps(function)
    def locked(*args: Any) -> Any:
        with _lock:
            return cached(*args)

    return locked


@functools.cache
def _pool(dtype: str, narrow: bool) -> Array:
    """Values to take inputs from; `narrow` ones can be multiplied without end."""
    generator = np.random.default_rng(0)
    count, kind = (1 << 20) + 7, numpy_type(dtype)
    if dtype == "bool":
        return generator.random(count) < 0.8
    if np.issubdtype(kind, np.integer):
        limits = np.iinfo(kind)
        return generator.integers(limits.min, limits.max, count, dtype=kind, endpoint=True)
    spread = 1 if narrow else 8
    values = generator.standard_normal(count) * 2.0 ** generator.integers(-spread, spread, count)
    return np.asarray(values.astype(kind))


@_once
def inputs(case: Case, ranks: int, team: int) -> Array:
    """Each member's values, as rows; different for every team."""
    kind = KINDS.get(case.operation)
    one_sends = kind is not None and kind.source_on_root
    count = max(taken(case, ranks, index) for index in range(ranks))
    narrow = case.kind == ReduceKind.PROD or numpy_type(case.dtype).itemsize == 1
    pool = _pool(case.dtype, narrow)
    what = (case.operation, case.count, case.dtype, case.kind, team, case.round)
    generator = np.random.default_rng(zlib.crc32(repr(what).encode()))
    starts = generator.integers(0, len(pool) // 2, 1 if one_sends else ranks)
    rows = np.stack([np.resize(pool[start : start + count], count) for start in starts])
    if case.operation in REDUCTIONS and rows.dtype.kind not in "biu":
        _add_specials(rows)
    return np.broadcast_to(rows, (ranks, count))


def _add_specials(rows: Array) -> None:
    """Zeros of both signs, infinities, what is less than normal, what is not a number."""
    if rows.shape[1] >= 32:
        least = ml_dtypes.finfo(rows.dtype).smallest_subnormal
        first = (0.0, -0.0, -0.0, np.inf, -np.inf, np.inf, np.nan, least, 1.0)
        last = (-0.0, 0.0, -0.0, np.inf, -np.inf, -np.inf, 1.0, least, np.nan)
        rows[0, 3:12] = np.array(first).astype(rows.dtype)
        rows[-1, 3:12] = np.array(last).astype(rows.dtype)


@_once
def reduced(case: Case, ranks: int, team: int, count: int) -> Array:
    """The reduction of the values of the first members."""
    rows = inputs.__wrapped__(case, ranks, team)[:count]
    return reduce(rows, ReduceKind(case.kind), case.nodes[:count])


def reduce(rows: Array, kind: ReduceKind, nodes: tuple[int, ...] = ()) -> Array:
    """Rank after rank; 16-bit floats in float32, integers without limit, rounded once at the end.

    On several nodes rank after rank on each of them, and then node after node. `nodes` has the node
    of each rank. A tree sum is the same on any nodes.

    Sums and products of integers wrap at the end; those in 64 bits have wrapped the same by then.
    """
    dtype = rows.dtype
    if dtype.kind == "b":
        return rows.any(axis=0) if kind in _ANY else rows.all(axis=0)
    integer = np.issubdtype(dtype, np.integer)
    if not integer:
        wide = np.promote_types(dtype, np.float32)
    elif dtype.itemsize < 8:
        wide = np.dtype("int64")
    else:
        wide = np.dtype(object) if kind == ReduceKind.AVG else dtype  # Python's own, or as it is
    with np.errstate(all="ignore"):
        node_of = np.array(nodes or (0,) * len(rows))
        of_nodes = (rows[node_of == node].astype(wide) for node in sorted(set(node_of)))
        if kind == ReduceKind.TREE_SUM:
            total = tree_sum(list(rows.astype(wide)))
        else:
            total = functools.reduce(
                _STEP[kind], [functools.reduce(_STEP[kind], those) for those in of_nodes]
            )
        if kind == ReduceKind.AVG:
            total = _truncated(total, len(rows)) if integer else total / wide.type(len(rows))
        if not integer:
            total = np.where(np.isnan(rows.astype(wide)).any(axis=0), wide.type(np.nan), total)
        return np.asarray(total.astype(dtype))


def tree_sum(terms: list[Array]) -> Array:
    """Return the sum, which is split at the largest power of two below the number of terms."""
    if len(terms) == 1:
        return terms[0]
    half = 1 << (len(terms) - 1).bit_length() - 1
    return np.asarray(tree_sum(terms[:half]) + tree_sum(terms[half:]))


def _truncated(total: Array, ranks: int) -> Array:
    quotient = total // ranks
    return np.asarray(quotient + ((total % ranks != 0) & (total < 0)))


#: The reductions of bool that are true if any element is.
_ANY = (ReduceKind.SUM, ReduceKind.MAX, ReduceKind.TREE_SUM)

_STEP: dict[ReduceKind, Callable[[Array, Array], Array]] = {
    ReduceKind.SUM: lambda a, b: a + b,
    ReduceKind.PROD: lambda a, b: a * b,
    ReduceKind.MIN: lambda a, b: np.where(b < a, b, a),
    ReduceKind.MAX: lambda a, b: np.where(b > a, b, a),
    ReduceKind.AVG: lambda a, b: a + b,
    ReduceKind.BAND: lambda a, b: a & b,
    ReduceKind.BOR: lambda a, b: a | b,
    ReduceKind.BXOR: lambda a, b: a ^ b,
}


def expected(case: Case, ranks: int, team: int, index: int) -> Array | None:
    """What the member with this index holds afterwards; None if nothing comes out there."""
    rows = inputs(case, ranks, team)
    if case.operation == "all_to_all_parts":
        ends = np.cumsum(parts(case, ranks), axis=1)
        starts = ends - parts(case, ranks)
        pieces = [row[starts[i, index] : ends[i, index]] for i, row in enumerate(rows)]
        return np.concatenate(pieces)
    if case.operation == "ring":
        return np.asarray(rows[index - 1])
    if case.operation == "exchange":
        return np.asarray(rows[partner(ranks, index)])
    member = Member(
        rows,
        index,
        lambda some: np.asarray(reduced(case, ranks, team, len(some))),
        root(case, ranks),
        sources(case, ranks),
    )
    return result_of(case.operation, member)


def parts(case: Case, ranks: int) -> Array:
    """How many elements each member gives to each, in an all-to-all of unequal parts."""
    generator = np.random.default_rng((case.count, ranks))
    found = generator.integers(0, case.count + 1, (ranks, ranks))
    found[generator.random((ranks, ranks)) < 0.3] = 0
    found[generator.integers(ranks), generator.integers(ranks)] = case.count
    return found


def sources(case: Case, ranks: int) -> list[int]:
    """Whom each member receives from in a permutation, -1 for nobody."""
    generator = np.random.default_rng((case.count, ranks))
    return [int(source) for source in generator.integers(-1, ranks, ranks)]


def taken(case: Case, ranks: int, index: int) -> int:
    """How many elements the member with this index has to send."""
    if case.operation == "all_to_all_parts":
        return int(parts(case, ranks)[index].sum())
    return case.count * (ranks if case.operation in DIVIDED else 1)


def given(case: Case, ranks: int, index: int) -> int:
    """How many elements the member with this index receives, if any."""
    if case.operation == "all_to_all_parts":
        return int(parts(case, ranks)[:, index].sum())
    whole = case.operation in ("allgather", "gather", "all_to_all")
    return case.count * (ranks if whole else 1)


def root(case: Case, ranks: int) -> int:
    """The member that alone sends, or receives."""
    if case.operation in GATHERS and not case.rooted:
        return 0
    return (case.count + case.kind) % ranks


def partner(ranks: int, index: int) -> int:
    """The other one of a pair of neighbours; the last one of an odd number is alone."""
    return min(index ^ 1, ranks - 1)


def same(result: Array, wanted: Array) -> bool:
    """Whether all bits are equal; what is not a number may be written in several ways."""
    bits = np.dtype(f"u{result.itemsize}")
    equal = result.view(bits) == wanted.view(bits)
    if equal.all():
        return True
    if not np.issubdtype(result.dtype, np.floating) and result.dtype.kind != "V":
        return False
    with np.errstate(invalid="ignore"):
        both_nan = np.isnan(result.astype("float64")) & np.isnan(wanted.astype("float64"))
    return bool((equal | both_nan).all())
