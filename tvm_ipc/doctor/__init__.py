# SPDX-License-Identifier: Apache-2.0
"""`tvm-ipc doctor`: what works on this machine, what does not, and why.

facts     all that is found out      compiler  the one that TVM would link with
machine   what the system allows     reason    an error as one line
table     the facts for people
nodes     several machines, tried and timed (`--hosts`); ping is what their workers do
"""

from tvm_ipc.doctor.facts import examine
from tvm_ipc.doctor.nodes import examine_hosts, render_hosts
from tvm_ipc.doctor.table import render

__all__ = ["examine", "examine_hosts", "render", "render_hosts"]
