"""Keep the figures of all benchmarks with the machine and load at the time, and show them as a table.

`results.json` contains the figures by script, each from the script's last run. `RESULTS.md` is made from it.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

FOLDER: Final = Path(__file__).parent
DATA: Final = "results.json"
TABLE: Final = "RESULTS.md"
UNKNOWN: Final = "unknown"
KEPT: Final = ("distributed_lesson",)
"""Scripts that are gone, with figures that a page shows: the run's commit has the script."""
STEADINESS: Final = "median / least step time"
"""The prefix of figures that judge the machine: whether other load blurred the step times of the same script."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Hold one figure and its bounds, if it has any.

    >>> figure = Figure("CPU work / unsharded", 1.02, at_most=1.03)
    >>> figure.bound, figure.holds
    ('<= 1.03', True)
    """

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def holds(self) -> bool | None:
        """Return whether the value is inside its bounds; None if it has none."""
        if self.at_most is None and self.at_least is None:
            return None
        # written so that NaN is outside any bound
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    @property
    def bound(self) -> str:
        """Return the bounds as text, "" for none."""
        bounds = ((">=", self.at_least), ("<=", self.at_most))
        return " and ".join(f"{sign} {bound:.6g}" for sign, bound in bounds if bound is not None)


@dataclasses.dataclass(frozen=True)
class Run:
    """Hold the results of one run of a script, and where it ran.

    Attributes:
        date: when the run began, in UTC, such as "2026-11-22 20:40".
        commit: whose programs ran, with "+" if the tree had changes; of runs before 2026-11-30, the commit that brought
            their figures. "" without git.
        machine: its processor, cores and system.
        card: the kind of its devices, such as "cpu" or "NVIDIA H200"; "" if the script did not come to its end.
        versions: of Python and of the packages that are compared.
        seconds: how long it took; None if not noted.
        load_before, load_after: average loads in the minute before the run began and before it ended; None if not
            noted.
        figures: in the order in which the script added them.
        left_out: what was not measured, and what measuring it needs.
        curves: points for the plots of the documentation, by name; the table leaves them out.
        problem: why the run did not end as it should; "" if it did.
    """

    date: str
    machine: str
    versions: str
    seconds: float | None
    load_before: float | None
    load_after: float | None
    figures: tuple[Figure, ...]
    left_out: tuple[str, ...] = ()
    problem: str = ""
    commit: str = ""
    card: str = ""
    curves: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @property
    def falls_short(self) -> bool:
        """Return whether a figure is outside its bounds, or the run did not end as it should."""
        return bool(self.problem) or any(figure.holds is False for figure in self.figures)

    def summary(self) -> str:
        """Return how many bounds hold, the problem if there was one, and what was left out."""
        bounded = [figure.holds for figure in self.figures if figure.holds is not None]
        return "; ".join(filter(None, [f"{sum(bounded)} of {len(bounded)} bounds hold", self.problem, *self.left_out]))


def read(folder: Path = FOLDER) -> dict[str, Run]:
    """Return the last run of each script by the script's name; nothing if the folder has no results yet."""
    data = folder / DATA
    if not data.exists():
        return {}
    return {script: _run_of(**run) for script, run in json.loads(data.read_text())["runs"].items()}


def _run_of(
    figures: Iterable[Mapping[str, Any]],
    left_out: Iterable[str],
    curves: Mapping[str, Iterable[float]] | None = None,
    **rest: Any,
) -> Run:
    points = {name: tuple(values) for name, values in (curves or {}).items()}
    return Run(figures=tuple(Figure(**figure) for figure in figures), left_out=tuple(left_out), curves=points, **rest)


def write(runs: Mapping[str, Run], *, not_run: Iterable[str] = (), folder: Path = FOLDER) -> None:
    """Write the runs, and the table made from them; `not_run` names the scripts without a run."""
    parts: list[str] = []
    for script, run in sorted(runs.items()):
        fields = dataclasses.asdict(run)
        # a line per figure, so that a difference between two versions of the file shows which figures changed
        figures = ",\n".join(f"      {json.dumps(figure)}" for figure in fields.pop("figures"))
        curves = [f"      {json.dumps(name)}: {json.dumps(points)}" for name, points in fields.pop("curves").items()]
        of_curves = ',\n      "curves": {\n' + ",\n".join(curves) + "\n      }" if curves else ""
        head = json.dumps(fields, indent=6, ensure_ascii=False).removesuffix("\n}")
        parts.append(f'    {json.dumps(script)}: {head},\n      "figures": [\n{figures}\n      ]{of_curves}\n    }}')
    (folder / DATA).write_text('{\n  "runs": {\n' + ",\n".join(parts) + "\n  }\n}\n")
    (folder / TABLE).write_text(as_markdown(runs, not_run))


def as_markdown(runs: Mapping[str, Run], not_run: Iterable[str] = ()) -> str:
    """Return the page: the runs, with their machines and loads, and the table of all figures."""
    ordered = sorted(runs.items())
    machines = list(dict.fromkeys(_machine(run) for _, run in ordered))
    bounded = [figure for _, run in ordered for figure in run.figures if figure.holds is not None]
    short = [figure for figure in bounded if not figure.holds]
    unsteady = sum(figure.name.startswith(STEADINESS) for figure in short)
    lines = [
        "# Results",
        "",
        "`make bench` writes this page. [README.md](README.md) lists the questions of the scripts, and",
        "[measured.md](../docs/measured.md#what-falls-short) explains why figures fall short.",
        f"**{len(bounded) - len(short)} of {len(bounded)} bounds hold** in the last run of each script. Of the others, "
        f"{unsteady} concern",
        f"`{STEADINESS}`, which says how steady the machine was.",
        "",
        "| script | date, UTC | commit | machine | took | load before | load after | result |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for script, run in ordered:
        took = "" if run.seconds is None else f"{run.seconds:.0f} s"
        loads = ("" if load is None else f"{load:.1f}" for load in (run.load_before, run.load_after))
        machine = _letter(machines.index(_machine(run)))
        lines.append(_row(script, run.date, run.commit or UNKNOWN, machine, took, *loads, run.summary()))
    lines += [_row(script, *[""] * 6, "not run yet") for script in sorted(not_run)]
    lines += [
        "",
        "A commit is the one whose programs ran, with + if the tree had changes; for runs before 2026-11-30 it is the",
        "commit that brought their figures. A load is the number of processes that ran or waited for a core, over the",
        "minute before; the load after a script is also its own. If the load before is above the number of cores,",
        "other programs blurred the times: counts and ratios of CPU work mean something then, ratios of step times may",
        "not. Empty fields were not noted.",
        "",
        *(f"- {_letter(k)}: {'; '.join(machine)}" for k, machine in enumerate(machines)),
        "",
        "| script | figure | value | bound | holds |",
        "|---|---|---|---|---|",
    ]
    said = {True: "yes", False: "**no**", None: ""}
    for script, run in ordered:
        for figure in run.figures:
            lines.append(_row(script, figure.name, f"{figure.value:.6g}", figure.bound, said[figure.holds]))
        lines += [_row(script, what, "not run", "", "") for what in run.left_out]
    return "\n".join(lines) + "\n"


def _machine(run: Run) -> tuple[str, str, str]:
    return run.machine, f"card: {run.card or UNKNOWN}", run.versions


def _letter(machine: int) -> str:
    return chr(ord("A") + machine)


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |"
