# SPDX-License-Identifier: Apache-2.0
"""HTML tables, which notebooks display for objects with a method `_repr_html_`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def html_table(title: str, headers: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Return a table with a title; all text is escaped.

    Parameters
    ----------
    title : a line above the table.
    headers : the headers of the columns; none for a table without them.
    rows : the cells of each row.

    Examples
    --------
    >>> html_table("x < y", [], [["x", 1]])
    '<div>x &lt; y</div><table><tbody><tr><td>x</td><td>1</td></tr></tbody></table>'
    """
    head = f"<thead>{_row('th', headers)}</thead>" if headers else ""
    body = "".join(_row("td", row) for row in rows)
    return f"<div>{escape(title)}</div><table>{head}<tbody>{body}</tbody></table>"


def _row(tag: str, cells: Sequence[object]) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(str(cell))}</{tag}>' for cell in cells)}</tr>"
