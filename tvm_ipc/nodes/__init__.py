# SPDX-License-Identifier: Apache-2.0
"""Run the workers of a session on several machines.

A node is a machine, or a simulated one on this machine. Each node runs an agent, which is a rank of
MPI and starts the workers of the node. The user's program is the controller, and not a rank of MPI.

- `session_hosts_argument.py`, `cli_hosts.py`: read the argument `hosts=` and the option `--hosts`.
- `start_and_watch_agents.py`: the worker pool of a session on nodes, for
  `runtime/worker_pool_interface.py`; `agent.py`: its other side, on each node;
  `controller_agent_json_messages.py`: the messages between them.
- `handshake.py`: mutual authentication with the session's secret; `admission.py`: the listener that
  admits the expected processes; `listen_address.py`: the address that it listens on.
- `find_mpi_installation.py`, `mpiexec_launcher.py`: find MPI, and start a program on each node with
  `mpiexec`.
- `session_server_in_node_agent.py`, `mpi_progress_thread.py`: the session server of a node, and the
  thread that calls MPI.
- `shm_probe.py`: tests whether a node shares memory with the controller;
  `agent_startup_watchdog.py`: ends an agent that hangs during its start.
- `node_command_under_mpiexec.py`: `tvm-ipc node`, for nodes that the user's own launcher provides.
"""
