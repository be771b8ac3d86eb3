"""Show results to people: as aligned text in a console, as tables in a notebook.

    class Report(Shown):
        def _shown(self):
            yield "2 IPUs, 1f1b"
            yield Table([("IPU", "busy"), ("0", "1.2 ms"), ("1", "0.9 ms")])

Notebooks ask an object for `_repr_html_`, consoles for `__repr__`; both come of what `_shown` yields.
"""

import dataclasses
import html
from collections.abc import Iterable, Sequence


def counted(number: float, noun: str) -> str:
    """Return a number of things in words.

    >>> counted(1, "update"), counted(1200, "batch"), counted(0.25, "epoch")
    ('1 update', '1,200 batches', '0.25 epochs')
    """
    plural = "" if number == 1 else "es" if noun.endswith(("tch", "s")) else "s"
    return f"{number:,.3g} {noun}{plural}" if isinstance(number, float) else f"{number:,} {noun}{plural}"


@dataclasses.dataclass(frozen=True)
class Table:
    """Hold rows of cells.

    Attributes:
        rows: of texts, all of one length.
        left: the number of columns, from the first, that are aligned left; the others are aligned right.
        has_head: whether the first row names the columns.
        indent: goes before each row of text.
    """

    rows: Sequence[Sequence[str]]
    left: int = 1
    has_head: bool = True
    indent: str = ""

    def __str__(self) -> str:
        """Return the rows as lines with aligned cells.

        >>> print(Table([("IPU", "busy"), ("0", "12 ms"), ("1", "9 ms")]))
        IPU   busy
        0    12 ms
        1     9 ms
        """
        widths = [max(map(len, column)) for column in zip(*self.rows, strict=True)]
        lines = (
            "  ".join(
                cell.ljust(width) if k < self.left else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in self.rows
        )
        return "\n".join(f"{self.indent}{line}".rstrip() for line in lines)

    def html(self) -> str:
        """Return the rows as a table of HTML."""
        lines: list[str] = []
        for number, row in enumerate(self.rows):
            tag = "th" if self.has_head and number == 0 else "td"
            cells = (
                f"<{tag} style='text-align:{'left' if k < self.left else 'right'}'>{html.escape(cell)}</{tag}>"
                for k, cell in enumerate(row)
            )
            lines.append(f"<tr>{''.join(cells)}</tr>")
        return f"<table>{''.join(lines)}</table>"


class Shown:
    """An object that consoles show as text, and notebooks as tables; `_shown` yields its texts and tables."""

    def _shown(self) -> Iterable[str | Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(map(str, self._shown()))

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        parts = self._shown()
        return "".join(
            part.html() if isinstance(part, Table) else f"<div style='white-space:pre-wrap'>{html.escape(part)}</div>"
            for part in parts
        )
