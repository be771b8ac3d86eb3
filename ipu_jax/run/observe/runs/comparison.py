"""Compare runs: their curves over each other on one page, and a table of what differs, which a terminal prints, too.

RunLog a --> Digest a --\\
RunLog b --> Digest b ---+--> SideBySide --> rows that differ --> a table of text
                                        \\--> comparison.html + curves --> out.html, one file
"""

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ipu_jax.base.annotations import Json
from ipu_jax.base.checks import shown
from ipu_jax.base.decorators import public
from ipu_jax.base.showing import Shown, Table, counted
from ipu_jax.base.terminal import printable
from ipu_jax.run.observe.runs._verdict import verdict_of
from ipu_jax.run.observe.runs.digest import SPEED, Digest, check_runs, head_name, is_event
from ipu_jax.run.observe.runs.html_parts import MARKS, MOST_POINTS, check_page, folded, write_page
from ipu_jax.run.observe.runs.log import RunLog

_WIDEST: Final = 64  # characters of a cell in a terminal
_UNKNOWN: Final = "-"


class ComparedRow(NamedTuple):
    """Hold what runs have under one name.

    Attributes:
        name: of a flag, a fact or a figure.
        texts: of each run.
        best: the numbers of the runs whose figure is the best; empty if none is better.
    """

    name: str
    texts: tuple[str, ...]
    best: frozenset[int] = frozenset()


class SideBySide(Shown):
    """Holds the digests of runs, and what differs between them.

    Attributes:
        runs: digests by the names of the runs.
        differing: rows by their heading: flags, what was run, figures.
        alike: what all runs have in common, by the same headings.

    Raises:
        ValueError: fewer than two runs, too many, or one without events.
    """

    def __init__(self, runs: Mapping[str, Digest]):
        if len(runs) < 2:
            raise ValueError(f"a comparison of {counted(len(runs), 'run')} shows nothing: give two or more")
        check_runs(runs)
        self.runs = dict(runs)
        facts = [_facts(digest) for digest in runs.values()]
        found = {heading: _split([each[heading] for each in facts]) for heading in facts[0]}
        self.alike = {heading: alike for heading, (_, alike) in found.items()}
        self.differing = {heading: rows for heading, (rows, _) in found.items()}
        self.differing["figures"] = [*_figures(list(runs.values()))]

    def write(self, path: str | os.PathLike[str], title: str) -> Path:
        """Write the page; return its path."""
        curves = [{"name": name, "curves": digest.drawn(MOST_POINTS)} for name, digest in self.runs.items()]
        parts = {"TITLE": html.escape(title), "TABLE": self._html(), "ALIKE": self._folded()}
        return write_page(path, "comparison.html", ("page.js", "curves.js"), {"runs": curves}, parts)

    def _shown(self) -> Iterator[str | Table]:
        empty = [""] * len(self.runs)
        rows: list[list[str]] = [["", *self.runs]]
        for heading, differing in self.differing.items():
            alike = self.alike.get(heading, {})
            rows += [[heading, *empty]] if differing or alike else []
            for name, texts, best in differing:
                cells = (f"{text} *" if number in best else text for number, text in enumerate(texts))
                rows.append([f"  {name}", *cells])
            rows += [[f"  ({len(alike)} alike)", *empty]] if alike else []
        clean = [[f"{' ' * (cell[:1] == ' ') * 2}{shown(printable(cell), _WIDEST)}" for cell in row] for row in rows]
        yield Table(clean, left=len(clean[0]))
        if any(row.best for row in self.differing["figures"]):
            yield "* the best"

    def _html(self) -> str:
        heads: list[str] = []
        for run, name in enumerate(self.runs):
            line = f"<line class='curve run-{run % 4}{' dashed' * (run > 3)}' x2='24' y1='5' y2='5'/>"
            sample = f"<svg class='sample' viewBox='0 0 24 10' aria-hidden='true'>{line}</svg>"
            heads.append(f"<th scope='col'>{sample}{html.escape(name)}</th>")
        lines = [f"<thead><tr><td></td>{''.join(heads)}</tr>"]
        for heading, rows in self.differing.items():
            head = f"<tbody><tr><th scope='rowgroup' colspan='{len(self.runs) + 1}'>{heading}</th></tr>"
            lines.append(head if rows else "")
            for name, texts, best in rows:
                cells = (
                    f"<td>{f'<b>{html.escape(text)}</b>' if run in best else html.escape(text)}</td>"
                    for run, text in enumerate(texts)
                )
                lines.append(f"<tr><th scope='row'>{html.escape(name)}</th>{''.join(cells)}</tr>")
        room = "class='scroll compared' tabindex='0' role='region' aria-label='What differs'"
        return f"<div {room}><table>{''.join(lines)}</table></div>"

    def _folded(self) -> str:
        return "".join(folded(f"{heading}: {len(rows)} alike", rows) for heading, rows in self.alike.items())


