"""Find a product and the softmax cross-entropy of it in a program, and make them one operation, which needs no logits.

    z = h @ table.T
    m = max(z); l = log(sum(exp(z - m))) + m - z[y]      ->      l = linear_cross_entropy[h, table, y]
    mean(l)                                                      mean(l)

A loss is recognised by what it computes: usual spellings are traced for the same shapes, and compared operation by
operation. A sum of all losses is a part of the operation, since then one matmul in four is saved.
"""

import functools
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from ipu_jax.base.annotations import Eqn, Jaxpr, Value, Var
from ipu_jax.base.jaxprs import JITS, depending, laid_open, needed, read_by, shape_of, variables
from ipu_jax.core.cutting.numbers import is_zero
from ipu_jax.core.mesh.devices import IPU_AXIS
from sharded_ops import linear_cross_entropy

LINEAR_CROSS_ENTROPY: Final = core.Primitive("linear_cross_entropy")
"""The losses of hidden states, a table, labels, and perhaps a bias. They are computed from a share of the table."""


@LINEAR_CROSS_ENTROPY.def_abstract_eval
def _(hidden: Any, *_: Any, shape: tuple[int, ...], dtype: Any, **__: Any) -> Any:
    return hidden.update(shape=shape, dtype=dtype)


def losses_of_share(values: Sequence[Value], size: int, params: dict[str, Any]) -> Value:
    """Compute the losses, or their sum, from this IPU's rows of the table; `params` comes from the equation."""
    (hidden, table, labels, *more), tokens = values, params["tokens"]
    bias = more.pop(0) if params["has_bias"] else None
    weights: Any = more.pop().reshape(tokens) if more else None
    if params["weights"] in ("counted", "ignored"):
        weights = weights if params["weights"] == "counted" else ~weights
        labels = jnp.where(weights, labels, 0)  # what does not count may be out of range
    labels = jnp.where(labels < 0, labels + size, labels) if params["wraps"] else labels
    is_inside = (labels >= 0) & (labels < size)
    is_sum = not params["shape"]
    found = linear_cross_entropy(
        hidden.reshape(*tokens, hidden.shape[-1]),
        table.T if params["by_columns"] else table,
        labels,
        size=size,
        bias=bias,
        weights=weights,
        axis=IPU_AXIS,
        out_of_range="nan" if params["wraps"] and is_sum else "ignore",
        reduction="sum" if is_sum else "none",
    )
    if params["wraps"] and not is_sum:
        found = jnp.where(is_inside, found, jnp.nan)  # put in, as a look-up does: the gradient is 0, not NaN
    return (params["sign"] * found).reshape(params["shape"]).astype(params["dtype"])


class _Spelling(NamedTuple):
    """A way to write a cross-entropy.

    Attributes:
        loss: of logits (N.., V) and labels (N..).
        sign: 1 if it returns the loss, -1 if it returns the loss with the other sign.
        wraps: whether a negative label counts from the end, and one out of range gives NaN; it gives 0 otherwise.
    """

    loss: Callable[[Any, Any], Any]
    sign: int = 1
    wraps: bool = True


_picked = lambda z, y: jnp.take_along_axis(z, y[..., None], -1)
_lse = functools.partial(jax.nn.logsumexp, axis=-1)
_one_hot = lambda z, y: jax.nn.one_hot(y, z.shape[-1], dtype=z.dtype)
_SPELLINGS: Final = (
    _Spelling(optax.softmax_cross_entropy_with_integer_labels),
    _Spelling(lambda z, y: _picked(jax.nn.log_softmax(z), y), sign=-1),
    _Spelling(lambda z, y: _lse(z) - _picked(z, y)[..., 0]),
    _Spelling(lambda z, y: _lse(z) - _picked(z, y).squeeze(-1)),
    _Spelling(lambda z, y: jnp.sum(_one_hot(z, y) * jax.nn.log_softmax(z), -1), sign=-1, wraps=False),
    _Spelling(lambda z, y: jnp.sum(jax.nn.one_hot(y, z.shape[-1]) * jax.nn.log_softmax(z), -1), sign=-1, wraps=False),
)


@functools.lru_cache(64)
def _traced(spelling: _Spelling, logits: Any, labels: Any) -> Jaxpr:
    """Return the jaxpr of a spelling for these shapes, without equations that its result does not need."""
    closed = laid_open(jax.make_jaxpr(spelling.loss)(logits, labels), (*JITS, "closed_call"))
    return closed.jaxpr.replace(eqns=needed(closed.jaxpr.eqns, closed.jaxpr.outvars))


