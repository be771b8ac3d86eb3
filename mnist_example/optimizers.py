"""List the optimizers that `run-sharded-mnist --optimizer` chooses from, all of them optax's, and their default rates.

sgd                 w - lr g
momentum            sgd on a running sum of gradients, in which each gradient has 0.9 times the weight of the next
adam, adamw, lamb   the size of a step depends on the learning rate, and not on the size of the gradients

optax, and with it jax, is imported where an optimizer is made.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mnist_example.checks import check_choice, check_positive

if TYPE_CHECKING:
    import optax

_MOMENTUM: Final = 0.9


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    """An optimizer: its name in optax, and a function from the default learning rate of plain SGD to its own."""

    in_optax: str
    default_learning_rate: Callable[[float], float]
    options: dict[str, float] = dataclasses.field(default_factory=dict)
    divides_by_zero_in_float16: bool = False


_OPTIMIZERS: Final[dict[str, _Optimizer]] = {
    "sgd": _Optimizer("sgd", lambda of_sgd: of_sgd),
    # the running sum of a constant gradient is ten times that gradient
    "momentum": _Optimizer("sgd", lambda of_sgd: round(of_sgd * (1 - _MOMENTUM), 12), {"momentum": _MOMENTUM}),
    "adam": _Optimizer("adam", lambda _: 0.001, divides_by_zero_in_float16=True),
    "adamw": _Optimizer("adamw", lambda _: 0.001, divides_by_zero_in_float16=True),
    "lamb": _Optimizer("lamb", lambda _: 0.01),
}

NAMES: Final = tuple(_OPTIMIZERS)


def make_optimizer(name: str, learning_rate: float) -> "optax.GradientTransformation":
    """Return the optimizer of that name, with optax's defaults for everything except the learning rate.

    Raises:
        ValueError: there is no such optimizer (the message gives the nearest name), or the learning rate is not a
            positive number.

    >>> optimizer = make_optimizer("sgd", 0.5)
    >>> optimizer.update(2.0, optimizer.init(1.0))[0]
    -1.0
    """
    check_choice("optimizer", name, NAMES)
    check_positive("learning_rate", learning_rate)
    import optax

    optimizer = _OPTIMIZERS[name]
    return getattr(optax, optimizer.in_optax)(learning_rate, **optimizer.options)


def default_learning_rate(name: str, of_sgd: float) -> float:
    """Return the default learning rate of an optimizer for a network whose default for plain SGD is `of_sgd`.

    Raises:
        ValueError: there is no optimizer of that name.

    >>> default_learning_rate("momentum", 0.02), default_learning_rate("adam", 0.02)
    (0.002, 0.001)
    """
    check_choice("optimizer", name, NAMES)
    return _OPTIMIZERS[name].default_learning_rate(of_sgd)


def keeps_state_in_float16(name: str) -> bool:
    """Return whether the optimizer works with a state in float16.

    It does not if it divides by a root plus 1e-8, because 1e-8 is 0 in float16.

    Raises:
        ValueError: there is no optimizer of that name.

    >>> keeps_state_in_float16("lamb"), keeps_state_in_float16("adam")  # lamb adds 1e-6
    (True, False)
    """
    check_choice("optimizer", name, NAMES)
    return not _OPTIMIZERS[name].divides_by_zero_in_float16
