"""Draw the arguments of each op: its arrays and their specs, its options, and the dense program to compare with."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import sharded_ops
from random_programs import dense_ops
from random_programs.dice import Dice


@dataclasses.dataclass(frozen=True)
class Given:
    """One op with everything that a case needs.

    Attributes:
        local: the program of one IPU.
        dense: the same on whole arrays of one part of "data"; the argument `exact` says whether it is the exact
            program.
        names, arrays, specs: the arguments' names, arrays and specs; a dim 0 that is split over "data" contains tokens.
        ragged: for each argument, the dim that is padded to a multiple of the IPUs, or None.
        out_spec: the spec of the result.
        out_ragged, out_size: the dim of the result that is padded, and its real size.
        out_dtype: the dtype of the result, if it is not the case's dtype.
        ct_fill: the padding of the result's cotangent; NaN if the op is documented not to read this padding.
        options: the op's options, for the case's description.
    """

    local: Callable[..., Any]
    dense: Callable[..., Any]
    names: tuple[str, ...]
    arrays: tuple[np.ndarray, ...]
    specs: tuple[P, ...]
    ragged: tuple[int | None, ...]
    out_spec: P
    out_ragged: int | None = None
    out_size: int = 0
    out_dtype: str | None = None
    ct_fill: float = 1e4
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_float(self) -> list[bool]:
        return [jnp.issubdtype(array.dtype, jnp.floating) for array in self.arrays]


class Draw:
    """The shapes and arrays of one case: N tokens in each part of "data", D features, V columns."""

    def __init__(self, dice: Dice, ipus: int, parts: int, dtype: str):
        self.dice, self.ipus, self.parts, self.dtype = dice, ipus, parts, dtype
        self.n, self.d, self.v = dice.between(1, 6), dice.between(1, 7), dice.between(1, 13)
        self.rest = () if dice.chance(0.7) else (dice.between(1, 3),)  # further dims of tokens
        self._rng = np.random.default_rng(dice.number())

    @property
    def tokens(self) -> tuple[int, ...]:
        return (self.n * self.parts, *self.rest)

    def floats(self, *shape: int, scale: float = 1.0) -> np.ndarray:
        return (self._rng.normal(size=shape) * scale).astype(jnp.dtype(self.dtype))

    def ids(self, size: int, beyond: bool) -> np.ndarray:
        low, high = (-2, size + 2) if beyond else (0, size)
        dtype = self.dice.one_of((np.int32, np.int16, np.int8))
        return self._rng.integers(low, high, size=self.tokens).astype(dtype)

    def divisible(self) -> None:
        """Choose a number of tokens that is divisible by the number of IPUs."""
        self.n = self.ipus * self.dice.between(1, 2)

    def last(self, ndim: int) -> P:
        """Return the spec of an array with tokens over "data" and the last dim over the IPUs."""
        return P("data", *[None] * (ndim - 2), "ipu")


def _of_x(local: Any, dense: Any, x: np.ndarray, spec: P, ragged: int | None, out_spec: P, **more: Any) -> Given:
    """Return an op of one argument."""
    return Given(local, dense, ("x",), (x,), (spec,), (ragged,), out_spec, **more)


def _embedding(draw: Draw) -> Given:
    by_rows = draw.dice.chance(0.7)
    scatter = by_rows and draw.dice.chance(0.3)
    if scatter:
        draw.divisible()
    options: dict[str, Any] = {"split": "rows" if by_rows else "features", "reduction": "scatter" if scatter else "sum"}
    size = draw.v if by_rows else draw.d
    table, ids = draw.floats(draw.v, draw.d), draw.ids(draw.v, beyond=True)
    ndim = ids.ndim + 1
    return Given(
        lambda table, ids: sharded_ops.embedding(table, ids, size=size, **options),
        dense_ops.embedding,
        ("table", "ids"),
        (table, ids),
        (P("ipu") if by_rows else P(None, "ipu"), P("data")),
        (0 if by_rows else 1, None),
        P(("data", "ipu")) if scatter else P("data") if by_rows else draw.last(ndim),
        out_ragged=None if by_rows else ndim - 1,
        out_size=draw.d,
        options=options,
    )


def _take_along_last_dim(draw: Draw) -> Given:
    x, ids = draw.floats(*draw.tokens, draw.v), draw.ids(draw.v, beyond=True)
    return Given(
        lambda x, ids: sharded_ops.take_along_last_dim(x, ids, size=draw.v),
        dense_ops.take_along_last_dim,
        ("x", "indices"),
        (x, ids),
        (draw.last(x.ndim), P("data")),
        (x.ndim - 1, None),
        P("data"),
    )


def _columns(draw: Draw) -> Given:
    scattered = draw.dice.chance(0.3)
    if scattered:
        draw.divisible()
    x, w, bias = draw.floats(*draw.tokens, draw.d), draw.floats(draw.d, draw.v), draw.floats(draw.v)
    options: dict[str, Any] = {"size": draw.v}
    if scattered:
        options["tokens"] = draw.n
    return Given(
        lambda x, w, bias: sharded_ops.matmul(x, w, bias=bias, **options),
        dense_ops.matmul,
        ("x", "w", "bias"),
        (x, w, bias),
        (P(("data", "ipu")) if scattered else P("data"), P(None, "ipu"), P("ipu")),
        (None, 1, 0),
        draw.last(x.ndim),
        out_ragged=x.ndim - 1,
        out_size=draw.v,
        options=options,
    )


def _rows(draw: Draw) -> Given:
    scatter = draw.dice.chance(0.3)
    if scatter:
        draw.divisible()
    x, w, bias = draw.floats(*draw.tokens, draw.v), draw.floats(draw.v, draw.d), draw.floats(draw.d)
    options = {"split": "rows", "size": draw.v, "reduction": "scatter" if scatter else "sum"}
    return Given(
        lambda x, w, bias: sharded_ops.matmul(x, w, bias=bias, **options),
        dense_ops.matmul,
        ("x", "w", "bias"),
        (x, w, bias),
        (draw.last(x.ndim), P("ipu"), P()),
        (x.ndim - 1, 0, None),
        P(("data", "ipu")) if scatter else P("data"),
        options=options,
    )


def _tied_projection(draw: Draw) -> Given:
    hidden, table = draw.floats(*draw.tokens, draw.d), draw.floats(draw.v, draw.d)
    return Given(
        lambda hidden, table: sharded_ops.tied_projection(hidden, table, size=draw.v),
        dense_ops.tied_projection,
        ("hidden", "table"),
        (hidden, table),
        (P("data"), P("ipu")),
        (None, 0),
        draw.last(hidden.ndim),
        out_ragged=hidden.ndim - 1,
        out_size=draw.v,
    )


def _loss_options(dice: Dice) -> dict[str, Any]:
    return {
        "label_smoothing": dice.weighted({0.0: 2, 0.1: 1, 1.0: 0.2}),
        "z_loss": dice.weighted({0.0: 2, 0.01: 1}),
        "soft_cap": dice.weighted({None: 2, 3.0: 1}),
        "temperature": dice.weighted({1.0: 2, 0.5: 1}),
        "ignore_index": dice.weighted({None: 2, 0: 1, -1: 1}),
        "out_of_range": dice.weighted({"ignore": 2, "clip": 1}),
        "reduction": dice.one_of(("none", "mean", "sum")),
    }


def _result(options: dict[str, Any], value: Any) -> Any:
    """Return the loss, with a dim added if it is reduced, because it is then one number for each part of "data"."""
    return value if options["reduction"] == "none" else value[None]


def _cross_entropy(draw: Draw) -> Given:
    options = _loss_options(draw.dice)
    logits = draw.floats(*draw.tokens, draw.v, scale=3)
    soft, weighted = draw.dice.chance(0.25), draw.dice.chance(0.4)
    weights = np.abs(draw.floats(*draw.tokens)).astype(np.float32) if weighted else np.ones(draw.tokens, np.int32)
    if soft:
        options |= {"ignore_index": None, "out_of_range": "ignore"}
        labels = np.abs(draw.floats(*draw.tokens, draw.v))
    else:
        labels = draw.ids(draw.v, beyond=True)
    use = {"weights": True} if weighted else {}

    def local(logits: Any, labels: Any, weights: Any) -> Any:
        given = {"weights": weights} if weighted else {}
        return _result(options, sharded_ops.log_softmax_cross_entropy(logits, labels, size=draw.v, **given, **options))

    def dense(logits: Any, labels: Any, weights: Any, *, exact: bool) -> Any:
        return _result(options, dense_ops.cross_entropy(logits, labels, weights, weighted, exact=exact, **options))

    split, dim = draw.last(logits.ndim), logits.ndim - 1
    return Given(
        local,
        dense,
        ("logits", "labels", "weights"),
        (logits, labels, weights),
        (split, split if soft else P("data"), P("data")),
        (dim, dim if soft else None, None),
        P("data"),
        out_dtype="float32",
        options=options | use,
    )


def _linear_cross_entropy(draw: Draw) -> Given:
    options = _loss_options(draw.dice)
    hidden, table = draw.floats(*draw.tokens, draw.d), draw.floats(draw.v, draw.d)
    labels, weighted = draw.ids(draw.v, beyond=True), draw.dice.chance(0.4)
    weights = np.abs(draw.floats(*draw.tokens)).astype(np.float32)
    tiling: dict[str, Any] = {
        "gradients": draw.dice.one_of(
            (None, "backward") if options["reduction"] == "none" else (None, "backward", "forward")
        ),
        "token_chunk": draw.dice.one_of((None, 1, 2, 5)),
        "column_chunk": draw.dice.one_of((None, 1, 3)),
    }

    def local(hidden: Any, table: Any, labels: Any, weights: Any) -> Any:
        given = {"weights": weights} if weighted else {}
        loss = sharded_ops.linear_cross_entropy(hidden, table, labels, size=draw.v, **given, **options, **tiling)
        return _result(options, loss)

    def dense(hidden: Any, table: Any, labels: Any, weights: Any, *, exact: bool) -> Any:
        logits = dense_ops.tied_projection(hidden, table, exact=exact, wide=True)
        return _result(options, dense_ops.cross_entropy(logits, labels, weights, weighted, exact=exact, **options))

    return Given(
        local,
        dense,
        ("hidden", "table", "labels", "weights"),
        (hidden, table, labels, weights if weighted else weights.astype(np.int32)),
        (P("data"), P("ipu"), P("data"), P("data")),
        (None, 0, None, None),
        P("data"),
        out_dtype="float32",
        options=options | tiling | {"weights": weighted},
    )


def _of_last(name: str) -> Callable[[Draw], Given]:
    """Return a function that draws softmax, log_softmax or a norm: (N.., V) -> (N.., V)."""

    def draw_one(draw: Draw) -> Given:
        x, norm = draw.floats(*draw.tokens, draw.v, scale=2), name.endswith("norm")
        split, dim = draw.last(x.ndim), x.ndim - 1
        more = [draw.floats(draw.v) for _ in range({"layer_norm": 2, "rms_norm": 1}.get(name, 0))]
        options: dict[str, Any] = {"epsilon": draw.dice.one_of((0.1, 1.0))} if norm else {}
        op = getattr(sharded_ops, name)
        return Given(
            lambda x, *more: op(x, *more, size=draw.v, **options),
            lambda x, *more, exact: getattr(dense_ops, name)(x, *more, exact=exact, **options),
            ("x", "scale", "bias")[: 1 + len(more)],
            (x, *more),
            (split, *[P("ipu")] * len(more)),
            (dim, *[0] * len(more)),
            split,
            out_ragged=dim,
            out_size=draw.v,
            ct_fill=np.nan if norm else 1e4,
            options=options,
        )

    return draw_one


def _moving(name: str) -> Callable[[Draw], Given]:
    """Return a function that draws a collective. If this sums or has an owner, dim 1 of `x` has the IPUs' values."""

    def draw_one(draw: Draw) -> Given:
        owner = draw.dice.between(0, draw.ipus - 1)
        if "tokens" in name:
            draw.divisible()
        of_all = name in ("to_all", "reduce_to_all", "reduce_to", "reduce_scatter_tokens")
        op = getattr(sharded_ops, name)
        if of_all:
            x = draw.floats(draw.tokens[0], draw.ipus, draw.d)
            kwargs = {"owner": owner} if name in ("to_all", "reduce_to") else {}
            out_spec = {"reduce_scatter_tokens": P(("data", "ipu")), "reduce_to": P("data", "ipu")}.get(name, P("data"))
            local = lambda x: op(x[:, 0], **kwargs)
            if name == "reduce_to":
                local = lambda x: op(x[:, 0], **kwargs)[:, None]
            dense = lambda x, *, exact: dense_ops.moved(name, x, owner)
            return _of_x(local, dense, x, P("data", "ipu"), None, out_spec, options=kwargs)
        x, same = draw.floats(draw.tokens[0], draw.v), lambda x, *, exact: x
        if name == "from_all":
            return _of_x(lambda x: op(x, 1, draw.v), same, x, P("data", "ipu"), 1, P("data"))
        return _of_x(op, same, x, P("data"), None, P(("data", "ipu")))

    return draw_one