@public
def write_comparison(
    path: str | os.PathLike[str], runs: Mapping[str, RunLog | Sequence[Mapping[str, Json]]], *, title: str = "Runs"
) -> Path:
    """Write a page about two or more runs: curves over each other, and what differs. It is one HTML file.

    Args:
        path: the file, whose name ends in .html. An existing file is replaced once the new one is complete.
        runs: a `RunLog` each, or the contents of `RunLog.events`, by the names that the page gives them; eight at
            most. `RunLog.read` returns the log in a file, also of a run that still goes on.
        title: of the page.

    Returns:
        The path.

    Raises:
        ValueError: an argument is of the wrong type, there are too few or too many runs, or one has no events.
        OSError: the file cannot be written; an existing file is kept.
    """
    are_runs = isinstance(runs, Mapping) and all(
        isinstance(name, str) and (isinstance(one, RunLog) or (isinstance(one, Sequence) and all(map(is_event, one))))
        for name, one in runs.items()
    )
    mend = "logs by the names of the runs, such as {'a': RunLog.read('a.jsonl'), ...}"
    check_page(path, [("runs", runs, are_runs, mend), ("title", title, isinstance(title, str), "a text")])
    return SideBySide(
        {name: one.digest if isinstance(one, RunLog) else Digest(one) for name, one in runs.items()}
    ).write(path, title)


def _facts(digest: Digest) -> dict[str, dict[str, str]]:
    """Return a run's flags, and what was run; a flag that is in what was run is there only."""
    unlike = ("started", "command") if any(digest.flags) else ("started",)  # always differ, or say what flags say
    plan = {name: text for name, text in digest.head.items() if name not in unlike}
    flags = {name: text for part in digest.flags for name, text in part.items() if head_name(name) not in plan}
    return {"flags": flags, "what was run": plan | digest.versions}


def _split(facts: Sequence[Mapping[str, str]]) -> tuple[list[ComparedRow], dict[str, str]]:
    """Return the rows of the facts that differ, and the others."""
    differing, alike = list[ComparedRow](), dict[str, str]()
    for name in dict.fromkeys(name for each in facts for name in each):
        texts = tuple(each.get(name, _UNKNOWN) for each in facts)
        if len({*texts}) > 1:
            differing.append(ComparedRow(name, texts))
        else:
            alike[name] = texts[0]
    return differing, alike


def _figures(digests: Sequence[Digest]) -> Iterator[ComparedRow]:
    verdicts = [verdict_of(digest) for digest in digests]
    yield ComparedRow("verdict", tuple(f"{MARKS[level]} {sentences[0]}" for level, sentences in verdicts))
    figures, values = [digest.figures() for digest in digests], [digest.values() for digest in digests]
    for name in dict.fromkeys(name for each in figures for name in each):
        texts = tuple(each.get(name, _UNKNOWN) for each in figures)
        yield ComparedRow(name, texts, _best(name, [each.get(name) for each in values]))
    if any(digest.skipped for digest in digests):
        yield ComparedRow("skipped", tuple(f"{digest.skipped:,}" for digest in digests))


def _best(name: str, values: Sequence[float | None]) -> frozenset[int]:
    """Return the numbers of the runs with the best value: the highest accuracy or speed, the lowest loss."""
    known = [value for value in values if value is not None]
    better = max if name == SPEED or name.endswith("accuracy") else min if name.endswith("loss") else None
    if better is None or len({*known}) < 2:
        return frozenset()
    return frozenset(run for run, value in enumerate(values) if value == better(known))
