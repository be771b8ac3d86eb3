"""List the networks that `run-sharded-mnist --model` chooses from, behind one interface.

This module imports neither jax nor Flax: a network's own module, which does, is imported where it is first needed.
Weights and state are the same for both modes and any number of IPUs; both are `{group: pytree}` of whole arrays.
"""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol

from ipu_jax import Reduction
from mnist_example.checks import check_choice
from mnist_example.layouts import Depth, Mode, check_mlp_ipus, check_resnet_ipus

if TYPE_CHECKING:
    from ipu_jax import Pipeline


class _MakePipeline(Protocol):
    def __call__(
        self,
        mode: Mode,
        *,
        ipus: int = ...,
        replicas: int = ...,
        gradient_accumulation: int = ...,
        schedule: str = ...,
        reduction: Reduction = ...,
    ) -> "Pipeline": ...


class _InitParams(Protocol):
    def __call__(self, seed: int) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Updates:
    """The defaults of an update; the attributes have the names of the flags of `run-sharded-mnist`.

    Attributes:
        batch_size: images of a micro-batch.
        gradient_accumulation_count: micro-batches of an update.
        learning_rate: for plain SGD on gradients that are summed over the micro-batches.
        repeat_count: updates in one device call: few enough that calls end several times a second on two cores.
    """

    batch_size: int
    gradient_accumulation_count: int
    learning_rate: float
    repeat_count: int


# The original's 8, 84 and 0.01 make the loss jump from 2.4 to 9.8, on scikit-learn's digits to 54. With these it stays
# below 2.5 (docs/design/command-lines.md).
MLP_UPDATES: Final = Updates(16, 4, 0.015, repeat_count=5)
# with 0.01 and the sum of 84 micro-batches, a resnet's loss would jump from 2.8 to 30, and statistics of 8 images are
# noisy
RESNET_UPDATES: Final = Updates(32, 2, 0.02, repeat_count=1)


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of digits.

    Attributes:
        title: the name of its pipeline in the output.
        make_pipeline: a function like `mnist_example.model.make_pipeline`.
        init_params: returns random float32 weights for `Pipeline.shard`, from a seed.
        init_state: returns the stages' state before training, for `Pipeline.shard_state`; empty if there is none.
        updates: the defaults of an update.
        check_ipus: raises a ValueError for a number of IPUs that a mode cannot use.
        basic_ipus: the number of IPUs that basic mode must have, or None if it takes any.
        least_batch_size: the least number of images in a micro-batch.
    """

    title: str
    make_pipeline: _MakePipeline
    init_params: _InitParams
    init_state: Callable[[], dict[str, Any]]
    updates: Updates
    check_ipus: Callable[[Mode, int], None]
    basic_ipus: int | None = None
    least_batch_size: int = 1

    def check_batch_size(self, batch_size: int) -> None:
        """Raise for micro-batches that are too small for the network to learn from.

        Raises:
            ValueError: fewer images than `least_batch_size`.
        """
        if batch_size < self.least_batch_size:
            raise ValueError(
                f"batch_size={batch_size}, but batch norm subtracts a micro-batch's mean, which of one image leaves "
                f"nothing: use at least {self.least_batch_size}"
            )


def _later(module: str, name: str, *first: Any) -> Callable[..., Any]:
    """Return a function that calls `mnist_example.<module>.<name>(*first, ...)`, and imports the module only then."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(importlib.import_module(f"mnist_example.{module}"), name)(*first, *args, **kwargs)

    return call


def _resnet(depth: Depth) -> Network:
    return Network(
        f"ResNet-{depth} pipeline",
        _later("resnet", "make_pipeline", depth),
        _later("resnet", "init_params", depth),
        _later("resnet", "init_state", depth),
        RESNET_UPDATES,
        functools.partial(check_resnet_ipus, depth),
        least_batch_size=2,
    )


_NETWORKS: Final[dict[str, Network]] = {
    "mlp": Network(
        "pipeline",
        _later("model", "make_pipeline"),
        _later("model", "init_params"),
        dict,
        MLP_UPDATES,
        check_mlp_ipus,
        basic_ipus=2,
    ),
    "resnet18": _resnet(18),
    "resnet50": _resnet(50),
}

NAMES: Final = tuple(_NETWORKS)


def network_of(name: str) -> Network:
    """Return the network of that name.

    Raises:
        ValueError: there is no such network; the message gives the nearest name.

    >>> network_of("resnet18").title
    'ResNet-18 pipeline'
    """
    return _NETWORKS[check_choice("model", name, NAMES)]
