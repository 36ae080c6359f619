# SPDX-License-Identifier: Apache-2.0
"""What `faults.py` disturbs: a session over nodes, until an error ends it, and another one.

Its outputs are lines of JSON. Between the sessions it waits for a line of input.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tvm_ipc.errors import IPCError


def say(what: str, **fields: Any) -> None:
    print(json.dumps({"what": what, "at": time.time(), **fields}), flush=True)


def run(given: dict[str, Any], rounds: int) -> None:
    import tvm_ipc
    from tvm_ipc.nodes.launcher import Places

    places = Places(tuple(given["hosts"]), given["network"], Path(given["shell"]))
    sys.path.insert(0, str(Path(__file__).parent))
    try:
        with tvm_ipc.Session(given["workers"], hosts=places, timeout=given["timeout"]) as session:
            session.import_python_module("fault_step")
            play = session.get_global_func("tests.nodes.fault_step")
            for seed in range(rounds):
                play(seed)
                session.sync()
                if seed == 0:
                    say("ready")
        say("ended")
    except IPCError as error:
        say("error", kind=type(error).__name__, text=str(error))
    except BaseException as error:
        say("other error", kind=type(error).__name__, text=str(error))
        raise


def main() -> None:
    given = json.loads(sys.argv[1])
    run(given, 1 << 30)
    say("closed")
    sys.stdin.readline()
    run(given, 5)


if __name__ == "__main__":
    main()
