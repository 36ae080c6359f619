# SPDX-License-Identifier: Apache-2.0
"""Makes a module with collectives refuse a session of another size than it was compiled for.

Before:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        ...
        R.call_packed("runtime.disco.allreduce", a, R.shape([0]), False, b)

After, for 4 workers in 2 groups:
    @R.function
    def main(x: R.Tensor((4,), "float32")):
        R.call_packed("tvm_ipc.require_workers", 4, 2)
        ...
        R.call_packed("runtime.disco.allreduce", a, R.shape([0]), False, b)

    @R.function
    def tvm_ipc_require_workers():
        R.call_packed("tvm_ipc.require_workers", 4, 2)
        return R.tuple()

On another number of workers such a program gives sums of some of the parts, and no error. The extra
function is for who loads the module: `tvm_ipc.Session` calls it. The calls are for who does not. A
module without a collective stays as it is, and runs anywhere.

Runs after `RemovePurityChecking`, since the calls are not pure, and after `RewriteCUDAGraph`.
"""

from __future__ import annotations

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.contract import MAX_WORKERS, MODULE_CHECK, programs
from tvm_ipc.errors import TransformError
from tvm_ipc.transform.ir.build import NOTHING, do
from tvm_ipc.transform.ir.collectives import needs_peers
from tvm_ipc.transform.ir.rewrite import begin_with, calls, change_functions, typed
from tvm_ipc.transform.module_pass import module_pass

_NAME = "RequireWorkers"
_REQUIRE = relax.ExternFunc(programs.REQUIRE_WORKERS.name)


@module_pass
class RequireWorkers:
    """Let every function that depends on other workers check how many there are.

    Parameters
    ----------
    world_size : the number of workers of the session.
    num_groups : the number of its groups.

    Raises
    ------
    TransformError
        The module has a function of the name that the check gets.
    """

    world_size: int
    num_groups: int = 1

    def __post_init__(self) -> None:
        self.world_size, self.num_groups = arguments.workers(
            _NAME, "world_size", self.world_size, self.num_groups, MAX_WORKERS
        )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the calls, and with the function that is one."""
        result = change_functions(mod, self._checked)
        if result is mod:
            return mod
        if any(name.name_hint == MODULE_CHECK for name in mod.get_global_vars()):
            raise TransformError(
                f"{_NAME}: the module has a function {MODULE_CHECK!r} already; run this pass "
                "once, and call no function of yours so"
            )
        result[MODULE_CHECK] = self._alone()
        return result

    def _checked(self, _name: str, function: relax.Function) -> relax.Function:
        if not any(map(needs_peers, calls(function))):
            return function
        return begin_with(function, [self._check()])

    def _check(self) -> relax.Binding:
        return do(_REQUIRE, [relax.prim_value(self.world_size), relax.prim_value(self.num_groups)])

    def _alone(self) -> relax.Function:
        body = relax.SeqExpr([relax.BindingBlock([self._check()])], relax.Tuple([]))
        function = relax.Function([], typed(body, NOTHING), NOTHING, is_pure=False)
        return function.with_attr("global_symbol", MODULE_CHECK)
