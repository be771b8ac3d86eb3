"""What a pipeline is asked to do, as frozen data that is checked when it is made.

    PipelineOptions(gradient_accumulation=16, reduction="mean", schedule="grouped")

Every check here raises before anything is traced or compiled, with the value, the rule and the mend.
"""

import dataclasses
import difflib
from typing import Literal

Reduction = Literal["mean", "sum"]
REDUCTIONS: tuple[Reduction, ...] = ("mean", "sum")


def check_count(name: str, value: object) -> int:
    """`value`, if it is an int of at least 1.

    Raises:
        ValueError: it is not (bools are not counts).

    >>> check_count("micro_batches", 4)
    4
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} is not a count: give an int of at least 1")
    return value


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> str:
    """`value`, if it is one of `choices`.

    Raises:
        ValueError: it is not; the nearest choice is named where there is one.

    >>> check_choice("schedule", "groupd", ("sequential", "grouped"))
    Traceback (most recent call last):
    ...
    ValueError: schedule='groupd' is unknown: did you mean 'grouped'? Choose one of 'sequential', 'grouped'
    """
    if isinstance(value, str) and value in choices:
        return value
    near = difflib.get_close_matches(value, choices, n=1) if isinstance(value, str) else []
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"{name}={value!r} is unknown: {hint}Choose one of {', '.join(map(repr, choices))}")


@dataclasses.dataclass(frozen=True)
class PipelineOptions:
    """How a pipeline runs one weight update.

    Attributes:
        gradient_accumulation: M, the micro-batches that make one weight update; at least 1.
        reduction: gradients over the M micro-batches and the replicas are their "mean" or their "sum".

    Raises:
        ValueError: a value is outside its rule.
    """

    gradient_accumulation: int = 1
    reduction: Reduction = "mean"

    def __post_init__(self) -> None:
        check_count("gradient_accumulation", self.gradient_accumulation)
        check_choice("reduction", self.reduction, REDUCTIONS)
