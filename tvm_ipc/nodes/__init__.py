# SPDX-License-Identifier: Apache-2.0
"""Sessions over several machines: who may join, and how nodes start.

A node is a machine, or what stands for one. On each runs an agent, an MPI
rank of its own, which starts that node's workers; the user's program, the controller, is no rank.

- `handshake.py`: two processes prove to each other that they know the session's secret.
- `door.py`: where the controller lets in those that it expects, and nobody else.
- `interface.py`: the address where it is.
- `mpi.py`, `launcher.py`: which MPI is there, and how it starts something on each node.
- `agent.py`, `controller.py`: the two sides, and `messages.py`, what they say to each other;
  `proof.py`: which nodes share memory with the controller; `hub.py`: the hub of a node;
  `watcher.py`: what ends an agent that hangs while it starts.
- `allocation.py`: `tvm-ipc node`, where a launcher of the user's gives the nodes.
- `option.py`: the option `--hosts` of commands.
- `hosts.py`, `pool.py`: what a session gives, and asks of its workers (`runtime/pools.py`).
"""
