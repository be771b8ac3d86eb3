"""Print figures with bounds, and measure programs side by side: the parts that all benchmarks share.

A figure is a count, or a ratio of measurements from one process, because absolute times mean nothing on a shared
machine. Each figure is printed as a line `name  value  bound`. With `--check` the script exits 1 if figures are outside
their bounds, and names them. With `--record FILE` each figure is also written to that file, for `run_all.py`. With
`--smallest` a script measures its smallest sizes in one round: the times mean nothing then, but the results of the
programs must still agree, and tests check that they do.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from results import Figure

STEADY: Final = 1.10
"""The bound for median / least step time: above it, other load on the machine blurs the ratios."""

MOST_ROUNDS = sys.maxsize  # of `side_by_side`, and at most one less to warm up


@dataclasses.dataclass(frozen=True)
class Cost:
    """The seconds of one call, on the clock and as CPU time summed over all threads; or ratios of both."""

    wall: float
    cpu: float


@dataclasses.dataclass(frozen=True)
class Costs:
    """Hold the costs of the calls of one program, in order.

    `ours / theirs` is the median over the rounds of the ratios of two calls in the same round, for each kind of time:
    a machine that is slow for some seconds slows both calls of a round.
    """

    calls: Sequence[Cost]

    @property
    def wall(self) -> float:
        """Return the median of the seconds on the clock."""
        return statistics.median(cost.wall for cost in self.calls)

    @property
    def cpu(self) -> float:
        """Return the median of the seconds of CPU time."""
        return statistics.median(cost.cpu for cost in self.calls)

    @property
    def spread(self) -> float:
        """Return the median of the seconds on the clock divided by the least; 1 on a machine without other load."""
        return self.wall / min(cost.wall for cost in self.calls)

    def __truediv__(self, other: Self) -> Cost:
        return Cost(
            median_ratio([cost.wall for cost in self.calls], [cost.wall for cost in other.calls]),
            median_ratio([cost.cpu for cost in self.calls], [cost.cpu for cost in other.calls]),
        )


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled step with its arguments on the devices, ready to be called.

    Attributes:
        compiled: the step.
        arguments: the step's arguments.
        comparable: converts the step's result to the form in which results of programs are compared.
    """

    compiled: Any
    arguments: tuple[Any, ...]
    comparable: Callable[[Any], Any] = lambda result: result

    def __call__(self) -> Any:
        return self.compiled(*self.arguments)

    def result(self) -> Any:
        """Run the step, and return its result in the form to compare."""
        return self.comparable(self())

    @property
    def bytes(self) -> int:
        """Return the bytes that the step needs on each device besides its arguments and results."""
        return temporary_bytes(self.compiled)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The largest CPU work and temporary bytes of a program, relative to the unsharded program; None for no bound."""

    cpu: float | None = None
    bytes: float | None = None


class Figures:
    """Collects figures, prints each when it is added, and returns the exit status.

    Args:
        description: the text for `--help`.
        argv: the command line; by default the process's own.
        flags: adds the script's own flags to the parser; their values are in the attribute `args`.
    """

    def __init__(
        self,
        description: str,
        argv: list[str] | None = None,
        flags: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    ):
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--check", action="store_true", help="exit 1 where a figure is outside its bound")
        parser.add_argument("--record", type=Path, metavar="FILE", help="write each figure to a file, as JSON")
        parser.add_argument("--smallest", action="store_true", help="run it at its smallest size, for its results only")
        flags(parser)
        self.args = parser.parse_args(argv)
        self._check, self._record = self.args.check, self.args.record
        self._short: list[str] = []
        self.shrink(__name__, MOST_ROUNDS=1)

    def shrink(self, script: str, **smallest: Any) -> None:
        """Give constants of a script their smallest values, if `--smallest` was given."""
        if self.args.smallest:
            vars(sys.modules[script]).update(smallest)

    def add(self, name: str, value: float, at_most: float | None = None, *, at_least: float | None = None) -> None:
        """Print one figure and its bounds, if it has any."""
        figure = Figure(name, float(value), at_most, at_least)
        shown = figure.bound + ("  FALLS SHORT" if figure.holds is False else "")
        print(f"{name:<72}  {value:<12.6g}  {shown}".rstrip(), flush=True)
        self._write(dataclasses.asdict(figure))
        if figure.holds is False:
            self._short.append(name)

    def add_curve(self, name: str, points: Iterable[float]) -> None:
        """Record points for a plot of the documentation, and print nothing."""
        self._write({"curve": name, "points": [float(f"{point:.3g}") for point in points]})

    def leave_out(self, what: str, needs: str) -> None:
        """Print that some figures are not measured here, and what they need."""
        told = f"{what}: not run, needs {needs}"
        print(told, flush=True)
        self._write({"left_out": told})

    def take(self, record: Path) -> None:
        """Take the figures that another process of this run has printed and recorded, if there are any."""
        for line in map(json.loads, record.read_text().splitlines() if record.exists() else ()):
            if "card" not in line:
                self._write(line)
            if "name" in line and Figure(**line).holds is False:
                self._short.append(line["name"])

    def _write(self, line: dict[str, Any]) -> None:
        if self._record is not None:
            with self._record.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def add_spread(self, name: str, costs: Costs) -> None:
        """Print how steady a program's step time was: the median of its calls divided by the least."""
        self.add(f"median / least step time, {name}", costs.spread, STEADY)

    def add_beside_unsharded(
        self,
        name: str,
        unsharded: Program,
        programs: Mapping[str, Program],
        bounds: Mapping[str, Bounds],
        *,
        most_difference: float,
        rounds: int,
    ) -> None:
        """Run programs in turn with the unsharded program, and print their differences, costs and bytes relative to it.

        Args:
            name: the name of the computation.
            unsharded: the program on one device.
            programs: the programs to compare with it, by name.
            bounds: bounds for some of the programs, by name.
            most_difference: the bound for the largest relative difference of loss and gradients.
            rounds: as for `side_by_side`. The run whose results are compared is the warm-up.
        """
        expected = unsharded.result()
        for kind, program in programs.items():
            difference = largest_relative_difference(program.result(), expected)
            self.add(
                f"loss and gradients / unsharded, {name}, {kind}, relative difference", difference, most_difference
            )
        dense, *costs = side_by_side(unsharded, *programs.values(), rounds=rounds, warm_up=0)
        self.add_spread(f"{name}, unsharded", dense)
        for (kind, program), cost in zip(programs.items(), costs, strict=True):
            bound, ratio = bounds.get(kind, Bounds()), cost / dense
            self.add(f"CPU work / unsharded, {name}, {kind}", ratio.cpu, bound.cpu)
            self.add(f"step time / unsharded on both cores, {name}, {kind}", ratio.wall)
            bytes_ = program.bytes / unsharded.bytes
            self.add(f"temporary bytes an IPU / unsharded, {name}, {kind}", bytes_, bound.bytes)
            self.add_spread(f"{name}, {kind}", cost)

    def status(self) -> int:
        """Return the exit status: 1 if `--check` was given and a figure is outside its bounds, else 0.

        The record gets the card, too: only now has every script chosen its devices.
        """
        self._write({"card": jax.devices()[0].device_kind})
        if self._check and self._short:
            print("falls short: " + "; ".join(self._short), file=sys.stderr)
            return 1
        return 0


