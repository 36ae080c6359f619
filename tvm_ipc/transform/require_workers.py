# SPDX-License-Identifier: Apache-2.0
"""The pass `RequireWorkers`, which lets a compiled module check the size of its session."""

from __future__ import annotations

import tvm
from tvm import relax

from tvm_ipc import arguments
from tvm_ipc.analysis.binding_builders import NOTHING, do
from tvm_ipc.analysis.collective_calls import needs_peers
from tvm_ipc.analysis.walk_and_rewrite_bindings import begin_with, calls, change_functions, typed
from tvm_ipc.errors import TransformError
from tvm_ipc.packed_functions import MAX_WORKERS, MODULE_CHECK
from tvm_ipc.packed_functions.program_function_declarations import REQUIRE_WORKERS
from tvm_ipc.transform.module_pass import ModulePass, module_pass

_NAME = "RequireWorkers"
_REQUIRE = relax.ExternFunc(REQUIRE_WORKERS.name)


@module_pass
class RequireWorkers(ModulePass):
    """Let every function that needs other workers check the numbers of workers and groups.

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

    Without the check a program on another number of workers computes wrong sums and raises no
    error. `tvm_ipc.Session` calls the extra function when it loads the module. The calls in the
    other functions cover modules that are loaded in other ways. A module without collectives is
    unchanged and runs on any number of workers.

    Run this pass after `RemovePurityChecking`, because the calls are not pure, and after
    `RewriteCUDAGraph`.

    Parameters
    ----------
    world_size : the number of workers of the session.
    num_groups : the number of its groups.

    Raises
    ------
    TransformError
        The module already has a function named `tvm_ipc_require_workers`.

    Examples
    --------
    >>> import tvm
    >>> from tvm_ipc.transform import RequireWorkers
    >>> mod = tvm.script.from_source('''
    ... @I.ir_module
    ... class Model:
    ...     @R.function(pure=False)
    ...     def main(x: R.Tensor((4,), "float32"), y: R.Tensor((4,), "float32")):
    ...         disco = "runtime.disco.allreduce"
    ...         R.call_packed(disco, x, R.shape([0]), False, y, ty_args=(R.Tuple,))
    ...         return y
    ... ''')
    >>> [str(var.name_hint) for var in RequireWorkers(2)(mod).get_global_vars()]
    ['main', 'tvm_ipc_require_workers']
    """

    world_size: int
    num_groups: int = 1

    def __post_init__(self) -> None:
        """Check the numbers of workers and groups."""
        self.world_size, self.num_groups = arguments.workers(
            _NAME, "world_size", self.world_size, self.num_groups, MAX_WORKERS
        )

    def apply(self, mod: tvm.IRModule) -> tvm.IRModule:
        """Return the module with the calls and the function."""
        result = change_functions(mod, self._add_check)
        if result is mod:
            return mod
        if any(name.name_hint == MODULE_CHECK for name in mod.get_global_vars()):
            raise TransformError(
                f"{_NAME}: the module already has a function named {MODULE_CHECK!r}; run this "
                "pass only once, and give your own functions other names"
            )
        result[MODULE_CHECK] = self._check_function()
        return result

    def _add_check(self, _name: str, function: relax.Function) -> relax.Function:
        if not any(map(needs_peers, calls(function))):
            return function
        return begin_with(function, [self._check()])

    def _check(self) -> relax.Binding:
        return do(_REQUIRE, [relax.prim_value(self.world_size), relax.prim_value(self.num_groups)])

    def _check_function(self) -> relax.Function:
        body = relax.SeqExpr([relax.BindingBlock([self._check()])], relax.Tuple([]))
        function = relax.Function([], typed(body, NOTHING), NOTHING, is_pure=False)
        return function.with_attr("global_symbol", MODULE_CHECK)
