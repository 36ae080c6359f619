# SPDX-License-Identifier: Apache-2.0
"""References and sessions as text, in a prompt and in a notebook."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest

import tvm_ipc
from tvm_ipc.errors import IPCError


def text(reference: Any) -> str:
    """Return what a reference refers to, without the session."""
    beginning, _, end = repr(reference).partition(" of <tvm_ipc.Session")
    assert end
    return beginning.removeprefix("<DRef: a tensor of shape ")


@pytest.fixture(scope="module")
def session() -> Any:
    with tvm_ipc.Session(4, num_groups=2, threads=True, timeout=60) as opened:
        yield opened


def test_tensors(session: Any) -> None:
    """The shape and type of what the controller sends, allocates and reduces."""
    x = session.put(np.ones((2, 3), "float16"))
    pair = session.team([3, 1])
    for reference, expected in (
        (x, "(2, 3) and type float16 on the workers"),
        (session.scatter(np.ones((4, 5)), in_group=False), "(5,) and type float64 on the workers"),
        (session.broadcast([1, 2], in_group=False), "(2,) and type int64 on the workers"),
        (session.empty((), "bfloat16"), "() and type bfloat16 on the workers"),
        (
            session.empty((0,), "int8", worker0_only=True),
            "(0,) and type int8 on the first worker of each group",
        ),
        (session.copy_to_worker_0(np.ones(2)), "(2,) and type float64 on worker 0"),
        (session.allreduce(x), "(2, 3) and type float16 on the workers"),
        (session.allgather(x), "(4, 3) and type float16 on the workers"),
        (session.allgather(x, in_group=False), "(8, 3) and type float16 on the workers"),
        (session.reduce_scatter(x), "(1, 3) and type float16 on the workers"),
        (session.all_to_all(x, team=pair), "(2, 3) and type float16 on workers 3, 1"),
        (session.reduce(x, root=1), "(2, 3) and type float16 on worker 1 of each group"),
        (session.reduce(x, root=1, in_group=False), "(2, 3) and type float16 on worker 1"),
        (session.reduce(x, root=1, team=pair), "(2, 3) and type float16 on worker 1"),
        (session.gather_to_worker0(x, team=pair), "(4, 3) and type float16 on worker 3"),
    ):
        assert text(reference) == expected
    session.sync()


def test_the_shape_is_that_of_the_tensor(session: Any) -> None:
    """For each collective that allocates, the repr has the shape and type that the workers have."""
    x = session.put(np.ones((4, 3), "float32"))
    names = ("allreduce", "allgather", "reduce_scatter", "all_to_all", "reduce")
    for in_group in (True, False):
        for name in (*names, "gather_to_worker0"):
            reference = getattr(session, name)(x, in_group=in_group)
            value = session.get(reference)
            assert text(reference).startswith(f"{value.shape} and type float32 on "), name


def test_values_of_functions(session: Any) -> None:
    """The controller does not know what a function returns."""
    value = session.get_global_func("runtime.disco.worker_rank")()
    assert repr(value) == f"<DRef: a value on the workers of {session!r}>"
    assert value._repr_html_() == (
        "<div>DRef: a value</div><table><tbody><tr><td>session</td><td>&lt;tvm_ipc.Session: "
        "4 threads in 2 groups, open&gt;</td></tr></tbody></table>"
    )


def test_html(session: Any) -> None:
    html = session.put(np.ones((2, 3), "float16"))._repr_html_()
    assert html.startswith(
        "<div>DRef: a tensor</div><table><tbody><tr><td>shape</td><td>(2, 3)</td></tr>"
        "<tr><td>type</td><td>float16</td></tr><tr><td>on</td><td>the workers</td></tr>"
    )
    assert "&lt;tvm_ipc.Session: 4 threads in 2 groups, open&gt;" in html
    html = session._repr_html_()
    assert "<td>workers</td><td>4 threads in 2 groups</td>" in html
    assert "<td>state</td><td>open</td>" in html
    assert f"<td>{', '.join([str(os.getpid())] * 4)}</td>" in html


def test_no_text_waits_for_workers() -> None:
    """They are texts of what the controller knows: also while workers are busy, or are gone."""
    with tvm_ipc.Session(2, threads=True, timeout=60) as session:
        x = session.put(np.ones(3))
        dispatcher = session._dispatcher
        before = dispatcher._last_command
        for thing in (x, session):
            assert "3" in repr(x)
            assert thing._repr_html_().startswith("<div>")
        assert dispatcher._last_command == before
    assert repr(x).endswith("on the workers of <tvm_ipc.Session: 2 threads, closed>>")
    assert "closed&gt;" in x._repr_html_()
    assert "<td>state</td><td>closed</td>" in session._repr_html_()
    not_started = tvm_ipc.Session.__new__(tvm_ipc.Session)
    assert "<td>no workers</td>" in not_started._repr_html_()


def test_a_worker_that_died() -> None:
    session = tvm_ipc.Session(2, timeout=60)
    x = session.put(np.ones(3))
    session.sync()
    os.kill(session.pids[1], signal.SIGKILL)
    with pytest.raises(IPCError):
        for _ in range(100):
            session.sync()
    assert repr(x).endswith("<tvm_ipc.Session: 2 processes, not usable>>")
    assert x._repr_html_().startswith("<div>DRef: a tensor</div>")
    html = session._repr_html_()
    assert "<td>state</td><td>not usable</td>" in html
    assert "<td>reason</td><td>" in html
    session.close()
