"""Pieces of an HTML page."""

from html import escape
from typing import Any


def section(title: str, inside: str) -> str:
    """A heading with its content; "" without content."""
    return f"<h2>{escape(title)}</h2>{inside}" if inside else ""


def grid(parts: list[str]) -> str:
    return f'<div class="charts">{"".join(parts)}</div>' if any(parts) else ""


def box(tone: str, said: str, more: str) -> str:
    """The verdict; `tone` is good, bad or wait. Both texts are HTML."""
    return f'<div class="verdict {tone}"><strong>{said}</strong><p>{more}</p></div>'


def table(header: list[str], body: list[list[Any]]) -> str:
    """A table of plain cells, which can be copied into a spreadsheet."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = "".join("<tr>" + "".join(f"<td>{_cell(value)}</td>" for value in row) + "</tr>" for row in body)
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'


def columns(records: list[dict], keys: dict[str, str]) -> str:
    """A table of records: heading -> key. Columns that no record fills are left out; "" without records."""
    kept = {name: key for name, key in keys.items() if any(record.get(key) is not None for record in records)}
    return table(list(kept), [[record.get(key) for key in kept.values()] for record in records]) if records else ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else escape(str(value))