def _top_k(draw: Draw) -> Given:
    k = draw.dice.between(1, draw.v)
    x = draw.floats(*draw.tokens, draw.v)
    local = lambda x: sharded_ops.top_k(x, k, size=draw.v)[0]
    dense = lambda x, *, exact: dense_ops.top_k(x, k)[0]
    return _of_x(local, dense, x, draw.last(x.ndim), x.ndim - 1, P("data"), options={"k": k})


def _chosen(draw: Draw) -> Given:
    """Draw argmax or top_k's columns, which are returned as floats, so that they can have a (zero) gradient."""
    k = draw.dice.between(0, draw.v)
    # there are ties, and the first column wins; -0 is left out, because 0 counts as larger than -0
    x = (np.round(draw.floats(*draw.tokens, draw.v).astype(np.float32)) + 0.0).astype(jnp.dtype(draw.dtype))

    def chosen(x: Any) -> Any:
        if k == 0:
            return sharded_ops.argmax(x, size=draw.v).astype(jnp.float32)
        return sharded_ops.top_k(x, k, size=draw.v)[1].astype(jnp.float32)

    dense = lambda x, *, exact: dense_ops.chosen(x, k)
    more: dict[str, Any] = {"out_dtype": "float32", "options": {"k": k}}
    return _of_x(chosen, dense, x, draw.last(x.ndim), x.ndim - 1, P("data"), **more)


OPS: dict[str, Callable[[Draw], Given]] = {
    "embedding": _embedding,
    "take_along_last_dim": _take_along_last_dim,
    "matmul columns": _columns,
    "matmul rows": _rows,
    "tied_projection": _tied_projection,
    "log_softmax_cross_entropy": _cross_entropy,
    "linear_cross_entropy": _linear_cross_entropy,
    "top_k": _top_k,
    "chosen": _chosen,
    **{name: _of_last(name) for name in ("softmax", "log_softmax", "layer_norm", "rms_norm")},
    **{
        name: _moving(name)
        for name in ("to_all", "from_all", "reduce_to_all", "reduce_to", "scatter_tokens", "reduce_scatter_tokens")
    },
}
