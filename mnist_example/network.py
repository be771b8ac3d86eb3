"""The networks that can be trained on the digits, behind one interface: what `run-sharded-mnist --model` chooses from.

Weights and state are the same for both modes and any number of IPUs; both are `{group: pytree}` of whole arrays.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, Protocol

from jax.typing import DTypeLike

from ipu_jax import Pipeline
from ipu_jax.options import Reduction, check_choice
from mnist_example import model, resnet
from mnist_example.model import Mode, Precision


class _MakePipeline(Protocol):
    def __call__(
        self,
        mode: Mode,
        *,
        ipus: int = ...,
        gradient_accumulation: int = ...,
        schedule: str = ...,
        reduction: Reduction = ...,
        precision: Precision = ...,
    ) -> Pipeline: ...


class _InitParams(Protocol):
    def __call__(self, seed: int, dtype: DTypeLike = ...) -> dict[str, Any]: ...


@dataclasses.dataclass(frozen=True)
class Network:
    """A network of digits.

    Attributes:
        title: what a line of output calls its pipeline.
        make_pipeline: as `mnist_example.model.make_pipeline`.
        init_params: random weights from a seed and the dtype in which they are stored: what `Pipeline.shard` takes.
        init_state: the stages' state before training: what `Pipeline.shard_state` takes; empty where there is none.
        check_ipus: refuses a number of IPUs that a mode cannot use, by a ValueError.
        basic_ipus: the number of IPUs that basic mode must have, or None where it takes any.
        least_batch_size: images that a micro-batch must have.
    """

    title: str
    make_pipeline: _MakePipeline
    init_params: _InitParams
    init_state: Callable[[], dict[str, Any]]
    check_ipus: Callable[[Mode, int], None]
    basic_ipus: int | None = None
    least_batch_size: int = 1

    def check_batch_size(self, batch_size: int) -> None:
        """Refuses micro-batches that the network cannot learn from.

        Raises:
            ValueError: fewer images than `least_batch_size`.
        """
        if batch_size < self.least_batch_size:
            raise ValueError(
                f"batch_size={batch_size}, but batch norm subtracts a micro-batch's mean, which of one image leaves "
                f"nothing: use at least {self.least_batch_size}"
            )


def _resnet(depth: resnet.Depth) -> Network:
    return Network(
        f"ResNet-{depth} pipeline",
        functools.partial(resnet.make_pipeline, depth),
        functools.partial(resnet.init_params, depth),
        functools.partial(resnet.init_state, depth),
        functools.partial(resnet.check_ipus, depth),
        least_batch_size=2,
    )


_NETWORKS: Final[dict[str, Network]] = {
    "mlp": Network("pipeline", model.make_pipeline, model.init_params, dict, model.check_ipus, basic_ipus=2),
    "resnet18": _resnet(18),
    "resnet50": _resnet(50),
}

NAMES: Final = tuple(_NETWORKS)


def network_of(name: str) -> Network:
    """The network of that name.

    Raises:
        ValueError: there is none; the nearest name is given.

    >>> network_of("resnet18").title
    'ResNet-18 pipeline'
    """
    return _NETWORKS[check_choice("model", name, NAMES)]
