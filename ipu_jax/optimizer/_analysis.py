"""Reading an optimizer: what of its update runs where the weights lie, and what every IPU must know.

The optimizer's update is traced once, on the logical tree. Each value of the trace is of one of four kinds:

    like a leaf    of the leaf's shape, computed from it element by element: held where the leaf is, cut and padded as it
    owned          depends on one leaf, which one IPU has whole: computed by that IPU alone, in any shape
    summary        a reduction of a leaf that is split over the IPUs, or cut over the replicas: of partial results
    everywhere     everything else: computed by every IPU

An example, of momentum clipped by its norm (s is a summary, or owned, by where w is):

    g, m           like w        m' = b1 * m + (1 - b1) * g
    s              one number    s  = sum(m' * m')                  gathered, since other leaves' numbers meet it
    t              everywhere    t  = min(1, c / sqrt(s + s2 + ...))
    u              like w        u  = t * m'                        one level later

A level ends with one all_gather of all the numbers that several leaves need by then: sgd, adam, and lamb on whole
leaves need none, clipping by the global norm one. Nothing is known of any optimizer by name; what cannot be spread is
refused by this reading.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from ipu_jax._jaxprs import laid_open
from ipu_jax.optimizer.blocks import Cells
from ipu_jax.weights.packing import Leaf

# fmt: off
_ELEMENTWISE = frozenset((
    "_", "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt",
    "ceil", "clamp", "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite",
    "le", "lgamma", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not",
    "or", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")


@dataclasses.dataclass(frozen=True)
class Summary:
    """Describe an equation that reads one leaf as a whole, or (`eqn` None) a one-element leaf that others need.

    Attributes:
        eqn: the equation; its inputs are like the leaf, or of every IPU.
        leaf: which.
        outputs: the variables that every IPU then knows.
    """

    eqn: Any
    leaf: int
    outputs: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Reading:
    """Hold a traced update, and where each of its values is computed.

    Attributes:
        jaxpr: of (gradients, state, params, value) to (updates, new state), leaf by leaf.
        consts: what the trace closes over.
        state_treedef: the optimizer's state.
        like: variable to leaf; a variable that is not in it is known to every IPU.
        owned: the variables of `like` that the leaf's owner computes from the whole leaf, in their own shape.
        like_state: number of a leaf of the state to the leaf of the weights that it lies with.
        everywhere: per level, the equations on what every IPU knows.
        summaries: per level, what is gathered at its end.
        fills: variables that hold one number in every element, to that number's variable.
        made_by: a variable's equation.
    """

    jaxpr: Any
    consts: tuple[Any, ...]
    state_treedef: Any
    like: dict[Any, int]
    owned: frozenset[Any]
    like_state: dict[int, int]
    everywhere: tuple[tuple[Any, ...], ...]
    summaries: tuple[tuple[Summary, ...], ...]
    fills: dict[Any, Any]
    made_by: dict[Any, Any]


def read(optimizer: Any, cells: Cells) -> Reading:
    """Trace the optimizer's update on the logical tree, and find where each value can be computed.

    Args:
        optimizer: an `optax.GradientTransformation`; one that takes extra arguments gets `value=`, the loss.
        cells: where the weights lie.

    Raises:
        ValueError: the update reads a leaf in a way that needs all of it in one place, where it is not.
    """
    optimizer = optax.with_extra_args_support(optimizer)
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in cells.leaves]
    weights = cells.logical(leaves)
    state = jax.eval_shape(optimizer.init, weights)
    treedef = jax.tree.structure(state)

    def update(gradients: Any, state: Any, params: Any, value: Any) -> Any:
        updates, new = optimizer.update(gradients, state, params, value=value)
        if jax.tree.structure(new) != treedef or jax.tree.structure(updates) != cells.treedef:
            raise ValueError(
                "optimizer: its update gives a tree of another structure than it was given: "
                "an optax.GradientTransformation must keep both"
            )
        return updates, new

    loss = jax.ShapeDtypeStruct((), "float32")
    traced = laid_open(jax.make_jaxpr(update)(weights, state, weights, loss))
    reading = _Reader(traced, len(leaves), treedef, cells)
    while not reading.settled():
        pass
    return reading.result()


class _Reader:
    """Find where values are computed, repeatedly, until the new state is laid out as the old one."""

    def __init__(self, traced: Any, leaves: int, treedef: Any, cells: Cells):
        self.traced, self.cells, self.treedef = traced, cells, treedef
        jaxpr = traced.jaxpr
        self.gradients, self.params = jaxpr.invars[:leaves], jaxpr.invars[-1 - leaves : -1]
        self.state, self.new_state = jaxpr.invars[leaves : -1 - leaves], jaxpr.outvars[leaves:]
        self.like_state: dict[int, int] = {}

    def settled(self) -> bool:
        self.like: dict[Any, int] = {}
        # what every IPU holds whole, it can compute with as it likes
        lying = [n for n in range(len(self.gradients)) if not self.is_known(n)]
        self.like.update({self.gradients[n]: n for n in lying} | {self.params[n]: n for n in lying})
        self.like.update({self.state[i]: leaf for i, leaf in self.like_state.items()})
        shape_of = lambda i: self.cells.leaves[self.like_state[i]].shape  # noqa: E731
        self.owned = {self.state[i] for i in self.like_state if self.state[i].aval.shape != shape_of(i)}
        self.levels: dict[Any, int] = {}
        self.everywhere: list[list[Any]] = []
        self.summaries: list[list[Summary]] = []
        self.published: dict[Any, int] = {}
        self.fills: dict[Any, Any] = {}
        for eqn in self.traced.jaxpr.eqns:
            self.place(eqn)
        found = {
            i: self.like[out]
            for i, out in enumerate(self.new_state)
            if not isinstance(out, core.Literal) and out in self.like
        }
        grown = self.like_state | found
        if grown == self.like_state:
            return True
        self.like_state = grown
        return False

    def is_known(self, leaf: int) -> bool:
        """Return whether every IPU of every replica updates all of the leaf."""
        return self.cells.replicas == 1 and self.cells.cells[self.cells.cell_of(leaf)].is_whole

    def place(self, eqn: Any) -> None:
        inputs = [v for v in eqn.invars if not isinstance(v, core.Literal)]
        of_leaves = {self.like[v] for v in inputs if v in self.like}
        level = max((self.levels.get(v, 0) for v in inputs), default=0)
        if len(of_leaves) == 1 and not self.adds_up(inputs):
            (leaf,) = of_leaves
            if self.is_elementwise(eqn, leaf):
                self.like[eqn.outvars[0]] = leaf
                self.levels[eqn.outvars[0]] = level
                return
            if self.is_owned(leaf):
                self.like.update(dict.fromkeys(eqn.outvars, leaf))
                self.owned.update(eqn.outvars)
                self.levels.update(dict.fromkeys(eqn.outvars, level))
                return
            self.check_summary(eqn, leaf)
            self.at(level, self.summaries).append(Summary(eqn, leaf, tuple(eqn.outvars)))
            self.levels.update(dict.fromkeys(eqn.outvars, level + 1))
            return
        for v in dict.fromkeys(inputs):
            if v in self.like:  # several leaves meet: each must be one number
                level = max(level, self.publish(eqn.primitive.name, v))
        self.at(level, self.everywhere).append(eqn)
        self.levels.update(dict.fromkeys(eqn.outvars, level))
        if eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
            self.fills[eqn.outvars[0]] = eqn.invars[0]

    def at(self, level: int, lists: list[list[Any]]) -> list[Any]:
        while len(lists) <= level:
            lists.append([])
        return lists[level]

    def publish(self, name: str, v: Any) -> int:
        if v not in self.published:
            self.check_published(name, v)
            level = self.levels.get(v, 0)
            self.at(level, self.summaries).append(Summary(None, self.like[v], (v,)))
            self.published[v] = level + 1
        return self.published[v]

    def check_published(self, name: str, v: Any) -> None:
        """Raise `ValueError` unless a value of one leaf is small, so that every IPU can be told it."""
        leaf = self.cells.leaves[self.like[v]]
        if v.aval.size > 1 and not (v in self.owned and _is_small(v, leaf)):
            raise ValueError(
                f"optimizer: its {name} reads all of {leaf.path} together with other leaves, but "
                f"they {self.lie(self.like[v])}: use transforms that work leaf by leaf, "
                "or that meet in sums and norms"
            )
        if v in self.owned and not _is_told(v):
            raise ValueError(_untold(name, v, leaf))

    def lie(self, leaf: int) -> str:
        if self.cells.replicas > 1:
            return f"are cut over {self.cells.replicas} replicas (shard_optimizer)"
        return f"lie apart, on {self.cells.ipus} IPUs"

    def is_elementwise(self, eqn: Any, leaf: int) -> bool:
        shape = self.cells.leaves[leaf].shape
        if eqn.primitive.name not in _ELEMENTWISE or [v.aval.shape for v in eqn.outvars] != [shape]:
            return False
        # a dim of size 1 may be stretched to the leaf's, but not the leaf's own
        own = [not isinstance(v, core.Literal) and v in self.like for v in eqn.invars]
        shapes = [v.aval.shape for v in eqn.invars]
        return all(s == shape if is_own else _fits(s, shape) for is_own, s in zip(own, shapes, strict=True))

    def adds_up(self, inputs: list[Any]) -> bool:
        """Return whether numbers of one owned leaf meet what was computed from other leaves, as in a sum of norms."""
        own = [v for v in inputs if v in self.like]
        return all(v in self.owned and v.aval.size == 1 for v in own) and any(
            self.levels.get(v, 0) > 0 for v in inputs if v not in self.like
        )

    def is_owned(self, leaf: int) -> bool:
        """Return whether one IPU has all of the leaf, so that it can compute anything of it alone."""
        return self.cells.replicas == 1 and self.cells.cells[self.cells.cell_of(leaf)].is_slot

    def check_summary(self, eqn: Any, leaf: int) -> None:
        """Raise `ValueError` unless the equation can be computed where the leaf is, and its result is smaller."""
        name, of_leaf = eqn.primitive.name, self.cells.leaves[leaf]
        cell = self.cells.cells[self.cells.cell_of(leaf)]
        if self.cells.replicas > 1:
            if name not in REDUCTIONS or len(eqn.params["axes"]) != len(of_leaf.shape):
                dims = f" over dims {tuple(eqn.params['axes'])}" if name in REDUCTIONS else ""
                raise ValueError(
                    f"optimizer: its {name}{dims} needs {of_leaf.path} of shape {of_leaf.shape} in one piece, but "
                    f"shard_optimizer=True cuts it over {self.cells.replicas} replicas: use an optimizer that is "
                    "elementwise or takes norms of whole leaves (sgd, adam, lamb, clipping), or shard_optimizer=False"
                )
        elif name not in REDUCTIONS:
            raise ValueError(
                f"optimizer: its {name} needs {of_leaf.path} of shape {of_leaf.shape} in one piece, but dim "
                f"{cell.split} is split over {self.cells.ipus} IPUs: use an optimizer that is elementwise or reduces "
                "over dims, or leave the leaf whole (PartitionSpec())"
            )
        for v in eqn.outvars:
            if not _is_small(v, of_leaf):
                raise ValueError(
                    f"optimizer: its {name} over dims {tuple(eqn.params['axes'])} keeps all elements of {of_leaf.path} of "
                    f"shape {of_leaf.shape}, but dim {cell.split} is split over {self.cells.ipus} IPUs: use an optimizer "
                    "that is elementwise or takes norms of whole leaves, or leave the leaf whole (PartitionSpec())"
                )
            if not _is_told(v):
                raise ValueError(_untold(name, v, of_leaf))

    def result(self) -> Reading:
        levels = max(len(self.everywhere), len(self.summaries) + 1)
        self.at(levels - 1, self.everywhere)
        self.at(levels - 1, self.summaries)
        return Reading(
            self.traced.jaxpr,
            tuple(self.traced.consts),
            self.treedef,
            self.like,
            frozenset(self.owned),
            self.like_state,
            tuple(map(tuple, self.everywhere)),
            tuple(map(tuple, self.summaries)),
            self.fills,
            {v: eqn for eqn in self.traced.jaxpr.eqns for v in eqn.outvars},
        )


def _is_small(v: Any, leaf: Leaf) -> bool:
    """Return whether a value has fewer elements than the leaf, or one."""
    return math.prod(v.aval.shape) <= max(1, leaf.size - 1) or not leaf.shape


def _is_told(v: Any) -> bool:
    """Return whether a value's dtype survives the all_gather, which is one of floats."""
    return jnp.issubdtype(v.aval.dtype, jnp.floating) or v.aval.dtype == bool


def _untold(name: str, v: Any, leaf: Leaf) -> str:
    return (
        f"optimizer: its {name} makes {v.aval.dtype} of {leaf.path}: only floats and bools of a leaf "
        "can be told to all IPUs"
    )


def _fits(small: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return small == () or (len(small) == len(shape) and all(a in (1, b) for a, b in zip(small, shape, strict=True)))
