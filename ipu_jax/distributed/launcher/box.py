"""Draw which host has which instances and replicas, as Graphcore's poprun does.

     ===========================================
    |              poprun topology              |
    |===========================================|
    | hosts     |           localhost           |
    |-----------|-------------------------------|
    | ILDs      |               0               |
    |-----------|-------------------------------|
    | instances |       0       |       1       |
    |-----------|-------------------------------|
    | replicas  | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |
     -------------------------------------------

If the cells of a row do not fit, they are merged: first per instance, then per host, then all.

Nothing here imports jax.
"""

import math
from collections.abc import Sequence
from typing import Final

from ipu_jax.distributed.launcher.topology import Topology, ranges

WIDEST: Final = 120
_TITLE: Final = "poprun topology"
_NAMES: Final = ("hosts", "ILDs", "instances", "replicas")


def box(topology: Topology, widest: int = WIDEST) -> str:
    """Return the drawing, with a newline at its end. It is wider than `widest` only if a single cell is."""
    hosts, instances, replicas = len(topology.hosts), topology.instances, topology.replicas
    # the numbers of cells in the rows of hosts, instances and replicas, from the finest to the coarsest
    for cells in (
        (hosts, instances, replicas),
        (hosts, instances, min(instances, replicas)),
        (hosts, hosts, math.gcd(hosts, replicas)),
        (1, 1, 1),
    ):
        drawing = _drawn(topology, *cells)
        if max(map(len, drawing.splitlines())) <= widest:
            break
    return drawing


def _drawn(topology: Topology, hosts: int, instances: int, replicas: int) -> str:
    names = list(topology.hosts)
    rows = [
        names if hosts == len(names) else [f"{names[0]} ... {names[-1]} ({len(names)} hosts)"],
        ["0"],
        _parts(topology.instances, instances),
        _parts(topology.replicas, replicas),
    ]
    finest = max(hosts, instances, replicas)
    width = max(_needed(row, finest) for row in rows)
    width = max(width, -(-(len(_TITLE) - 14) // finest))  # the title fits over both columns
    inner = finest * (width + 1) - 1
    line = f"|{'-' * 11}|{'-' * inner}|"
    body = f"\n{line}\n".join(
        f"| {name:<9} |{'|'.join(cell.center(finest // len(row) * (width + 1) - 1) for cell in row)}|"
        for name, row in zip(_NAMES, rows, strict=True)
    )
    whole = inner + 12
    return f" {'=' * whole}\n|{_TITLE.center(whole)}|\n|{'=' * whole}|\n{body}\n {'-' * whole}\n"


def _needed(row: Sequence[str], finest: int) -> int:
    """Return the width of the finest cells at which the texts of a row fit, with a space on each side."""
    span = finest // len(row)
    return max(-(-(len(cell) + 2 - (span - 1)) // span) for cell in row)


def _parts(count: int, cells: int) -> list[str]:
    return [ranges(range(i * count // cells, (i + 1) * count // cells)) for i in range(cells)]
