"""Analyse an optimizer: find where each value of its update can be computed, and which values every IPU needs.

The update is traced once, on the user's tree. Where rows of a leaf are on several IPUs, `_rows` divides the trace.
Each value of the trace is of one of four kinds:

    elementwise    has a leaf's shape, computed from it element by element: cut and padded like the leaf
    owned          any other value of one leaf that is whole on one IPU: computed by this IPU alone, in any shape
    reduction      of a leaf that is split over the IPUs or cut over the replicas: partial results, one all_gather
    replicated     everything else: computed by every IPU

An example is momentum clipped by the global norm. Its s is owned if w is whole on one IPU, and otherwise a reduction:

    g, m    elementwise    m' = b1 * m + (1 - b1) * g
    s       one number     s  = sum(m' * m')                      gathered, because it is added to other leaves' numbers
    t       replicated     t  = min(1, c / sqrt(s + s2 + ...))
    u       elementwise    u  = t * m'                            one level later

A level ends with one all_gather of all reductions, and of all owned numbers that meet other leaves. sgd and adam need
no all_gather. lamb needs none for leaves that are whole on one IPU. Clipping by the global norm needs one. No optimizer
is known by name: the trace alone shows which updates cannot be divided between the IPUs, and these are refused. A
`cond` between whole trees, which skips an update, is divided as selects.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Params, Tree, Value, Var
from ipu_jax.base.jaxprs import ELEMENTWISE, closed_of, evaluated, laid_open, variables
from ipu_jax.core.layout.blocks import Blocks
from ipu_jax.core.layout.packing import Leaf
from ipu_jax.core.layout.tree_parts import joined
from ipu_jax.core.optimizer._rows import in_rows

REDUCTIONS = ("reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or")
_LEAVE_WHOLE = "leave the leaf whole (PartitionSpec(); in a function that is cut, head='local' and no everywhere of it)"
_OF_LOSS_FUNCTIONS = ("value_fn", "grad_fn", "obj_fn")


@dataclasses.dataclass(frozen=True)
class LeafReduction:
    """Describe values of one leaf that are gathered, so that every IPU knows them.

    Attributes:
        eqn: the equation that reduces the leaf, if each IPU or replica has a part of it; None if the leaf's owner
            already has the whole value.
        leaf: number of the leaf.
        outputs: the variables that every IPU knows afterwards.
    """

    eqn: Eqn
    leaf: int
    outputs: tuple[Var, ...]


@dataclasses.dataclass(frozen=True)
class UpdateAnalysis:
    """Describe a traced update, and where each of its values is computed.

    Attributes:
        jaxpr: the update, from (gradients, state, params, value) to (updates, new state), leaf by leaf.
        consts: the arrays that the trace closes over.
        state_treedef: structure of the optimizer's state.
        leaf_of: the leaf of each elementwise or owned variable. All other variables are known to every IPU.
        owned: the owned variables.
        leaf_of_state: per number of a leaf of the state, the leaf of the weights that it is kept with.
        replicated: per level, the equations that every IPU computes.
        reductions: per level, the values that are gathered at its end.
        constant_fills: variables in which all elements are one number, each with the variable of this number.
        made_by: the equation that computes each variable.
    """

    jaxpr: Jaxpr
    consts: tuple[Value, ...]
    state_treedef: Any
    leaf_of: dict[Var, int]
    owned: frozenset[Var]
    leaf_of_state: dict[int, int]
    replicated: tuple[tuple[Var, ...], ...]
    reductions: tuple[tuple[LeafReduction, ...], ...]
    constant_fills: dict[Var, Value]
    made_by: dict[Var, Eqn]


def analyze_update(optimizer: Any, blocks: Blocks) -> UpdateAnalysis:
    """Trace the optimizer's update on the logical tree, and find where each value can be computed.

    Args:
        optimizer: an `optax.GradientTransformation`; if its update takes `value=`, it gets the loss.
        blocks: where the weights are.

    Raises:
        ValueError: the update needs a divided leaf in one piece, leaves of several IPUs at once, or an
            argument that a training step does not have.
    """
    shapes = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in blocks.leaves]
    in_parts = blocks.logical_tree(shapes)
    weights = jax.eval_shape(joined, in_parts)
    state = jax.eval_shape(optimizer.init, weights)

    def update(gradients: Params, state: Tree, params: Params, value: Value) -> Tree:
        updates, new = updated(optimizer, gradients, state, params, value)
        if jax.tree.structure((updates, new)) != jax.tree.structure((params, state)):
            raise ValueError(
                "optimizer: its update returns a tree with a different structure than the one it got: "
                "an optax.GradientTransformation must keep both"
            )
        return updates, new

    loss = jax.ShapeDtypeStruct((), jnp.result_type(jnp.float32, *(leaf.dtype for leaf in shapes)))
    traced = laid_open(jax.make_jaxpr(update)(weights, state, weights, loss))
    if jax.tree.structure(weights) != blocks.treedef:
        traced, state = in_rows(traced, in_parts, state, blocks.leaves)
        traced = laid_open(traced)  # branches of a cond are inlined there, and call jitted functions
    treedef = jax.tree.structure(state)
    while True:
        analyzer = _Analyzer(traced, len(shapes), treedef, blocks)
        # a part of the state that is computed from a leaf is kept with it, and then more values belong to this leaf
        while not analyzer.is_settled():
            pass
        if analyzer.divided_cond is None:
            return analyzer.result()
        traced = with_selects(traced, analyzer.divided_cond)


class _Analyzer:
    """Classify the values of a trace repeatedly, until each part of the new state is kept where the old one is."""

    def __init__(self, traced: Jaxpr, leaves: int, treedef: Any, blocks: Blocks):
        self.traced, self.blocks, self.treedef = traced, blocks, treedef
        jaxpr = traced.jaxpr
        self.gradients, self.params = jaxpr.invars[:leaves], jaxpr.invars[-1 - leaves : -1]
        self.state, self.new_state = jaxpr.invars[leaves : -1 - leaves], jaxpr.outvars[leaves:]
        self.leaf_of_state: dict[int, int] = {}
        self.divided_cond: Eqn = None

    def is_settled(self) -> bool:
        """Classify all values, and return whether this added no part of the state to those that are kept with a leaf.

        Stops at a cond that no single IPU can run, and stores it in `divided_cond`.
        """
        leaves = self.blocks.leaves
        # every IPU can compute anything from a leaf that is whole on every IPU
        divided = [n for n in range(len(leaves)) if not self.is_everywhere(n)]
        self.leaf_of: dict[Var, int] = {self.gradients[n]: n for n in divided} | {self.params[n]: n for n in divided}
        self.leaf_of.update({self.state[i]: leaf for i, leaf in self.leaf_of_state.items()})
        self.owned = {
            self.state[i] for i, leaf in self.leaf_of_state.items() if self.state[i].aval.shape != leaves[leaf].shape
        }
        self.levels: dict[Var, int] = {}
        self.replicated = collections.defaultdict[int, list[Any]](list)  # per level
        self.reductions = collections.defaultdict[int, list[LeafReduction]](list)
        self.gathered: dict[Var, int] = {}
        self.constant_fills: dict[Var, Value] = {}
        for eqn in self.traced.jaxpr.eqns:
            if self.is_divided_cond(eqn):
                self.divided_cond = eqn
                return True
            self.classify(eqn)
        of_leaves = {
            i: self.leaf_of[v]
            for i, v in enumerate(self.new_state)
            if not isinstance(v, core.Literal) and v in self.leaf_of
        }
        grown = self.leaf_of_state | of_leaves
        if grown == self.leaf_of_state:
            return True
        self.leaf_of_state = grown
        return False

    def is_everywhere(self, leaf: int) -> bool:
        """Return whether every IPU of every replica updates all of the leaf, with a state in its own memory."""
        blocks = self.blocks
        return blocks.memory is None and not blocks.is_divided and blocks.is_whole(blocks.block_of(leaf))

    def is_divided_cond(self, eqn: Eqn) -> bool:
        """Return whether the equation is a cond that reads leaves which are not all on one IPU."""
        if eqn.primitive.name != "cond" or eqn.effects:
            return False
        leaves = {self.leaf_of[v] for v in variables(eqn.invars) if v in self.leaf_of}
        return len(leaves) > 1 or any(not self.blocks.is_local(leaf) for leaf in leaves)

    def classify(self, eqn: Eqn) -> None:
        inputs = variables(eqn.invars)
        of_leaves = {self.leaf_of[v] for v in inputs if v in self.leaf_of}
        level = max((self.levels.get(v, 0) for v in inputs), default=0)
        if len(of_leaves) == 1 and not self.adds_up(inputs):
            (leaf,) = of_leaves
            is_elementwise = self.is_elementwise(eqn, leaf)
            if is_elementwise or self.blocks.is_local(leaf):
                self.leaf_of.update(dict.fromkeys(eqn.outvars, leaf))
                self.levels.update(dict.fromkeys(eqn.outvars, level))
                self.owned.update(() if is_elementwise else eqn.outvars)
                return
            self.check_reduction(eqn, leaf)
            self.reductions[level].append(LeafReduction(eqn, leaf, tuple(eqn.outvars)))
            self.levels.update(dict.fromkeys(eqn.outvars, level + 1))
            return
        for v in dict.fromkeys(inputs):
            if v in self.leaf_of:  # several leaves can only meet in small values
                level = max(level, self.gather_value(eqn, v))
        self.replicated[level].append(eqn)
        self.levels.update(dict.fromkeys(eqn.outvars, level))
        if eqn.primitive.name == "broadcast_in_dim" and not eqn.invars[0].aval.shape:
            self.constant_fills[eqn.outvars[0]] = eqn.invars[0]

    def adds_up(self, inputs: list[Var]) -> bool:
        """Return whether owned numbers of one leaf meet values computed from other leaves, as in a sum of norms.

        Such a sum must be replicated. If its owner computed it, each additional term would need another all_gather.
        """
        own = [v for v in inputs if v in self.leaf_of]
        return all(v in self.owned and v.aval.size == 1 for v in own) and any(
            self.levels.get(v, 0) > 0 for v in inputs if v not in self.leaf_of
        )

    def gather_value(self, eqn: Eqn, v: Var) -> int:
        """Add a value of one leaf to the gathered values, and return the level on which every IPU knows it."""
        if v not in self.gathered:
            leaf, name = self.blocks.leaves[self.leaf_of[v]], eqn.primitive.name
            if v.aval.size > 1 and not (v in self.owned and _is_small(v, leaf)):
                why = f"lie apart, on {self.blocks.ipus} IPUs"
                if self.blocks.is_divided:
                    why = f"are cut over {self.blocks.replicas} replicas (shard_optimizer)"
                elif self.blocks.ipus == 1:
                    why = "are fetched from the host one by one (offload)"
                raise ValueError(
                    f"optimizer: its {name} reads all of {leaf.path} together with other leaves, but they {why}: use "
                    "transforms that work leaf by leaf, or that meet in sums and norms"
                )
            if v in self.owned:
                _check_dtype(name, v, leaf)
            level = self.levels.get(v, 0)
            self.reductions[level].append(LeafReduction(None, self.leaf_of[v], (v,)))
            self.gathered[v] = level + 1
        return self.gathered[v]

    def is_elementwise(self, eqn: Eqn, leaf: int) -> bool:
        shape = self.blocks.leaves[leaf].shape
        if eqn.primitive.name not in ELEMENTWISE or [v.aval.shape for v in eqn.outvars] != [shape]:
            return False
        # an input dim of size 1 may be broadcast to the leaf's dim, but a value of the leaf must have its whole shape
        own = [not isinstance(v, core.Literal) and v in self.leaf_of for v in eqn.invars]
        shapes = [v.aval.shape for v in eqn.invars]
        return all(s == shape if is_own else _fits(s, shape) for is_own, s in zip(own, shapes, strict=True))

    def check_reduction(self, eqn: Eqn, leaf: int) -> None:
        """Raise `ValueError` unless partial results of the equation can be combined, and are smaller than the leaf."""
        name, of_leaf = eqn.primitive.name, self.blocks.leaves[leaf]
        split = self.blocks.split(self.blocks.block_of(leaf))
        if self.blocks.is_divided:
            if name not in REDUCTIONS or len(eqn.params["axes"]) != len(of_leaf.shape):
                dims = f" over dims {tuple(eqn.params['axes'])}" if name in REDUCTIONS else ""
                raise ValueError(
                    f"optimizer: its {name}{dims} needs {of_leaf.path} of shape {of_leaf.shape} in one piece, but "
                    f"shard_optimizer=True cuts it over {self.blocks.replicas} replicas: use an optimizer that is "
                    "elementwise or takes norms of whole leaves (sgd, adam, lamb, clipping), or shard_optimizer=False"
                )
        elif name not in REDUCTIONS:
            raise ValueError(
                f"optimizer: its {name} needs {of_leaf.path} of shape {of_leaf.shape} in one piece, but dim "
                f"{split} is split over {self.blocks.ipus} IPUs: use an optimizer that is elementwise or reduces "
                f"over dims, for this leaf alone by optax.partition, or {_LEAVE_WHOLE}"
            )
        for v in eqn.outvars:
            if not _is_small(v, of_leaf):
                raise ValueError(
                    f"optimizer: its {name} over dims {tuple(eqn.params['axes'])} keeps all elements of "
                    f"{of_leaf.path} of shape {of_leaf.shape}, but dim {split} is split over {self.blocks.ipus} "
                    f"IPUs: use an optimizer that is elementwise or takes norms of whole leaves, or {_LEAVE_WHOLE}"
                )
            _check_dtype(name, v, of_leaf)

    def result(self) -> UpdateAnalysis:
        levels = range(max([1, *(n + 1 for n in self.replicated), *(n + 2 for n in self.reductions)]))
        return UpdateAnalysis(
            self.traced.jaxpr,
            tuple(self.traced.consts),
            self.treedef,
            self.leaf_of,
            frozenset(self.owned),
            self.leaf_of_state,
            tuple(tuple(self.replicated[level]) for level in levels),
            tuple(tuple(self.reductions[level]) for level in levels),
            self.constant_fills,
            {v: eqn for eqn in self.traced.jaxpr.eqns for v in eqn.outvars},
        )


def _is_small(v: Var, leaf: Leaf) -> bool:
    """Return whether a value has fewer elements than the leaf, or only one element."""
    return math.prod(v.aval.shape) <= max(1, leaf.size - 1) or not leaf.shape


def _check_dtype(name: str, v: Var, leaf: Leaf) -> None:
    """Raise `ValueError` unless the value can be gathered."""
    if not any(jnp.issubdtype(v.aval.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise ValueError(
            f"optimizer: its {name} makes {v.aval.dtype} of {leaf.path}: only floats, integers and bools of a leaf "
            "can be sent to all IPUs"
        )


def _fits(small: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return small == () or (len(small) == len(shape) and all(a in (1, b) for a, b in zip(small, shape, strict=True)))


def with_selects(traced: Jaxpr, cond: Eqn) -> Jaxpr:
    """Return the closed jaxpr with the branches of the equation `cond` inlined, and a select between their results.

    cond(p, update, keep, tree)    ->    leaf by leaf: select(p, updated leaf, kept leaf)

    So each value can be computed where its leaf is. `optax.apply_if_finite` and `optax.MultiSteps` skip updates with a
    `cond` between whole trees. Both branches are computed, and the selected result is the same bit by bit.
    """

    def rule(eqn: Eqn, inputs: list[Value]) -> list[Value] | None:
        if eqn is not cond:
            return None
        index, *operands = inputs
        branches = [laid_open(closed_of(branch)) for branch in eqn.params["branches"]]
        results = [evaluated(branch, operands, lambda *_: None) for branch in branches]
        return [lax.select_n(index, *cases) for cases in zip(*results, strict=True)]

    return jax.make_jaxpr(lambda *args: evaluated(traced, args, rule))(*traced.in_avals)


# the arguments of an update: gradients of an update, not of each example; state; weights; and `value=`, the loss


class MissingArgumentError(ValueError):
    """An optimizer's update needs an argument, or gradients, that a training step cannot give."""


