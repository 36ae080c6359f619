# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc explain`: what the pipeline does to a module, as a page or in the terminal.

`command` reads the command line and `load` the module; `examine` sends it through the pipeline;
`live` counts bytes without the planner's help; `layout` places a plan in the plane; `page` with
`drawing`, and `text`, show it, with `words` in common.
"""

from tvm_ipc.explain.command import main

__all__ = ["main"]