def scanned(loss_of: Callable[[Any, Any], Any], *, sums: Any = None) -> Callable[[Any, Any], Any]:
    """Return the unsharded program: a function of (params, batch) that scans over micro-batches on one device.

    Args:
        loss_of: the loss of one micro-batch, a function of (params, microbatch).
        sums: the dtype in which gradients are summed; by default each weight's.

    Returns:
        the mean loss and its gradients.
    """

    def step(params: Any, batch: Any) -> Any:
        def add(totals: Any, microbatch: Any) -> Any:
            return jax.tree.map(jnp.add, totals, jax.value_and_grad(loss_of)(params, microbatch)), None

        zeros = jax.tree.map(lambda w: jnp.zeros_like(w, dtype=sums), params)
        totals, _ = lax.scan(add, (jnp.zeros(()), zeros), batch)
        return jax.tree.map(lambda total: total / len(jax.tree.leaves(batch)[0]), totals)

    return step


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over rounds of the ratio of two measurements in the same round."""
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def cost_of(call: Callable[[], Any]) -> Cost:
    """Return the cost of one call, including waiting for its result."""
    cpu, wall = time.process_time(), time.perf_counter()
    jax.block_until_ready(call())
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def least(costs: Iterable[Cost]) -> Cost:
    """Return the least of each kind of time, since noise only adds time."""
    costs = list(costs)
    return Cost(min(cost.wall for cost in costs), min(cost.cpu for cost in costs))


def side_by_side(*calls: Callable[[], Any], rounds: int = 8, warm_up: int = 2) -> list[Costs]:
    """Run the calls in turn for `rounds` rounds, after `warm_up` rounds that don't count, and return each call's costs.

    They run in turn, so that other load on the machine affects all of them.
    """
    rounds, warm_up = min(rounds, MOST_ROUNDS), min(warm_up, MOST_ROUNDS - 1)
    found = [[cost_of(call) for call in calls] for _ in range(warm_up + rounds)]
    return [Costs(list(costs)) for costs in zip(*found[warm_up:], strict=True)]


def in_turn(programs: Mapping[Any, Callable[[], list[Cost]]], rounds: int) -> dict[Any, Costs]:
    """Return the costs of programs that run a few steps per round: each round's cost is the median of its steps."""
    found: dict[Any, list[Cost]] = {name: [] for name in programs}
    for _ in range(rounds + 1):
        for name, steps in programs.items():
            of_round = Costs(steps())
            found[name].append(Cost(of_round.wall, of_round.cpu))
    return {name: Costs(of_rounds[1:]) for name, of_rounds in found.items()}  # the first round is the warm-up


def temporary_bytes(compiled: Any) -> int:
    """Return the bytes that a compiled program needs on each device besides its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def largest_relative_difference(found: Any, expected: Any) -> float:
    """Return the largest difference between two trees' leaves, relative to the leaf's largest expected magnitude.

    The result is NaN if a leaf of either tree contains NaN.

    Raises:
        ValueError: the trees have different numbers of leaves, or leaves of different shapes.
    """
    leaves = [jax.tree.leaves(tree) for tree in (found, expected)]
    shapes = [[np.shape(leaf) for leaf in tree_leaves] for tree_leaves in leaves]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the shapes found are {shapes[0]}, and {shapes[1]} are expected: compare like with like")
    ratios = [abs(f - e).max() / np.maximum(abs(e).max(), 1e-30) for f, e in zip(*leaves, strict=True)]
    return float(np.max(np.asarray(ratios, float)))  # Python's max would ignore a NaN that is not the first
