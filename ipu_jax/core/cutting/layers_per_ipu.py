"""Cut a function after given numbers of layers, as optimum-graphcore does.

    layers_per_ipu=[1, 2, -1, -1]     layer 0 | layers 1, 2 | layers 3 to 5 | layers 6 to 9      of ten layers

A layer ends where the function marks a value. In a function without marks, layers are the iterations of its scans over
stacked weights. Operations before the first layer are on the first IPU, operations after the last layer on the last.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from ipu_jax.base.checks import as_int
from ipu_jax.core.cutting.cut import Places
from ipu_jax.core.cutting.scan_layers import ScanLayer


def checked_counts(layers_per_ipu: Any, stages: int, ipus: int) -> list[int]:
    """Return `layers_per_ipu` as ints.

    Raises:
        ValueError: it does not give each IPU a number of at least 1, or -1; or there are several stages on an IPU.
    """
    listed = list(layers_per_ipu) if isinstance(layers_per_ipu, Iterable) else []
    counts, value = [as_int(count) or 0 for count in listed], f"layers_per_ipu={layers_per_ipu!r}"
    if len(counts) != ipus or any(count < 1 and count != -1 for count in counts):
        raise ValueError(
            f"{value} does not give numbers of layers for {ipus} IPUs: give each a number of at least 1, or -1 for an "
            "even share of the other layers"
        )
    if stages != ipus:
        raise ValueError(
            f"{value} gives each IPU one stage, and the schedule has {stages} stages on {ipus} IPUs: take a schedule "
            "with one on each, such as 'grouped' or '1f1b', or leave it out"
        )
    return counts


def ends_of_layers(places: Places, counts: Sequence[int], names: Sequence[str] | None) -> list[int]:
    """Return the places after the last layer of each IPU but the last; the last -1 also gets the
    remainder.

    Args:
        places: the places at which the function can be cut.
        counts: from `checked_counts`.
        names: the names of the values that end layers; None: each iteration of a scan is a layer.

    Raises:
        ValueError: the function has no layers, or another number of them, or cannot be cut after one.
    """
    value, operations = f"layers_per_ipu={[*counts]}", enumerate(places.operations)
    ends = [t for t, op in operations if isinstance(op, ScanLayer)] if names is None else places.marked(names)
    sharing = [ipu for ipu, count in enumerate(counts) if count == -1]
    left = len(ends) - sum(count for count in counts if count != -1)
    if left < len(sharing) or (left and not sharing):
        raise ValueError(
            f"{value} cannot place the {len(ends)} layers of the function: give numbers that add up to {len(ends)}, "
            "with at least 1 for each -1; a layer ends at stage_end(x), or is an iteration of a scan over weights"
        )
    even, more = divmod(left, len(sharing) or 1)
    each = [even + more * (ipu == sharing[-1]) if count == -1 else count for ipu, count in enumerate(counts)]
    found = [ends[end - 1] for end in itertools.accumulate(each[:-1])]
    for ipu, t in enumerate(found):
        if not places.allowed[t]:
            raise ValueError(f"{value} ends IPU {ipu} where the function cannot be cut: leave it out, or move the mark")
    return found
