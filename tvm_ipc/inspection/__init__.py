# SPDX-License-Identifier: Apache-2.0
"""What the pipeline does to a module, as data: the demo counts it, `tvm-ipc explain` shows it.

`explanation` sends the module through the pipeline and compares memory plans; `live` counts bytes
without the planner's help; `sizes` gives symbolic sizes numbers.
"""
