"""The order of DualPipeV: two stages per IPU, folded, and F of one paired with B of the other.

IPU r of S does these tasks: F0 and B0 of its stage on the way there, F1 and B1 of the one on the way back. B is
followed by its W at once; Z is a B whose W is postponed, and W the oldest one postponed.

    2 (S-r-1)       x  F0
    r+1             x  F0 F1
    S-r-1           x  Z1 W F1
    M - 2S + r+1    x  F0 B1 F1 B0      the pairs F0 B1 and F1 B0 are what DeepSeek overlaps
    S-r-1           x  B1 F1 B0
    r+1             x  B1 B0            Z instead of B in the second half
    S-r-1           x  W Z0
    r+1             x  W

With fewer than 2S micro-batches, the order is that of 2S without the tasks of the surplus.

Source: DeepSeek-AI 2024, arXiv:2412.19437, section 3.2.1, and `dualpipev.py` of its DualPipe repository.
"""

from ipu_jax.schedules._rules import Line, Local, Rule, follow
from ipu_jax.schedules._timetable import Kind

Chunk = tuple[int, Kind, int]  # 0 on the way there, 1 on the way back; kind; micro-batch


def dualpipev_rule(line: Line) -> Rule:
    """Return the rule that follows DualPipeV's order on a folded line."""
    ranks = list(enumerate(line.on))
    return follow({ipu: _segments(line.on[ipu], _order(len(ranks), rank, line.micro_batches)) for rank, ipu in ranks})


def _segments(mine: list[int], order: list[Chunk]) -> list[Local]:
    """Return the tasks of an IPU's segments. Where a line turns, both chunks may be one segment."""
    tasks: list[Local] = [(mine[min(chunk, len(mine) - 1)], kind, m) for chunk, kind, m in order]
    return list(dict.fromkeys(tasks))


def _order(ipus: int, rank: int, micro_batches: int) -> list[Chunk]:
    found: list[Chunk] = []
    begun: dict[tuple[int, Kind], int] = {}
    postponed: list[Chunk] = []

    def add(chunk: int, kind: Kind) -> Chunk:
        m = begun.get((chunk, kind), 0)
        begun[chunk, kind] = m + 1
        found.append((chunk, kind, m))
        return chunk, "W", m

    def do(steps: str, zero_bubble: bool = False) -> None:
        for step in steps.split():
            if step == "W":
                found.append(postponed.pop(0))
            elif step[0] == "F":
                add(int(step[1]), "F")
            else:
                (postponed if step[0] == "Z" or zero_bubble else found).append(add(int(step[1]), "B"))

    before, upto = ipus - rank - 1, rank + 1
    do("F0 F0 " * before + "F0 F1 " * upto + "Z1 W F1 " * before)
    do("F0 B1 F1 B0 " * (max(micro_batches, 2 * ipus) - 2 * ipus + upto))
    do("B1 F1 B0 " * before)
    last = ("B1 B0 " * upto).split()
    for k, step in enumerate(last):
        do(step, zero_bubble=k >= upto)
    do("W Z0 " * before + "W " * upto)
    assert not postponed, "as many W were done as postponed"
    return [task for task in found if task[2] < micro_batches]