def updated(optimizer: Any, gradients: Params, state: Tree, params: Params, value: Value) -> Tree:
    """Return `(updates, new state)`. Passes the loss as `value=` only to an update that takes it (sam's does not).

    Raises:
        MissingArgumentError: the update calls the loss function itself, or reads gradients per example.
    """
    try:
        try:
            return optax.with_extra_args_support(optimizer).update(gradients, state, params, value=value)
        except TypeError as error:
            if "unexpected keyword argument 'value'" not in str(error):
                raise
            return optimizer.update(gradients, state, params)
    except (TypeError, ValueError) as error:
        if "have a batch dimension in the 0th axis" in str(error):
            raise MissingArgumentError(
                "optimizer: its update needs the gradients of each example, as optax.contrib.dpsgd does, but a "
                "training step has only their sum: clip them inside the loss function, with a jax.custom_vjp as in "
                "'Gradients per example' of docs/training.md, and add noise by optax.chain(optax.add_noise(...), "
                "optax.sgd(...))"
            ) from error
        needed = next((name for name in _OF_LOSS_FUNCTIONS if name in str(error)), None)
        if needed is None:
            raise
        raise MissingArgumentError(
            f"optimizer: its update needs {needed}=, a function that computes the loss of other weights, but a "
            "training step computes one loss and its gradients per update: use an optimizer without a line search and "
            "without gradients of its own (adamw, lion, muon; of optax.contrib.sam the one without opaque_mode)"
        ) from error
