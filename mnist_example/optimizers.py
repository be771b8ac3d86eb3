"""The optimizers that `run-sharded-mnist --optimizer` chooses from, all of optax, and where their learning rates start.

sgd        w - lr g
momentum   sgd over a running sum of gradients, each weighed 0.9 of the next
adam, adamw, lamb   steps of a size that does not depend on the gradients' own: it is the learning rate's
"""

import dataclasses
from collections.abc import Callable
from typing import Final

import optax

from mnist_example.checks import check_choice, check_positive

_MOMENTUM: Final = 0.9


@dataclasses.dataclass(frozen=True)
class _Optimizer:
    """`make` takes a learning rate; `default_learning_rate` takes plain SGD's."""

    make: Callable[[float], optax.GradientTransformation]
    default_learning_rate: Callable[[float], float]
    divides_by_zero_in_float16: bool = False


_OPTIMIZERS: Final[dict[str, _Optimizer]] = {
    "sgd": _Optimizer(optax.sgd, lambda of_sgd: of_sgd),
    # a constant gradient adds up to ten times itself
    "momentum": _Optimizer(
        lambda rate: optax.sgd(rate, momentum=_MOMENTUM), lambda of_sgd: round(of_sgd * (1 - _MOMENTUM), 12)
    ),
    "adam": _Optimizer(optax.adam, lambda _: 0.001, divides_by_zero_in_float16=True),
    "adamw": _Optimizer(optax.adamw, lambda _: 0.001, divides_by_zero_in_float16=True),
    "lamb": _Optimizer(optax.lamb, lambda _: 0.01),
}

NAMES: Final = tuple(_OPTIMIZERS)


def make_optimizer(name: str, learning_rate: float) -> optax.GradientTransformation:
    """Return the optimizer of that name; but for the learning rate it is as optax makes it.

    Raises:
        ValueError: there is none, the nearest name is given; or a learning rate that is no positive number.

    >>> optimizer = make_optimizer("sgd", 0.5)
    >>> optimizer.update(2.0, optimizer.init(1.0))[0]
    -1.0
    """
    check_choice("optimizer", name, NAMES)
    return _OPTIMIZERS[name].make(check_positive("learning_rate", learning_rate))


def default_learning_rate(name: str, of_sgd: float) -> float:
    """Return an optimizer's learning rate where plain SGD would have `of_sgd`.

    Raises:
        ValueError: there is no optimizer of that name.

    >>> default_learning_rate("momentum", 0.02), default_learning_rate("adam", 0.02)
    (0.002, 0.001)
    """
    check_choice("optimizer", name, NAMES)
    return _OPTIMIZERS[name].default_learning_rate(of_sgd)


def keeps_state_in_float16(name: str) -> bool:
    """Return whether the optimizer works with a state of float16: not if it divides by a root plus 1e-8, which is 0
    there.

    Raises:
        ValueError: there is no optimizer of that name.

    >>> keeps_state_in_float16("lamb"), keeps_state_in_float16("adam")  # lamb adds 1e-6
    (True, False)
    """
    check_choice("optimizer", name, NAMES)
    return not _OPTIMIZERS[name].divides_by_zero_in_float16
