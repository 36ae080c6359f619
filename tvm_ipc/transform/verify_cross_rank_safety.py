# SPDX-License-Identifier: Apache-2.0
"""The pass `VerifyCrossRankSafety`, an independent verifier of lowered programs.

It finds programs in which ranks overwrite data that their peers still read, and programs that
deadlock:

    s = R.memory.alloc_storage(R.shape([4096]), 0, "ipc_memory", "uint8")
    a = R.memory.alloc_tensor(s, 0, R.shape([1024]), "float32")
    cls.matmul(x, w0, a)
    R.call_packed("tvm_ipc.allreduce", a, 0, 0, 1, 1, b)  # flag 1: no exit barrier
    c = R.memory.alloc_tensor(s, 0, R.shape([1024]), "float32")
    cls.matmul(b, w1, c)                                   # a hazard: peers may still read `a`

**Memory.** After a collective without an exit barrier, peers may read its input until every rank
has returned from the next collective that synchronizes all of them, such as an all-reduce of the
same team or of all workers. Until then a rank must not write to the input, free its storage, or
return. The verifier also checks that no tensor is read after another one has overwritten it, and
that each tensor fits in its storage.

**Requests.** A request ("tvm_ipc.start") uses memory until the program waits for it. Until then
its outputs must not be read, and none of its operands may be written. Every path must wait for it.

**Order.** All ranks of a team must make the same calls in the same order, which may fail if the
condition of an `if` differs between ranks. The verifier knows values that are computed from the
number of a rank, and it knows that the result of an all-reduce, a gather or a broadcast is the same
on all of its ranks. If ranks take different branches, it simulates all ranks side by side, with
their requests, messages and exposed tensors. A rank that waits indefinitely is a hazard:

    rank = R.call_packed("runtime.disco.worker_rank")
    if rank == 0:
        R.call_packed("tvm_ipc.allreduce", x, 0, 0, 3, 0, y)   # a hazard: the others never call it

If the values of a condition are unknown, both branches must communicate in the same way; otherwise
the hazard is unknown.

The input is any module in destination-passing form, after the memory plan and before
`VMShapeLower`, which hides symbolic shapes. The verifier does not share the judgement of the passes
that make the plans. It assumes that unknown and recursive calls may write to all of their
arguments, except that it follows loops over a range of indices. It follows pending reads of private
functions into their callers; a public function must have none when it returns.

Sizes may be symbolic. A plan must be correct for all sizes without negative extents. If it is wrong
for some size, the hazard gives an example. If the verifier finds neither a proof nor an example,
the hazard is unknown.
"""

from __future__ import annotations

from dataclasses import field

import tvm

from tvm_ipc import arguments
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions import MAX_WORKERS
from tvm_ipc.transform.gc_paused import gc_paused
from tvm_ipc.transform.module_pass import ModulePass, module_pass, option
from tvm_ipc.transform.report import Decision, note
from tvm_ipc.verify import find_hazards
from tvm_ipc.verify.hazard_types_and_messages import Hazard, HazardKind, UselessOverlap
from tvm_ipc.verify.per_rank_and_uniform_values import RankModel

__all__ = ["Hazard", "HazardKind", "VerifyCrossRankSafety", "verify_cross_rank_safety"]

_NAME = "VerifyCrossRankSafety"


def verify_cross_rank_safety(
    mod: tvm.IRModule,
    *,
    assume_no_exit_barrier: bool = False,
    world_size: int | None = None,
    num_groups: int = 1,
) -> list[Hazard]:
    """Return all hazards of a module after memory planning, unknown ones included.

    Parameters
    ----------
    mod : a module in destination-passing form, as the memory plan or any later pass returns it.
    assume_no_exit_barrier : assume that no custom all-reduce has an exit barrier, as with
        upstream's kernels, except for strategy `AllReduceStrategy.DEFAULT`.
    world_size : the number of workers that will run the module. None takes it from teams that
        partition all ranks, or else tries a few numbers.
    num_groups : the number of groups of these workers; more than 1 needs `world_size`.

    Returns
    -------
    list of Hazard
        The hazards; the list is empty if the module is safe.

    Examples
    --------
    The program returns the output of a collective that it does not wait for:

    >>> import tvm
    >>> from tvm_ipc.transform import verify_cross_rank_safety
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32"), out: R.Tensor((8,), "float32")):
    ...         request = R.comm.start(R.comm.allgather(x, workers=2), out)
    ...         return out
    ... ''')
    >>> [hazard.kind.name for hazard in verify_cross_rank_safety(mod)]
    ['UNFINISHED', 'NEVER_WAITED']
    """
    where = "verify_cross_rank_safety"
    return _check(where, mod, assume_no_exit_barrier, world_size, num_groups)[0]


