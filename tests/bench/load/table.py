"""Rows as a Markdown table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Aligned, so that it reads in a terminal too. None is a dash."""
    cells = [["–" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(3, *(len(row[at]) for row in [head, *cells])) for at in range(len(head))]
    lines = [head, ["-" * width for width in widths], *cells]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )


def number(value: float | None, digits: int = 0) -> str | None:
    """With so many digits after the point."""
    return None if value is None else f"{value:.{digits}f}"
