"""A stage: a plain function, and where it runs. Neighbours on one place join into a segment."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax

from ipu_jax.devices import ALL_IPUS, AllIpus
from ipu_jax.options import check_choice
from ipu_jax.schedule import Schedule


@dataclasses.dataclass(frozen=True)
class Stage:
    """A piece of the model: a plain function, and where it runs.

    `fn(params, x, microbatch) -> y`. `params` is the group's pytree; on a concurrent stage each leaf is this IPU's
    shard. `x` is what the stage before returned (None for the first), `microbatch` one micro-batch of the batch (its
    leaves without the leading M). The last stage returns the micro-batch's mean loss, a float scalar, or `(loss, aux)`.

    A local stage sees one IPU, and may not communicate over axis "ipu". A concurrent stage runs on all IPUs at once:
    `x` and `y` are the same on all of them, and `fn` sends what it must with `jax.lax` collectives over "ipu".

    Flax modules serve as they are. Linen:

    >>> import flax.linen, jax, jax.numpy as jnp
    >>> dense = flax.linen.Dense(4)
    >>> weights = dense.init(jax.random.key(0), jnp.zeros((1, 8)))["params"]
    >>> Stage(lambda p, x, mb: dense.apply({"params": p}, mb["x"]), params="dense", ipu=0).name
    'dense'

    NNX: split the module once; its state is the group's pytree.

    >>> from flax import nnx
    >>> graph, state = nnx.split(nnx.Linear(8, 4, rngs=nnx.Rngs(0)))
    >>> Stage(lambda p, x, mb: nnx.merge(graph, p)(x), params="linear", ipu=1).name
    'linear'

    Attributes:
        fn: the function above.
        params: the name of its parameter group, or None for a stage without weights. Stages of one IPU, or concurrent
            stages, may name the same group: their gradients add.
        ipu: the IPU of the replica, counted from 0, or `ALL_IPUS` for a concurrent stage.
        reference: an independent dense function of the same signature, which `verify` runs on the whole weights in
            place of `fn`.
        name: what errors call it; the group's name unless given.
        recompute: what B computes again rather than find in the stash: "none"; "all" (only the stage's input is
            stashed, for one more F in B); or a policy of `jax.checkpoint_policies`, which says what is kept.

    Raises:
        ValueError: `fn` is not callable, or `ipu` is neither `ALL_IPUS` nor an int of at least 0.
    """

    fn: Callable[[Any, Any, Any], Any]
    params: str | None = None
    ipu: int | AllIpus = 0
    reference: Callable[[Any, Any, Any], Any] | None = None
    name: str = ""
    recompute: Literal["none", "all"] | Callable[..., Any] = "none"

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn={self.fn!r} is not callable: give a function of (params, x, microbatch)")
        if self.ipu is not ALL_IPUS and (isinstance(self.ipu, bool) or not isinstance(self.ipu, int) or self.ipu < 0):
            raise ValueError(f"ipu={self.ipu!r} is not an IPU: give an int of at least 0, or ALL_IPUS")
        if not callable(self.recompute):
            check_choice("recompute", self.recompute, ("none", "all"))
        if not self.name:
            object.__setattr__(self, "name", self.params or getattr(self.fn, "__name__", "stage"))

    def remembered(self) -> Callable[[Any, Any, Any], Any]:
        """`fn`, told what to keep for its backward."""
        if self.recompute == "none":
            return self.fn
        # F and B stand in loops of their own, across which XLA merges nothing: no need to prevent it
        return jax.checkpoint(self.fn, policy=self.recompute if callable(self.recompute) else None, prevent_cse=False)

    @property
    def place(self) -> int | None:
        """The IPU, or None for a concurrent stage: the placement that a schedule speaks of."""
        return None if isinstance(self.ipu, AllIpus) else self.ipu


@dataclasses.dataclass(frozen=True)
class Segment:
    """Neighbouring stages that run where they stand, one after the other, without a message between them."""

    stages: tuple[Stage, ...]
    first: int  # the number of its first stage

    @property
    def place(self) -> int | None:
        return self.stages[0].place

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(stage.params for stage in self.stages if stage.params is not None))

    @property
    def name(self) -> str:
        return " + ".join(stage.name for stage in self.stages)

    def __call__(self, params: dict[str, Any], x: Any, microbatch: Any, *, reference: bool = False) -> Any:
        for number, stage in enumerate(self.stages, self.first):
            fn = stage.remembered()
            if reference:
                fn = stage.fn if stage.reference is None else stage.reference
            with naming(stage.name, number):
                x = fn(None if stage.params is None else params[stage.params], x, microbatch)
        return x


@contextlib.contextmanager
def naming(name: str, number: int) -> Iterator[None]:
    """Adds to an error raised inside which stage it was raised in."""
    try:
        yield
    except Exception as error:
        error.add_note(f"raised in stage {number}, {name!r}")
        raise


def segments_of(stages: tuple[Stage, ...], schedule: Schedule) -> tuple[Segment, ...]:
    """Joins neighbouring stages on one IPU, and neighbouring concurrent stages, that always run in the same tick."""
    when = list(zip(schedule.forward, schedule.backward, schedule.weight or schedule.backward, strict=True))
    found: list[Segment] = []
    for number, stage in enumerate(stages):
        if found and found[-1].place == stage.place and when[number] == when[number - 1]:
            found[-1] = dataclasses.replace(found[-1], stages=(*found[-1].stages, stage))
        else:
            found.append(Segment((stage,), number))
    return tuple(found)