def _check(
    where: str,
    mod: tvm.IRModule,
    assume_no_exit_barrier: bool,
    world_size: int | None,
    num_groups: int,
) -> tuple[list[Hazard], list[UselessOverlap]]:
    """Check the arguments; return the hazards, and the transfers without any overlap."""
    arguments.instance(f"{where}: mod", mod, tvm.IRModule, "an IRModule")
    assumed = arguments.flag(f"{where}: assume_no_exit_barrier", assume_no_exit_barrier)
    world = _rank_model(where, world_size, num_groups)
    with gc_paused():
        return find_hazards(mod, assumed, world)


def _rank_model(where: str, world_size: int | None, num_groups: int) -> RankModel | None:
    if world_size is None:
        wanted = "a number of groups, 1 or more"
        if arguments.integer(f"{where}: num_groups", num_groups, wanted, 1) > 1:
            raise ValueError(
                f"{where}: num_groups is {num_groups}, but world_size is None; pass world_size too"
            )
        return None
    return RankModel(*arguments.workers(where, "world_size", world_size, num_groups, MAX_WORKERS))


@module_pass
class VerifyCrossRankSafety(ModulePass):
    """Reject a module in which `verify_cross_rank_safety` finds a hazard; return any other as is.

    Rejected, if `a` and `c` share a storage:

        R.call_packed("tvm_ipc.allreduce", a, 0, 0, 1, 1, b)   # 1: without an exit barrier
        cls.matmul(b, w, c)                                    # peers may still read `a`

    Accepted:

        R.call_packed("tvm_ipc.allreduce", a, 0, 0, 1, 0, b)   # 0: with an exit barrier
        cls.matmul(b, w, c)

    The report lists unknown hazards. It also lists requests and exposed tensors that the program
    waits for before it computes anything that could overlap with them.

    Parameters
    ----------
    assume_no_exit_barrier : see `verify_cross_rank_safety`.
    refuse_unknown : whether to reject a module with unknown hazards too.
    world_size : see `verify_cross_rank_safety`.
    num_groups : see `verify_cross_rank_safety`.

    Raises
    ------
    TransformError
        The module has hazards; the message lists all of them.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import VerifyCrossRankSafety
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")):
    ...         disco = "runtime.disco.allreduce"
    ...         R.call_packed(disco, x, R.shape([0]), False, y, ty_args=(R.Tuple,))
    ...         return y
    ... ''')
    >>> VerifyCrossRankSafety()(mod).same_as(mod)
    True
    """

    assume_no_exit_barrier: bool = option(arguments.flag, default=False)
    refuse_unknown: bool = option(arguments.flag, default=False)
    world_size: int | None = field(default=None, kw_only=True)
    num_groups: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        """Check the numbers of workers and groups."""
        _rank_model("VerifyCrossRankSafety", self.world_size, self.num_groups)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module unchanged."""
        hazards, useless_overlaps = _check(
            _NAME, mod, self.assume_no_exit_barrier, self.world_size, self.num_groups
        )
        for overlap in useless_overlaps:
            reason = (
                f"`{overlap.awaited}` waits for it, and nothing is computed since `{overlap.begun}`"
            )
            note(Decision(_NAME, overlap.function, overlap.name, "overlap lost", reason))
        for hazard in hazards:
            if hazard.unknown:
                note(Decision(_NAME, hazard.function, hazard.memory, "not proved", str(hazard)))
        if not self.refuse_unknown:
            hazards = [hazard for hazard in hazards if not hazard.unknown]
        if hazards:
            lines = "\n".join(f"  {hazard}" for hazard in hazards)
            count = f"{len(hazards)} hazard{'s' * (len(hazards) != 1)}"
            raise TransformError(f"{_NAME}: {count}:\n{lines}")
        return mod
