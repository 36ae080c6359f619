# SPDX-License-Identifier: Apache-2.0
"""Finds where ranks of a lowered program spoil each other's data, or wait for each other for ever.

    s = R.memory.alloc_storage(R.shape([4096]), 0, "ipc_memory", "uint8")
    a = R.memory.alloc_tensor(s, 0, R.shape([1024]), "float32")
    cls.matmul(x, w0, a)
    R.call_packed("tvm_ipc.allreduce", a, 0, 0, 1, 1, b)  # 1: no barrier at its end
    c = R.memory.alloc_tensor(s, 0, R.shape([1024]), "float32")
    cls.matmul(b, w1, c)                                   # a hazard: peers may still read `a`

After a collective without an exit barrier, peers may read its input until every rank has returned
from the next collective in which all of them meet: an all-reduce, say, of the same team or of all
workers. Until then a rank must not write there, free the storage, or return. The check
also looks whether a tensor is read after another one was written over it, and whether it lies in
its storage, which a right plan of one rank takes for granted.

A work that was posted ("tvm_ipc.post") uses memory until somebody has waited for it. Until then
what it writes must not be read, and nothing that it uses be written; and on every path somebody
waits.

All ranks of a team have to make the same calls in the same order. That may fail where a condition
of an `if` is not the same on all of them. What was computed from a rank's number is known for each
rank; what came out of an all-reduce, a gather or a broadcast is the same on all of its ranks. Where
ranks take different branches, all of them are run one beside the other, with their works, messages
and shows, and who waits for ever is a hazard:

    rank = R.call_packed("runtime.disco.worker_rank")
    if rank == 0:
        R.call_packed("tvm_ipc.allreduce", x, 0, 0, 3, 0, y)   # a hazard: the others never come

Where neither is so, both branches have to do the same with other ranks; else the hazard is unknown.

It runs on any module in destination-passing form, after the memory plan; before `VMShapeLower`,
which hides symbolic shapes, so that what they decide is unknown. It is independent of the passes
that make the plans, and doubts calls that it does not know: they may write all that they are given,
and so may recursive ones. Values that a function of the module leaves to be read are followed into
its callers; those of a function that others can call are a hazard when it returns.

Sizes may be symbolic. A tensor is there only where none of its extents is negative, and a plan must
be right for all such sizes. It is unsafe if it is wrong for some, of which the hazard gives an
example; where neither a proof nor an example is found, the hazard is unknown.
"""

from __future__ import annotations

from dataclasses import field

import tvm

from tvm_ipc import arguments
from tvm_ipc.contract import MAX_WORKERS
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.collection import no_collection
from tvm_ipc.transform.module_pass import module_pass, option
from tvm_ipc.transform.report import Decision, note
from tvm_ipc.transform.safety.hazards import Alone, Hazard, HazardKind
from tvm_ipc.transform.safety.interpret import Checker
from tvm_ipc.transform.safety.known import World

__all__ = ["Hazard", "HazardKind", "VerifyCrossRankSafety", "verify_cross_rank_safety"]

_NAME = "VerifyCrossRankSafety"


def verify_cross_rank_safety(
    mod: tvm.IRModule,
    *,
    assume_no_exit_barrier: bool = False,
    world_size: int | None = None,
    num_groups: int = 1,
) -> list[Hazard]:
    """Return every hazard of a module that memory was planned for, those that are unknown too.

    Parameters
    ----------
    mod : in destination-passing form, as the memory plan or any later pass leaves it.
    assume_no_exit_barrier : judge as if no custom all-reduce had an exit barrier, as is so with
        upstream's kernels, but for those of strategy RING.
    world_size : the number of workers that will run it. None means that the program says it, by
        teams that all ranks are divided into, or that it is tried with a few of them.
    num_groups : the number of groups that they will be in, where there is a `world_size`.
    """
    where = "verify_cross_rank_safety"
    return _check(where, mod, assume_no_exit_barrier, world_size, num_groups)[0]


def _check(
    where: str,
    mod: tvm.IRModule,
    assume_no_exit_barrier: bool,
    world_size: int | None,
    num_groups: int,
) -> tuple[list[Hazard], list[Alone]]:
    """Return hazards, and what goes on beside nothing."""
    arguments.instance(f"{where}: mod", mod, tvm.IRModule, "an IRModule")
    assumed = arguments.flag(f"{where}: assume_no_exit_barrier", assume_no_exit_barrier)
    world = _world(where, world_size, num_groups)
    with no_collection():
        checker = Checker(mod, assumed, world)
        return checker.check(), list(checker.alone.values())


def _world(where: str, world_size: int | None, num_groups: int) -> World | None:
    if world_size is None:
        wanted = "a number of groups, 1 or more"
        if arguments.integer(f"{where}: num_groups", num_groups, wanted, 1) > 1:
            raise ValueError(f"{where}: num_groups needs a world_size that is divided into them")
        return None
    return World(*arguments.workers(where, "world_size", world_size, num_groups, MAX_WORKERS))


@module_pass
class VerifyCrossRankSafety:
    """Refuse a module in which `verify_cross_rank_safety` finds a hazard.

    Hazards that are unknown are noted in the report, and so are works and shows that go on beside
    nothing: they are waited for before anything is done that they could overlap with.

    Parameters
    ----------
    assume_no_exit_barrier, world_size, num_groups : see `verify_cross_rank_safety`.
    refuse_unknown : refuse a module for those as well.

    Raises
    ------
    TransformError
        Its message lists all hazards.
    """

    assume_no_exit_barrier: bool = option(arguments.flag, default=False)
    refuse_unknown: bool = option(arguments.flag, default=False)
    world_size: int | None = field(default=None, kw_only=True)
    num_groups: int = field(default=1, kw_only=True)

    def __post_init__(self) -> None:
        _world("VerifyCrossRankSafety", self.world_size, self.num_groups)

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module as it is."""
        hazards, alone = _check(
            _NAME, mod, self.assume_no_exit_barrier, self.world_size, self.num_groups
        )
        for one in alone:
            reason = f"`{one.needed}` waits for it, and nothing is done since `{one.begun}`"
            note(Decision(_NAME, one.function, one.name, "overlap lost", reason))
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
