# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc explain`: what the pipeline does to a module, as a page or in the terminal.

`command` reads the command line and `load` the module, which `tvm_ipc.inspection` sends through the
pipeline; `layout` places a plan in the plane; `page` with `drawing`, and `text`, show it, with
`words` in common.
"""

from tvm_ipc.explain.command import main

__all__ = ["main"]