class _Loss(NamedTuple):
    """Losses, or their sum, and what they are computed from.

    Attributes:
        var: the losses.
        sign: 1 for cross-entropies, -1 for cross-entropies with the other sign.
        logits, labels, bias: from which they are computed; None without a bias.
        wraps: as of the spelling.
        weights: the weight of each loss in a sum, or whether it is counted, or ignored; None if all are counted.
        how: which of these weights are: "times", "counted", "ignored" or "".
    """

    var: Var
    sign: int
    logits: Var
    labels: Var
    bias: Var | None
    wraps: bool
    weights: Var | None = None
    how: str = ""


def with_fused_loss(
    eqns: list[Eqn], results: Sequence[Var], product: Eqn, leaves: Sequence[Var], constants: Collection[Var]
) -> list[Eqn]:
    """Return equations in which a product and its cross-entropy are one, or the same if it is not found.

    Nothing else may need the logits. What follows must be alike on all IPUs: it reads nothing that depends on `leaves`.

    Args:
        eqns: the equations of a head.
        results: the variables of its results.
        product: the `dot_general` of hidden states and a table.
        leaves: the leaves that may be split.
        constants: the inputs that get no gradient.
    """
    hidden, table = product.invars
    (contracted, (by,)), batch = product.params["dimension_numbers"]
    is_plain = contracted == (hidden.aval.ndim - 1,) and table.aval.ndim == 2 and not any(batch)
    is_plain = is_plain and hidden.aval.dtype == table.aval.dtype and product.params["precision"] is None
    loss = next(_losses(eqns, product), None) if is_plain else None
    if loss is None:
        return eqns
    fixed = {*constants, *(v for eqn in eqns for v in eqn.outvars)}
    trained = depending(eqns, [v for v in read_by(eqns) if v not in fixed])
    loss = _summed(loss, eqns, results, trained)
    kept = [eqn for eqn in eqns if loss.var not in eqn.outvars]
    following = depending(kept, [loss.var])
    before = [eqn for eqn in kept if following.isdisjoint(eqn.outvars)]
    of_leaves = depending(before, leaves)
    after = [eqn for eqn in kept if not following.isdisjoint(eqn.outvars)]
    inputs = [hidden, table, loss.labels, *(v for v in (loss.bias, loss.weights) if v is not None)]
    params = {"tokens": loss.logits.aval.shape[:-1], "sign": loss.sign, "wraps": loss.wraps, "by_columns": by == 0}
    params |= {"has_bias": loss.bias is not None, "weights": loss.how}
    aval = loss.var.aval
    bind = lambda *xs: LINEAR_CROSS_ENTROPY.bind(*xs, shape=aval.shape, dtype=aval.dtype, **params)
    (fused,) = jax.make_jaxpr(bind)(*(shape_of(v.aval) for v in inputs)).jaxpr.eqns
    fused = fused.replace(invars=inputs, outvars=[loss.var], source_info=product.source_info)
    found = needed([*before, fused, *after], [*results])
    read = [v for eqn in after for v in variables(eqn.invars) if v in of_leaves]
    is_alike = not any(loss.logits.aval.shape[-1] in v.aval.shape for v in read)  # it may be a share
    return found if is_alike and not any(eqn is product for eqn in found) else eqns


def _losses(eqns: Sequence[Eqn], product: Eqn) -> Iterator[_Loss]:
    """Yield the cross-entropies of a product."""
    made = {v: eqn for eqn in eqns for v in eqn.outvars}
    for z, bias in _logits(product.outvars[0], eqns, made):
        tokens = z.aval.shape[:-1]
        kinds = {v.aval.dtype for eqn in eqns for v in variables(eqn.invars) if _is_label(v, tokens)}
        for eqn, spelling, kind in itertools.product(reversed(eqns), _SPELLINGS, sorted(kinds, key=str)):
            if eqn.outvars and eqn.outvars[0].aval.shape in (tokens, (*tokens, 1)):
                twin = _traced(spelling, shape_of(z.aval), jax.ShapeDtypeStruct(tokens, kind))
                matched = _matched(eqn.outvars[0], z, made, twin)
                if matched is not None:
                    yield _Loss(eqn.outvars[0], spelling.sign, z, matched, bias, spelling.wraps)


