# SPDX-License-Identifier: Apache-2.0
"""Where things are drawn, and what the page and the terminal say about them."""

from __future__ import annotations

import re
from dataclasses import replace

from tests.tools.explain.plans import small_explanation, small_plan, tensor
from tvm_ipc.tools.explain import html_page, text_report
from tvm_ipc.tools.explain.memory_plan_chart_layout import bands, condense
from tvm_ipc.tools.explain.summary_sentences import assumptions, barrier_cost
from tvm_ipc.tools.format import bytes_text
from tvm_ipc.transform.report import Decision, Event, findings


def test_every_scope_has_a_band_and_so_has_what_is_outside_of_storages() -> None:
    planned, shared, own = bands(small_plan(), {"n": 100})
    assert (planned.scope, planned.bytes, planned.own) == ("global", 2048 + 400, False)
    assert (shared.scope, shared.bytes, shared.own) == ("ipc_memory", 512, False)
    assert (own.scope, own.bytes, own.own) == ("global", 1024, True)
    assert [(b.tensor.name, b.bottom, b.bytes) for b in planned.blocks] == [
        ("a", 0, 1024),
        ("b", 1024, 1024),
        ("d", 2048, 400),
    ]


def test_what_is_live_includes_what_peers_may_still_read() -> None:
    planned, shared, _ = bands(small_plan(), {"n": 100})
    assert planned.live == (1024, 2048, 1024, 0, 400, 400, 0)
    assert shared.live == (0, 0, 512, 512, 512, 512, 0)


def test_tensors_outside_of_storages_do_not_overlap() -> None:
    spans = [(0, 3), (1, 2), (2, 6), (4, 5)]
    own = [tensor(f"t{i}", *span, storage=-1) for i, span in enumerate(spans)]
    plan = replace(small_plan(), storages=(), tensors=tuple(own))
    (band,) = bands(plan, {})
    for one in band.blocks:
        for other in band.blocks:
            apart = (
                one.bottom + one.bytes <= other.bottom or other.bottom + other.bytes <= one.bottom
            )
            never = one.tensor.last < other.tensor.first or other.tensor.last < one.tensor.first
            assert one is other or apart or never


def test_events_that_concern_nothing_are_left_out() -> None:
    plan = small_plan()
    events = [part for event in plan.events for part in (Event("x = params[0]"), event)]
    wide = replace(
        plan,
        events=tuple(events),
        tensors=tuple(
            replace(
                t,
                first=2 * t.first + 1,
                last=2 * t.last + 1,
                peers_until=None if t.peers_until is None else 2 * t.peers_until + 1,
            )
            for t in plan.tensors
        ),
    )
    assert condense(wide) == plan
    assert condense(plan) == plan
    assert condense(replace(plan, tensors=(), events=(Event("x = y"),))).events == ()


def test_decisions_for_the_same_reason_are_one_line() -> None:
    def decision(number: int, reason: str) -> Decision:
        return Decision("P", "main", f"allreduce of lv{number} (sum)", "skipped", reason)

    same = [decision(i, f"{kind} of lv{i + 1}") for i in range(3) for kind in ["the float32"]]
    (one,) = findings(same)
    assert one.reason == "the float32 of \N{HORIZONTAL ELLIPSIS}"
    assert one.about == "allreduce of lv0 (sum) and 2 more"
    (alone,) = findings(same[:1])
    assert alone.reason == "the float32 of lv1"
    assert len(findings([decision(0, "of float16"), decision(1, "of float32")])) == 2


def test_numbers_of_bytes_for_people() -> None:
    texts = {0: "0 B", 1023: "1023 B", 1536: "1.50 KiB", 12 << 20: "12 MiB", 1 << 40: "1 TiB"}
    texts |= {int(123.4 * 1024): "123 KiB", int(12.34 * 1024): "12.3 KiB"}
    for count, expected in texts.items():
        assert bytes_text(count) == expected


def test_page_needs_nothing_from_elsewhere() -> None:
    html = html_page.render(small_explanation())
    assert not re.search(r"(src|href)\s*=\s*[\"']?(?!#)|@import|https?:|url\((?!#)", html)


def test_page_is_complete_without_its_script() -> None:
    html = html_page.render(small_explanation())
    html = re.sub(r"<script>.*</script>", "", html, flags=re.DOTALL)
    for words in (
        "peers may read it until event 5: allreduce(d)",
        "400 B (n * T.int64(4)) in global, symbolic at 0",
        "n = 100",
        "2 KiB",
        "25% of it",
        "barrier left out",
        "its input stays live until the allreduce of lv3",
        "exit barrier kept",
    ):
        assert words in html, words
    assert html.count('class="peers"') == 2  # one in the legend
    assert html.count('<line class="sync left-out"') == 4


def test_page_escapes_what_comes_from_the_module() -> None:
    evil = "<script>alert(\"1\")</script>&<b a=''>"
    explanation = small_explanation(evil, evil)
    plan = replace(
        small_plan(evil),
        events=(*small_plan().events[:6], Event(evil, evil, evil)),
        storages=tuple(replace(s, name=evil) for s in small_plan().storages),
        tensors=tuple(replace(t, name=evil, dtype=evil) for t in small_plan().tensors),
    )
    explanation.report.plans[:] = [plan]
    explanation.report.decisions[:] = [Decision(evil, evil, evil, evil, evil)]
    explanation.sizes[evil] = {evil: 3}
    html = html_page.render(explanation)
    assert "alert(" in html
    assert "<script>alert" not in html
    assert "<b a" not in html
    assert "&<b" not in html


def test_symbolic_sizes_are_said_once_where_all_functions_agree() -> None:
    explanation = small_explanation()
    explanation.sizes.update(main={"n": 1, "m": 2}, other={"n": 1, "m": 3})
    assert assumptions(explanation) == ["m = 2 in main", "m = 3 in other", "n = 1"]


def test_memory_for_the_sake_of_barriers_is_called_so() -> None:
    explanation = small_explanation()
    assert barrier_cost(explanation) == ""
    explanation.memory["main"].ours["ipc_memory"] = 1024
    assert barrier_cost(explanation).startswith(
        "512 B of ipc_memory keep inputs of collectives alive longer"
    )
    assert barrier_cost(explanation) in html_page.render(explanation)
    assert "512 B of ipc_memory" in text_report.render(explanation)


def test_page_of_a_module_without_anything_to_plan() -> None:
    explanation = small_explanation()
    explanation.report.plans.clear()
    explanation.report.decisions.clear()
    explanation.memory.clear()
    assert "allocates no tensors" in html_page.render(explanation)
    assert "allocates no tensors" in text_report.render(explanation)


def test_terminal_shows_the_plan() -> None:
    lines = text_report.render(small_explanation()).splitlines()
    assert max(map(len, lines)) < 80
    assert (
        "Function main: 7 events, 2 collectives; 1 of 2 with their input in ipc_memory have no "
        in (" ".join(lines))
    )
    picture = lines[lines.index("  ipc_memory, 512 B") + 1]
    assert re.fullmatch(r" {22}█{20}/{20}", picture), picture
    assert any(re.fullmatch(r" +\| +B", line) for line in lines)


def test_picture_in_ascii() -> None:
    rich, plain = (
        text_report.render(small_explanation(), plain=p).splitlines() for p in (False, True)
    )
    assert all(line.isascii() for line in plain)
    assert [len(line) for line in plain] == [len(line) for line in rich]
    picture = plain[plain.index("  ipc_memory, 512 B") + 1]
    assert re.fullmatch(r" {22}#{20}/{20}", picture), picture
