"""How messages and tables show sizes and durations."""

from collections.abc import Sequence


def size(count: float) -> str:
    """Bytes in the largest decimal unit of which there is at least a tenth, so that only nothing reads as zero."""
    for power, name in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB")):
        if count >= 0.1 * 1000**power:
            return f"{count / 1000**power:.2f} {name}"
    return f"{count:.0f} B"


def duration(seconds: float) -> str:
    """Seconds below two minutes, minutes below three hours, then hours."""
    if seconds < 120:
        return f"{round(seconds, 1):g} s"
    return f"{seconds / 60:.0f} min" if seconds < 3 * 3600 else f"{seconds / 3600:.1f} h"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows with aligned columns, the header first."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
