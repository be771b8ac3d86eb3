"""List what an IPU holds at the moment of a step when it holds the most, the largest first.

    IPU 1 in tick 6: 336.1 kB
    what                        micro-batches  values                        bytes
    other temporary                                                       135.2 kB
    stage 2 + stage 3, until B  2, 3, 4        2 x tanh float32[2,16,64]   49.2 kB
    ...

A value that a segment keeps from F to B is named after the operation that makes it, and the modules around that: so one
sees which line of a model to change, or to compute again, for fewer bytes.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final

import jax

from ipu_jax.base.annotations import Jaxpr
from ipu_jax.base.showing import Shown, Table
from ipu_jax.core.engine.plan import Plan
from ipu_jax.core.engine.stash import RingKey, Stash
from ipu_jax.core.programs.cost import in_units

_UNTIL: Final = {"weight": "from B to W", "x": "x, until F", "dy": "dy, until B"}


@dataclasses.dataclass(frozen=True)
class Alive:
    """Hold equal values that an IPU keeps for some micro-batches, or, without these, all bytes of a kind.

    Attributes:
        what: a kind of bytes, or the stages that keep the values, and until when.
        micro_batches: the numbers of the micro-batches.
        values: how many values of a micro-batch, the operation that makes them, their dtype and shape.
        nbytes: the bytes of all of them.
    """

    what: str
    micro_batches: tuple[int, ...]
    values: str
    nbytes: int


@dataclasses.dataclass(frozen=True, repr=False)
class Peak(Shown):
    """Hold what an IPU keeps when its bytes are the most, the largest first; `str()` prints a table.

    Attributes:
        ipu: its number.
        tick: the tick.
        alive: what it keeps.
    """

    ipu: int
    tick: int
    alive: tuple[Alive, ...]

    @property
    def nbytes(self) -> int:
        """Return the sum of the bytes."""
        return sum(one.nbytes for one in self.alive)

    def _shown(self) -> Iterator[str | Table]:
        yield f"IPU {self.ipu} in tick {self.tick}: {in_units(self.nbytes, 'B')}"
        head = ["what", "micro-batches", "values", "bytes"]
        yield Table([head, *([*in_words(one), in_units(one.nbytes, "B")] for one in self.alive)], left=3)

    def beside(self, kinds: dict[str, int]) -> "Peak":
        """Return it with bytes of further kinds, which the IPU holds in each tick."""
        more = [Alive(kind, (), "", nbytes) for kind, nbytes in kinds.items() if nbytes]
        return dataclasses.replace(self, alive=tuple(sorted([*self.alive, *more], key=lambda one: -one.nbytes)))


def in_words(one: Alive) -> list[str]:
    """Return what is kept, the micro-batches and the values as texts.

    >>> in_words(Alive("head, until B", (2, 3, 4, 7), "tanh float32[8]", 128))
    ['head, until B', '2 to 4, 7', 'tanh float32[8]']
    """
    runs: list[list[int]] = []
    for number in one.micro_batches:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    numbers = [str(a) if a == b else f"{a} to {b}" if b > a + 1 else f"{a}, {b}" for a, b in runs]
    return [one.what, ", ".join(numbers), one.values]


def stash_at_peak(plan: Plan, stash: Stash, ipu: int) -> Peak:
    """Return what an IPU's stash holds in the moment when it holds the most."""
    tick, kept = stash.fullest(ipu)
    alive: list[Alive] = []
    for key, micro_batches in kept.items():
        if not micro_batches:
            continue
        made, sizes = Counter[str](), Counter[str]()
        for text, size in zip(_values(plan, key), stash.sizes(key), strict=True):
            made[text] += 1
            sizes[text] += size
        last_use = "W" if plan.is_split(plan.classes[key[1]][0]) else "B"
        what = f"{_stages(plan, key, ipu)}, {_UNTIL.get(key[0], f'until {last_use}')}"
        for text, count in made.items():
            values = f"{count} x {text}" if count > 1 else text
            alive.append(Alive(what, micro_batches, values, sizes[text] * len(micro_batches)))
    return Peak(ipu, tick, tuple(alive))


def _stages(plan: Plan, key: RingKey, ipu: int) -> str:
    """Return the names of the stages whose values a ring keeps on an IPU."""
    kind, members = key[0], plan.classes[key[1]]
    place = {i: plan.waits_at(i, kind) if kind in ("x", "dy") else plan.segments[i].place for i in members}
    names = [stage.name for i in members if place[i] in (None, ipu) for stage in plan.segments[i].stages]
    return " + ".join(names) if len(names) < 3 else f"{names[0]} ... {names[-1]}"


def _values(plan: Plan, key: RingKey) -> list[str]:
    """Return the operation, dtype and shape of each value that a ring keeps of a micro-batch."""
    kind, first = key[0], plan.classes[key[1]][0]
    program = plan.programs[first]
    if kind == "stash":
        return _made(program.jaxprs["F"], len(program.stash))
    if kind == "weight":
        return _made(program.jaxprs["B"], len(program.weight_residuals))
    channel = plan.channels[plan.channel_of[first - (kind == "x")]]
    return [_shape(leaf) for leaf in jax.tree.leaves(channel.carried("y" if kind == "x" else "dx"))]


def _made(jaxpr: Jaxpr, count: int) -> list[str]:
    """Return how the last outputs of a jaxpr are made, by the operation and the innermost module around it."""
    makers = {var: eqn for eqn in jaxpr.jaxpr.eqns for var in eqn.outvars}
    found: list[str] = []
    for var in jaxpr.jaxpr.outvars[len(jaxpr.jaxpr.outvars) - count :]:
        words = ["its input"]
        if eqn := makers.get(var):
            around = re.sub(r"\w+\(|\)", "", str(eqn.source_info.name_stack)).split("/")  # jvp(attention)
            modules = [name for name in around if name.isidentifier()]  # besides the subscripts of an einsum
            words = [*modules[-1:], str(eqn.params.get("name", eqn.primitive))]
        found.append(f"{'/'.join(words)} {_shape(var.aval)}")
    return found


def _shape(value: jax.ShapeDtypeStruct) -> str:
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"
