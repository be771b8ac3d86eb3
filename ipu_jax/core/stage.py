"""Define stages: plain functions with the place where they run."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ipu_jax.base.annotations import Function, Json, Tree, Value
from ipu_jax.base.checks import as_int, check_choice
from ipu_jax.base.decorators import public
from ipu_jax.base.jaxprs import checkpointed, closed_of
from ipu_jax.core.mesh.axes import names_in
from ipu_jax.core.mesh.devices import ALL_IPUS, IPU_AXIS, REPLICA_AXIS, AllIpus


@public
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Outputs:
    """The result of a stage that returns more than `y`.

    Attributes:
        y: the input of the next stage; from the last stage, the micro-batch's mean loss.
        state: the new state, shaped like the old one, if the stage has state.
        skips: by name, values that a later stage `takes`; gradients flow back through them.
        loss: a float scalar that is added to the micro-batch's loss, such as a balance loss; gradients flow back
            through it. In prediction it is ignored.
        aux: other results for a micro-batch, such as metrics; no gradient flows through it.
    """

    y: Tree
    state: Tree = None
    skips: Mapping[str, Tree] = dataclasses.field(default_factory=dict)
    aux: Tree = None
    loss: Value = None


_WHOLE = PartitionSpec()


@public
@dataclasses.dataclass(frozen=True)
class Stage:
    """A piece of the model: a plain function, and where it runs.

    `fn(params, x, microbatch) -> y`. `params` is the group's pytree; on a concurrent stage each leaf is this IPU's
    shard. `x` is the result of the previous stage (None for the first), and `microbatch` is one micro-batch of the
    batch (its leaves without the leading M). The last stage returns the micro-batch's mean loss, a float scalar, or
    `(loss, aux)`. A stage that has more results returns `Outputs`. A stage that needs more inputs gets them as keyword
    arguments: `state=`, `key=`, `skips=`, `shared=`.

    A local stage runs on one IPU, and must not communicate over axis "ipu". A concurrent stage runs on all IPUs at
    once: `x`, `y`, keys and skips are the same on all IPUs, and `fn` communicates with `jax.lax` collectives over
    "ipu".

    A stage with state (as in batch norm), random numbers (as in dropout), and another function for evaluation:

    >>> def block(w, x, mb, *, state, key):
    ...     keep = jax.random.bernoulli(key, 0.9, mb.shape)
    ...     return Outputs(mb * w * keep, state={"seen": state["seen"] + 1})
    >>> Stage(block, params="block", state="block", random=True, evaluate=lambda w, x, mb, *, state, key: mb * w).name
    'block'

    Attributes:
        fn: the function above.
        params: the name of its parameter group, or None for a stage without weights. Several stages of one IPU, or
            several concurrent stages, can name the same group; their gradients are added.
        ipu: the IPU of the replica, counted from 0, or `ALL_IPUS` for a concurrent stage.
        reference: an independent dense function of the same signature, which `verify` runs on the whole weights in
            place of `fn`.
        name: its name in error messages. Default: the group's name.
        recompute: which values B computes again instead of reading the stash: "auto" (those that are cheaper to compute
            again than to stash, such as gelu, norms and softmax, but not products with weights); "none"; "all" (only
            the stage's input is stashed, and B runs F again); or a policy of `jax.checkpoint_policies`, which says
            which values are stashed. Complex values, which jax cannot keep, are then always computed again.
        state: the name of a state group of this stage only: arrays of any dtype that each F reads as `state=` and
            replaces, one micro-batch after the other, in order. No gradient flows through it. At the end of the
            step its floats are averaged over the replicas; other dtypes keep the value of replica 0.
        random: whether `fn` gets `key=`, a typed key of this micro-batch, stage and replica. It is the same on all IPUs
            of the replica, when B recomputes, and in the unsharded program. Under "same", all such stages get the same
            key: `fold_in(fold_in(key, replica), micro-batch)`.
        takes: names of skips that earlier stages returned in their `Outputs`; `fn` gets them as `skips=`, a dict. The
            stages in between pass them on, and several stages can take the same skip.
        shared: names of parameter groups that every IPU holds whole, so that stages on any IPUs can read them, such as
            a tied embedding; `fn` gets them as `shared=`, `{name: the group's pytree}`. Each IPU adds up the gradients
            of its own stages; one psum over "ipu" adds them at the end of the step, so all copies stay equal. It is in
            no message, but every IPU holds a copy, its gradient and its optimizer state. A group cannot be both shared
            and the `params` of a local stage.
        evaluate: the function that `Pipeline.loss` runs in place of `fn` (without dropout, with batch norm's running
            statistics). It is called like `fn`; a state that it returns is dropped, and `key=` is None if none is
            given.
        predict: the function that `Pipeline.predict` runs, in place of `evaluate` or `fn`. It is called like `fn`. The
            last stage must have one, which returns the outputs of one micro-batch, any pytree of arrays, in place of
            the loss. If it returns a state, the next micro-batch reads that state (a cache); otherwise the state stays.
            Without `predict`, the state that `evaluate` or `fn` returns is dropped; for `fn`, a warning says so. A
            stage with a cache needs `predict=fn`. `key=` is None if none is given.
        predict_specs: on the last stage, a `PartitionSpec`, or a pytree of them that is a prefix of the outputs, for
            the dims of one micro-batch's outputs: an output with "ipu", of a concurrent stage, stays split over the
            IPUs, such as logits by vocabulary; an output with a further axis of the mesh stays split over that one. By
            default every IPU returns the whole outputs.

    Raises:
        ValueError: a function is not callable, `ipu` is neither `ALL_IPUS` nor an int of at least 0, `recompute` is
            unknown, `takes` or `shared` is not a tuple of names, `shared` names the stage's `params`, or
            `predict_specs` are not PartitionSpecs, or name "ipu" for a stage that is local or has no `predict`.
    """

    fn: Function
    params: str | None = None
    ipu: int | AllIpus = 0
    reference: Function | None = None
    name: str = ""
    recompute: Literal["auto", "none", "all"] | Function = "auto"
    state: str | None = None
    random: bool | Literal["same"] = False
    takes: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    evaluate: Function | None = None
    predict: Function | None = None
    predict_specs: Tree = _WHOLE

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ValueError(f"fn={self.fn!r} is not callable: give a function of (params, x, microbatch)")
        if self.ipu is not ALL_IPUS:
            ipu = as_int(self.ipu)
            if ipu is None or ipu < 0:
                raise ValueError(f"ipu={self.ipu!r} is not an IPU: give an int of at least 0, or ALL_IPUS")
            object.__setattr__(self, "ipu", ipu)
        for name in ("evaluate", "predict", "reference"):
            if (fn := getattr(self, name)) is not None and not callable(fn):
                raise ValueError(f"{name}={fn!r} is not callable: give a function called like fn, or None")
        for name, call in (("params", "shard"), ("state", "shard_state")):
            kind = type(getattr(self, name)).__name__
            if kind not in ("str", "NoneType"):
                raise ValueError(f"{name} is a {kind}: give the name of a group, and its arrays to pipeline.{call}")
        self._check_predict_specs()
        for what, given in (("takes", self.takes), ("shared", self.shared)):
            names = tuple(given) if isinstance(given, Iterable) and not isinstance(given, str) else (given,)
            if isinstance(given, str) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"{what}={given!r} is not a tuple of names: give {what}=('name',)")
            object.__setattr__(self, what, tuple(dict.fromkeys(names)))
        if self.params in self.shared:
            raise ValueError(f"shared={self.shared!r} holds the stage's own params, {self.params!r}: leave it out")
        if not callable(self.recompute):
            check_choice("recompute", self.recompute, ("auto", "none", "all"))
        if not self.name:
            object.__setattr__(self, "name", self.params or getattr(self.fn, "__name__", "stage"))

    def _check_predict_specs(self) -> None:
        specs = jax.tree.leaves(self.predict_specs, is_leaf=lambda leaf: leaf is None)
        for spec in specs:
            named = [axis for entry in spec for axis in names_in(entry)] if isinstance(spec, PartitionSpec) else [None]
            if None in named or REPLICA_AXIS in named or len({*named}) < len(named):
                raise ValueError(
                    f"predict_specs holds {spec!r}: give a PartitionSpec with 'ipu' at most once and None elsewhere, "
                    "or a tree of them; further axes of the mesh can split dims, too"
                )
        if any(IPU_AXIS in spec for spec in specs):
            if self.predict is None:
                raise ValueError(f"predict_specs={self.predict_specs!r} without predict: give the function as well")
            if self.place is not None:
                raise ValueError(
                    f"predict_specs={self.predict_specs!r} on IPU {self.ipu}: only a concurrent stage (ipu=ALL_IPUS) "
                    "has outputs that are split over the IPUs"
                )

    @property
    def place(self) -> int | None:
        """Return the IPU, or None for a concurrent stage, as in the placement of a schedule."""
        return None if isinstance(self.ipu, AllIpus) else self.ipu

    @property
    def groups(self) -> tuple[str, ...]:
        """Return the names of all parameter groups that the stage reads, its own first."""
        return self.shared if self.params is None else (self.params, *self.shared)

    def function(self, role: "Role") -> Function:
        """Return the function that runs in that role."""
        if role == "prediction":
            return self.predict or self.evaluate or self.fn
        if role == "evaluation":
            return self.evaluate or self.fn
        return (self.reference or self.fn) if role == "reference" else self.fn

    def needs_key(self, role: "Role") -> bool:
        """Return whether the stage cannot run in that role without a random key."""
        without = {"evaluation": self.evaluate, "prediction": self.predict or self.evaluate}
        return bool(self.random) and without.get(role) is None

    def checkpointed(self, fn: Function) -> Function:
        """Return one of the stage's functions under its `recompute` policy, if that is neither "auto" nor "none"."""
        if self.recompute in ("auto", "none"):
            return fn
        # prevent_cse is not needed: F and B are in separate loops, and XLA does not merge expressions across them
        policy = _RealsBy(self.recompute) if callable(self.recompute) else None
        return checkpointed(fn, policy=policy, prevent_cse=False)


@dataclasses.dataclass(frozen=True)
class _RealsBy:
    """Let a policy of `jax.checkpoint` decide which values to keep, but never keep complex ones.

    jax rounds what it keeps by `lax.reduce_precision`, which raises `TypeError` for complex values (0.10 to 0.12).
    """

    policy: Function

    def __call__(self, primitive: Any, *avals: Value, **params: Json) -> Any:
        # a function with a derivative of its own has a body, but no rule for shapes
        body = params.get("call_jaxpr")
        made = primitive.abstract_eval(*avals, **params)[0] if body is None else closed_of(body).out_avals
        dtypes = [aval.dtype for aval in jax.tree.leaves(made) if hasattr(aval, "dtype")]
        is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
        return False if is_complex else self.policy(primitive, *avals, **params)


Role = Literal["training", "evaluation", "prediction", "reference"]
"""The purpose for which stages run: a weight update, `Pipeline.loss`, `Pipeline.predict`, or the unsharded update."""


@contextlib.contextmanager
def naming(name: str, number: int) -> Iterator[None]:
    """Add the stage's name and number to any error that is raised inside."""
    try:
        yield
    except Exception as error:
        is_of_none = number == 0 and isinstance(error, TypeError | AttributeError) and "NoneType" in str(error)
        hint = "; x of the first stage is None: it reads the micro-batch" if is_of_none else ""
        error.add_note(f"raised in stage {number}, {name!r}{hint}")
        raise
