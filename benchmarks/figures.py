"""What every benchmark shares: figures with bounds, and measuring two programs side by side.

A figure is a ratio of what ran in one process, or a count: absolute times mean nothing on a shared machine. Each prints
as a line `name  value  bound`; with `--check` the script exits 1 and names the figures outside their bounds.
"""

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one call: on the clock, and of CPU work over all threads."""

    wall: float
    cpu: float


class Figures:
    """Collects figures, prints each as it comes, and gives the exit status.

    Args:
        description: what `--help` says.
        argv: the command line; the process's own unless given.
        flags: adds the script's own flags to the parser; what they were is in `args`.
    """

    def __init__(
        self,
        description: str,
        argv: list[str] | None = None,
        flags: Callable[[argparse.ArgumentParser], object] = lambda parser: None,
    ):
        parser = argparse.ArgumentParser(description=description)
        parser.add_argument("--check", action="store_true", help="exit 1 where a figure is outside its bound")
        flags(parser)
        self.args = parser.parse_args(argv)
        self._check = self.args.check
        self._short: list[str] = []

    def add(self, name: str, value: float, at_most: float | None = None, *, at_least: float | None = None) -> None:
        """Prints one figure and the bounds that it has; without any it is only told."""
        # so written that a value which is not a number is outside
        inside = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
        bounds = [f"{sign} {bound:.6g}" for sign, bound in ((">=", at_least), ("<=", at_most)) if bound is not None]
        shown = " and ".join(bounds) + ("" if inside else "  FALLS SHORT")
        print(f"{name:<72}  {value:<12.6g}  {shown}".rstrip(), flush=True)
        if not inside:
            self._short.append(name)

    def status(self) -> int:
        """0, or 1 where `--check` was given and a figure falls short."""
        if self._check and self._short:
            print("falls short: " + "; ".join(self._short), file=sys.stderr)
            return 1
        return 0


def cost_of(call: Callable[[], Any]) -> Cost:
    """What one call costs, its result waited for."""
    cpu, wall = time.process_time(), time.perf_counter()
    jax.block_until_ready(call())
    return Cost(time.perf_counter() - wall, time.process_time() - cpu)


def least(costs: Iterable[Cost]) -> Cost:
    """The least of each, since noise only adds."""
    costs = list(costs)
    return Cost(min(cost.wall for cost in costs), min(cost.cpu for cost in costs))


def side_by_side(*calls: Callable[[], Any], rounds: int = 8) -> list[Cost]:
    """Runs the calls in turn, `rounds` times after a warm-up of two, and gives each one's least cost.

    In turn, so that a noisy neighbour meets them all.
    """
    found = [[cost_of(call) for call in calls] for _ in range(rounds + 2)]
    return [least(costs) for costs in zip(*found[2:], strict=True)]


def temporary_bytes(compiled: Any) -> int:
    """What a compiled program needs on each device beside its arguments and results."""
    return compiled.memory_analysis().temp_size_in_bytes


def largest_relative_difference(found: Any, expected: Any) -> float:
    """Over the leaves of two trees: the largest difference, relative to the leaf's largest expected magnitude.

    NaN where a leaf of either holds one.

    Raises:
        ValueError: leaves of unlike shapes or numbers.
    """
    leaves = [jax.tree.leaves(tree) for tree in (found, expected)]
    shapes = [[np.shape(leaf) for leaf in of_tree] for of_tree in leaves]
    if shapes[0] != shapes[1]:
        raise ValueError(f"the shapes found are {shapes[0]}, and {shapes[1]} are expected: compare like with like")
    ratios = [abs(f - e).max() / np.maximum(abs(e).max(), 1e-30) for f, e in zip(*leaves, strict=True)]
    return float(np.max(np.asarray(ratios, float)))  # Python's max drops a NaN that does not come first
