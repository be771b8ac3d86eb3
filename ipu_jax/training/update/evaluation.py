"""Take the mean of a forward pass's outputs over a data set: `Evaluation`, a function of a `TrainState`.

test = pipeline.forward(test_loss, micro_batch)          means over one micro-batch, by name
fit(step, state, feed, evaluate=Evaluation(test, images))

10,003 examples = 100 micro-batches of 100, and one of 3, for which the function is cut once more
"""

import functools
import math
from collections.abc import Mapping
from typing import Any, Final, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ipu_jax.base.annotations import Batch, Key, Tree
from ipu_jax.base.checks import check_count
from ipu_jax.base.decorators import public
from ipu_jax.core.mesh.instances import on_host
from ipu_jax.core.pipeline.arguments import check_key
from ipu_jax.core.pipeline.forward import Forward
from ipu_jax.core.step_args import StepArgs, given_dims
from ipu_jax.training.data.feed import Feed
from ipu_jax.training.update.state import TrainState

_PER_STAGE: Final = 8
"""Micro-batches of a call per stage, by default: then IPUs are idle for about a tenth of it."""

_NUMBERS: Final = (jnp.floating, jnp.integer, jnp.bool_)


@public
class Evaluation:
    """The means of a forward pass's outputs over a data set, in which each example counts once.

    A call takes a `TrainState`, so it can be given to `fit(evaluate=)`. It reads the source from its beginning, in
    its own order, without a copy of it on the IPUs. Where the examples do not fill the last micro-batch, the function
    is cut and compiled once more, for a micro-batch of the rest.

    Communicates what the forward pass communicates; across several instances also an all-gather of the outputs.

    Args:
        forward: from `pipeline.forward(fn, inputs)`. Its function returns a mean over the micro-batch, a float scalar,
            or several in a dict, such as `{"loss": loss, "accuracy": (logits.argmax(-1) == labels).mean()}`. The first
            dim of each leaf of `inputs` is the micro-batch's.
        source, items: the examples, as for `Feed`.
        micro_batches: m, the micro-batches of a call on each replica. Default: 8 per stage, or as many as the examples
            fill.
        key: a typed key, if the function takes one. Every evaluation draws the same numbers.

    Attributes:
        names: the names of the means.

    Raises:
        ValueError: the function has a state of its own or returns something else, a key is missing or superfluous, or
            the source does not fit the function, cannot be read or can be read only once.

    >>> import jax, jax.numpy as jnp, optax
    >>> from ipu_jax import Pipeline, make_train_step
    >>> loss = lambda w, x: jnp.mean((x * w) ** 2)
    >>> pipeline = Pipeline.from_function(loss, jnp.ones(()), jnp.ones(4), ipus=1, gradient_accumulation=2)
    >>> step = make_train_step(pipeline, optax.sgd(0.1))
    >>> size = Evaluation(pipeline.forward(lambda w, x: {"size": jnp.mean(w * x)}, jnp.ones(4)), np.arange(11.0))
    >>> size(step.init(2 * jnp.ones(())))  # 2 micro-batches of 4 and one of 3
    {'size': 10.0}
    """

    def __init__(
        self,
        forward: Forward,
        source: Any,
        *,
        items: Literal["examples", "batches"] | None = None,
        micro_batches: int | None = None,
        key: Key = None,
    ):
        if not isinstance(forward, Forward):
            found = type(forward).__name__
            raise ValueError(f"forward is a {found}: give what pipeline.forward(fn, inputs) returns")
        if forward.has_state:
            raise ValueError("the function has a state of its own, and an evaluation keeps none: leave state= out")
        if forward.takes_key and key is None:
            raise ValueError("key is missing: the function takes one, give key=jax.random.key(...)")
        check_key(key, forward.stages, "prediction", taken=forward.takes_key)
        self._forward, self._key = forward, key
        self._is_dict = isinstance(forward.outputs, Mapping)
        self.names = (*forward.outputs,) if self._is_dict else ("loss",)
        self._check_outputs(forward.outputs)
        sizes = [leaf.shape[:1] for leaf in jax.tree.leaves(forward.inputs)]
        if not sizes or len({*sizes}) > 1 or not sizes[0]:
            what = f"the first dims of the function's inputs are {sizes}"
            raise ValueError(f"{what}: they must be one, the micro-batch's")
        self._size = sizes[0][0]
        m = _PER_STAGE * len(forward.stages)
        if micro_batches is not None:
            m = check_count("micro_batches", micro_batches)
        make = functools.partial(Feed, source, mesh=forward.mesh, micro_batch=self._size, items=items, prefetch=0)
        make = functools.partial(make, shuffle=False, remainder="pad")
        self._feed = make(gradient_accumulation=m)
        self._feed.check_epoch(1)
        examples, replicas = self._feed.examples, forward.replicas
        like, function = self._feed.like, forward.placement.function
        assert function is not None, "it was cut"
        at = 1 + given_dims(replicas)
        function.check(like, at, key)
        if examples is not None:
            if micro_batches is None:
                most = math.ceil(examples / (self._size * replicas))
                self._feed = make(gradient_accumulation=min(m, most))
            if rest := examples % self._size:  # whether it can be cut for it
                of_rest = lambda leaf: leaf.update(shape=(*leaf.shape[:at], rest, *leaf.shape[at + 1 :]))
                forward.placement.of_batch(jax.tree.map(of_rest, like))

    @jax.transfer_guard("allow")  # the caller asks for this transfer
    def __call__(self, state: TrainState) -> dict[str, float]:
        """Return the means by name; a function that returns one number gives `{"loss": number}`.

        Raises:
            ValueError: the state does not fit.
        """
        self.check(state)
        sums: dict[str, float] = {}
        count, calls = 0, []
        try:
            for number, batch in enumerate(self._feed.epoch()):
                full, rest = divmod(batch.examples, self._size)
                if full:
                    calls.append((full * [self._size], self._run(state, batch.arrays, number)))
                if rest:
                    rows = _rest_of(batch.arrays, full, rest, self._forward.replicas)
                    calls.append(([rest], self._run(state, rows, number + 1)))
                count += batch.examples
        finally:
            self._feed.seek(0)  # after an interruption, too; and the feed lets go of the last batch
        for sizes, outputs in calls:
            for name, value in outputs.items():
                found = np.asarray(on_host(value), np.float64).reshape(-1)[: len(sizes)]
                sums[name] = sums.get(name, 0.0) + float(found @ np.array(sizes, np.float64))
        return {name: value / count for name, value in sums.items()}

    def check(self, state: TrainState) -> None:
        """Raise the `ValueError` that a call raises for this state."""
        if not isinstance(state, TrainState):
            raise ValueError(f"state is a {type(state).__name__}, not a TrainState: give what step.init returns")
        mesh, found = self._forward.mesh, state.step.sharding.device_set
        if found != {*mesh.devices.flat}:
            raise ValueError(
                f"the state is on other devices than the function, {len(found)} and {mesh.size}: cut the function for "
                "the step, step.model.forward(fn, inputs)"
            )
        self._forward.check(StepArgs(state.params, self._feed.like, state.stages, self._key))

    def _run(self, state: TrainState, batch: Batch, number: int) -> dict[str, Tree]:
        key = None if self._key is None else jax.random.fold_in(self._key, number)
        outputs = self._forward(state.params, batch, state.stages, key)
        return outputs if self._is_dict else {"loss": outputs}

    def _check_outputs(self, outputs: Tree) -> None:
        named = outputs if isinstance(outputs, Mapping) else {"": outputs}
        for name, leaf in named.items():
            shape = getattr(leaf, "shape", None)
            if shape != () or not any(jnp.issubdtype(leaf.dtype, kind) for kind in _NUMBERS):
                found = f"{leaf.dtype}{list(shape)}" if shape is not None else f"a {type(leaf).__name__}"
                at = f"[{name!r}]" if self._is_dict else ""
                raise ValueError(
                    f"the function's outputs{at} are {found}: return the mean over the micro-batch, a float scalar, or "
                    "several by name in a dict"
                )


# an array across several instances can be sliced only in a program
@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _rest_of(arrays: Batch, number: int, size: int, replicas: int) -> Batch:
    """Return the first rows of a micro-batch, as one micro-batch of each replica."""

    def rows(leaf: Any) -> Any:
        lead = leaf.shape[: 1 + given_dims(replicas)]
        one = leaf.reshape(-1, *leaf.shape[len(lead) :])[number, :size]
        return jnp.broadcast_to(one, (*lead[:-1], 1, *one.shape))

    return jax.tree.map(rows, arrays)