def _is_label(v: Var, tokens: tuple[int, ...]) -> bool:
    return v.aval.shape == tokens and jnp.issubdtype(v.aval.dtype, jnp.integer)


def _logits(
    z: Var, eqns: Sequence[Eqn], made: dict[Var, Eqn], bias: Var | None = None
) -> Iterator[tuple[Var, Var | None]]:
    """Yield a product, then the values after a cast, a bias or a reshape of its tokens, each with its bias or None."""
    yield z, bias
    for eqn in eqns:
        if z not in variables(eqn.invars):
            continue
        name, (out, *_) = eqn.primitive.name, eqn.outvars
        if name == "convert_element_type" or (name == "reshape" and out.aval.shape[-1:] == z.aval.shape[-1:]):
            yield from _logits(out, eqns, made, bias)
        elif name == "add" and bias is None and out.aval.shape == z.aval.shape:
            other = next((v for v in eqn.invars if v is not z), None)
            wide = made.get(other) if isinstance(other, core.Var) else None
            if wide is not None and _is_along_last(wide, z):
                yield from _logits(out, eqns, made, wide.invars[0])


def _is_along_last(wide: Eqn, z: Var) -> bool:
    """Return whether an equation repeats a value for each column of logits."""
    if wide.primitive.name != "broadcast_in_dim" or wide.params["broadcast_dimensions"] != (z.aval.ndim - 1,):
        return False
    return wide.invars[0].aval.shape == z.aval.shape[-1:]


def _matched(var: Var, z: Var, made: dict[Var, Eqn], twin: Jaxpr) -> Var | None:
    """Return the labels if a value is computed from logits as a twin is, operation by operation, or None."""
    of_twin = {v: eqn for eqn in twin.eqns for v in eqn.outvars}
    logits, labels = twin.invars
    named: dict[Var, Any] = {logits: z}

    def same(own: Any, other: Any) -> bool:
        if isinstance(other, core.Literal) or isinstance(own, core.Literal):
            are_both = isinstance(other, core.Literal) and isinstance(own, core.Literal)
            return are_both and own.aval == other.aval and bool(own.val == other.val)
        if other is labels:
            return named.setdefault(labels, own) is own and _is_label(own, labels.aval.shape)
        if other in named:
            return named[other] is own
        one, two = made.get(own), of_twin.get(other)
        if one is None or two is None or one.primitive is not two.primitive or one.params != two.params:
            return False
        orders = [one.invars, one.invars[::-1]] if one.primitive.name in ("add", "mul") else [one.invars]
        before = dict(named)
        for order in orders:
            if all(map(same, order, two.invars)):
                named[other] = own
                return True
            named.clear()
            named.update(before)
        return False

    return named.get(labels) if same(var, twin.outvars[0]) else None


def _summed(loss: _Loss, eqns: Sequence[Eqn], results: Sequence[Var], trained: Collection[Var]) -> _Loss:
    """Return the sum of losses, perhaps weighted, if it is all that they are needed for; or the losses."""
    made, found = {v: eqn for eqn in eqns for v in eqn.outvars}, loss
    while found.var not in results:
        readers = [eqn for eqn in eqns if found.var in variables(eqn.invars)]
        if len(readers) != 1:
            break
        name, inputs, (out, *_) = readers[0].primitive.name, readers[0].invars, readers[0].outvars
        if name == "reduce_sum":
            return found._replace(var=out) if out.aval.shape == () else loss
        if name == "neg":
            found = found._replace(sign=-found.sign)
        elif name in ("mul", "select_n") and not found.how:
            weights, how = _weights(name, inputs, found.var, made)
            if weights is None or weights in trained or weights.aval.size != found.var.aval.size:
                break
            found = found._replace(weights=weights, how=how)
        elif name not in ("reshape", "squeeze"):
            break
        found = found._replace(var=out)
    return loss


def _weights(name: str, inputs: Sequence[Var], losses: Var, made: dict[Var, Eqn]) -> tuple[Var | None, str]:
    """Return what losses are multiplied with, or chosen by, and which it is."""
    if name == "mul":
        other = next((v for v in inputs if v is not losses), None)
        return (other, "times") if isinstance(other, core.Var) else (None, "")
    which, *cases = inputs
    zeros = [v for v in cases if v is not losses and is_zero(v, made)]
    is_of_two = len(cases) == 2 and len(zeros) == 1
    return (which, "counted" if cases[1] is losses else "ignored") if is_of_two else (None, "")
