# SPDX-License-Identifier: Apache-2.0
"""What `faults.py` disturbs: sessions over nodes, each until an error or a line of input ends it.

A line of input starts the next session. Outputs are lines of JSON.
"""

from __future__ import annotations

import json
import select
import sys
import time
from pathlib import Path
from typing import Any

from tvm_ipc.errors import IPCError


def report(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, "at": time.time(), **fields}), flush=True)


def told() -> bool:
    """Whether there is a line of input, or its end."""
    return bool(select.select([sys.stdin], [], [], 0)[0])


def run(given: dict[str, Any]) -> None:
    import tvm_ipc
    from tvm_ipc.nodes.mpiexec_launcher import NodeAddresses

    places = NodeAddresses(tuple(given["hosts"]), given["network"], Path(given["shell"]))
    rounds = 0
    heard: list[IPCError] = []

    def hear(error: IPCError) -> None:
        if not heard:
            report("error", kind=type(error).__name__, text=str(error), rounds=rounds)
        heard.append(error)

    try:
        with tvm_ipc.Session(given["workers"], hosts=places, timeout=given["timeout"]) as session:
            try:
                session.import_python_module("tests.nodes.fault_step")
                play = session.get_global_func("tests.nodes.fault_step")
                while not told():
                    play(rounds)
                    session.sync()
                    rounds += 1
                    if rounds == 1:
                        report("ready")
                sys.stdin.readline()
            except IPCError as error:  # before the session ends what is left
                hear(error)
                raise
        report("ended", rounds=rounds)
    except IPCError as error:
        hear(error)
    except BaseException as error:
        report("other error", kind=type(error).__name__, text=str(error))
        raise
    report("closed")


def main() -> None:
    given = json.loads(sys.argv[1])
    sys.path.append(str(Path(__file__).resolve().parents[2]))  # for workers
    import tvm_ipc  # noqa: F401  (before a session is timed)

    while sys.stdin.readline():
        run(given)


if __name__ == "__main__":
    main()
