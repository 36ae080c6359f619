# SPDX-License-Identifier: Apache-2.0
"""HTML of objects in notebooks."""

from __future__ import annotations

from tvm_ipc.html_tables import html_table


def test_text_is_escaped() -> None:
    html = html_table("<b>&", ["<th>"], [["<script>alert('x')</script>", 3]])
    assert html == (
        "<div>&lt;b&gt;&amp;</div><table><thead><tr><th>&lt;th&gt;</th></tr></thead><tbody><tr>"
        "<td>&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt;</td><td>3</td></tr></tbody></table>"
    )


def test_a_table_without_headers() -> None:
    assert html_table("x", [], []) == "<div>x</div><table><tbody></tbody></table>"
