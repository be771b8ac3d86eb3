"""Test every op with bad values and wrong types for each of its arguments, and with NumPy's numbers."""

# Wrong arguments are intended here.
# pyright: reportArgumentType=false

import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import (
    Layout,
    Split,
    argmax,
    debug_sharding,
    embedding,
    from_all,
    layer_norm,
    linear_cross_entropy,
    log_softmax,
    log_softmax_cross_entropy,
    matmul,
    reduce_scatter_tokens,
    reduce_to,
    reduce_to_all,
    rms_norm,
    sample,
    scatter_tokens,
    softmax,
    take_along_last_dim,
    tied_projection,
    to_all,
    top_k,
)
from support.harness import on_ipus
from support.refusals import refused

KEY = jax.random.key(0)
TABLE, X, IDS, W, SCALE = np.ones((8, 4)), np.ones((6, 8)), np.zeros(6, np.int32), np.ones((4, 8)), np.ones(8)
HIDDEN = np.ones((6, 4))
OF_ROWS, OF_COLUMNS, ALL = P("ipu"), P(None, "ipu"), P()
LOSS = {"size": 8, "label_smoothing": 0.25, "z_loss": 0.5, "soft_cap": 4.0, "temperature": 2.0, "ignore_index": 1}
_of = functools.partial

# Arrays by name, with their specs on 2 IPUs.
LOOKED_UP = {"table": (TABLE, OF_ROWS), "ids": (IDS, ALL)}
ROWS = {"x": (X, OF_COLUMNS), "w": (TABLE, OF_ROWS), "bias": (np.ones(4), ALL)}
COLUMNS = {"w": (W, OF_COLUMNS), "bias": (SCALE, OF_ROWS)}
NORMED = {"x_shard": (X, OF_COLUMNS), "scale_shard": (SCALE, OF_ROWS)}
PER_TOKEN = {"labels": (IDS, ALL), "weights": (np.ones(6), ALL)}
SHARD, LOGITS, PARTS = {"x_shard": (X, OF_COLUMNS)}, {"logits_shard": (X, OF_COLUMNS)}, {"x": (X, OF_ROWS)}
LINEAR = {"hidden": (HIDDEN, OF_ROWS), "table": (TABLE, OF_ROWS), "bias": (SCALE, OF_ROWS)} | PER_TOKEN
SIZED, NORM = {"size": 8}, {"size": 8, "epsilon": 0.5, "scale_offset": 1.0}
DRAWN = {"size": 8, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1}
# For each op: the op, its arrays, its other arguments, and its result's spec.
OPS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], P]] = {
    "embedding": (embedding, LOOKED_UP, SIZED, ALL),
    "embedding-scatter": (_of(embedding, reduction="scatter"), LOOKED_UP, SIZED, OF_ROWS),
    "embedding-features": (_of(embedding, split="features"), LOOKED_UP | {"table": (X, OF_COLUMNS)}, SIZED, OF_COLUMNS),
    "take_along_last_dim": (take_along_last_dim, SHARD | {"indices": (IDS, ALL)}, SIZED, ALL),
    "matmul": (matmul, {"x": (HIDDEN, OF_ROWS)} | COLUMNS, {"size": 8, "tokens": 6}, OF_COLUMNS),
    "matmul-columns": (_of(matmul, split="columns", reduction="sum"), {"x": (HIDDEN, ALL)} | COLUMNS, {}, OF_COLUMNS),
    "matmul-rows": (_of(matmul, split="rows", tokens=None), ROWS, SIZED, ALL),
    "matmul-scatter": (_of(matmul, split="rows", reduction="scatter", tokens=None), ROWS, SIZED, OF_ROWS),
    "tied_projection": (tied_projection, {"hidden": (HIDDEN, ALL), "table": (TABLE, OF_ROWS)}, SIZED, OF_COLUMNS),
    "rms_norm": (rms_norm, NORMED, NORM, OF_COLUMNS),
    "layer_norm": (layer_norm, NORMED | {"bias_shard": (SCALE, OF_ROWS)}, NORM, OF_COLUMNS),
    "softmax": (softmax, LOGITS, SIZED, OF_COLUMNS),
    "log_softmax": (log_softmax, LOGITS, SIZED, OF_COLUMNS),
    "argmax": (argmax, SHARD, SIZED, ALL),
    "top_k": (top_k, SHARD, {"size": 8, "k": 3}, ALL),
    "sample": (_of(sample, KEY), LOGITS, DRAWN, ALL),
    "to_all": (to_all, PARTS, {"owner": 1}, ALL),
    "from_all": (from_all, {"x_shard": (X, OF_ROWS)}, {"dim": 0, "size": 6}, ALL),
    "reduce_to_all": (reduce_to_all, PARTS, {}, ALL),
    "reduce_to": (reduce_to, PARTS, {"owner": 1}, OF_ROWS),
    "scatter_tokens": (scatter_tokens, {"x": (X, ALL)}, {"dim": 0}, OF_ROWS),
    "reduce_scatter_tokens": (reduce_scatter_tokens, PARTS, {"dim": 0}, OF_ROWS),
    "debug_sharding": (debug_sharding, PARTS, {"name": "x"}, OF_ROWS),
    "log_softmax_cross_entropy": (log_softmax_cross_entropy, LOGITS | PER_TOKEN, LOSS, ALL),
    "linear_cross_entropy": (
        linear_cross_entropy,
        LINEAR,
        LOSS | {"tokens": 6, "token_chunk": 2, "column_chunk": 3},
        ALL,
    ),
}


def _traced(op, given=None):
    """Return the result's shape, with arguments `given` as they are rather than passed through the shard_map."""
    given = given or {}
    fn, arrays, options, out_spec = OPS[op]
    passed, specs = ({name: pair[k] for name, pair in arrays.items() if name not in given} for k in (0, 1))
    sharded = on_ipus(lambda passed: fn(**passed, **options | given), 2, (specs,), out_spec)
    return jax.eval_shape(sharded, passed)


NAN, INF = float("nan"), float("inf")
OUT, INT, PLAIN, UNKNOWN = "is out of range", "is not an int", "is not a plain number", "is unknown"
NO_ARRAY, MAKE_ONE = "is not an array", "give a jax or NumPy array, such as jnp.asarray makes"
ONE, ZERO, ABOVE = "an int of at least 1", "a finite number of at least 0", "a finite number above 0"
TO_8, SHARE, CHUNK = "an int from 1 to 8", "a number from 0 to 1", "or leave it out to have it chosen"
CAP, LABEL, TOKENS = "or None for no cap", "or None if all labels count", "or None if all IPUs hold"


def _rule(rule: str, mend: str, *values: Any) -> tuple[str, str, tuple[Any, ...]]:
    return rule, mend, values


def _words(rule: str, first: str, second: str) -> list[tuple[str, str, tuple[Any, ...]]]:
    return [_rule(rule, f"use {first!r} or {second!r}", "other")]


_REDUCTION_OF_A_LOSS = [_rule(UNKNOWN, "use 'none', 'mean' or 'sum'", "max")]
_CHUNK = [_rule(OUT, CHUNK, 0), _rule(INT, CHUNK, 1.5)]
NO_NUMBERS = (None, True, np.True_, "8", [8], (8,), 1j, np.array([8]), np.ones(2), np.array(0.1))
# Per option, or option of one op: the rule, the mend, and a value that breaks each kind of check. Ops check alike, so
# one option of each kind has all the values that its check refuses.
RULES = {
    "size": [
        _rule(OUT, ONE, 0),
        _rule(INT, ONE, 8.0, None),
        _rule("rows in dim", "Split(size=19, parts=2).pad(array", 19),
    ],
    "axis": [
        _rule("is not the name of one mesh axis", "such as 'ipu'", ("data", "ipu")),
        _rule("is not an axis of an enclosing shard_map", "give the axis that its mesh has", "model"),
    ],
    "argmax axis": [_rule("is not the name of one mesh axis", "such as 'ipu'", ("ipu",), ["ipu"], None, 0)],
    "epsilon": [_rule(PLAIN, ZERO, *NO_NUMBERS), _rule(OUT, ZERO, -1, -INF, INF, NAN, np.float16(NAN), 10**400)],
    "scale_offset": [_rule(PLAIN, "a finite number", None), _rule(OUT, "a finite number", NAN)],
    "owner": [
        _rule("names no IPU of axis 'ipu', which has 2", "0 to 1", 2, -1, np.int8(-1), np.array(7)),
        _rule(INT, "an int", 1.0),
        _rule("is not one index of an IPU", "an integer scalar", np.array([1]), np.array(1.0)),
    ],
    "dim": [_rule(INT, "an int", None)],
    "k": [_rule(OUT, TO_8, 0, np.int32(9)), _rule(INT, TO_8, *NO_NUMBERS, 8.0, np.float32(8))],
    "top_k": [
        _rule(OUT, f"{TO_8}, or None for all columns", 0, 9),
        _rule(INT, f"{TO_8}, or None for all columns", 2.0),
    ],
    "tokens": [
        _rule(OUT, TOKENS, -1),
        _rule(INT, TOKENS, 6.0),
        _rule("does not fit the int32 indices", "at most 2**31 - 2", 2**31),
        _rule("rows in dim 0", "Split(size=9, parts=2).pad(array, 0)", 9),
    ],
    "embedding split": _words("is not a way to split a table", "rows", "features"),
    "matmul split": _words("is not a way to split a weight", "columns", "rows"),
    "reduction": _words("is not a way to leave the result", "sum", "scatter"),
    "log_softmax_cross_entropy reduction": _REDUCTION_OF_A_LOSS,
    "linear_cross_entropy reduction": _REDUCTION_OF_A_LOSS,
    "name": [_rule("is not a string", "for the head of each line", None)],
    "label_smoothing": [_rule(PLAIN, SHARE, None), _rule(OUT, SHARE, 1.5, -0.5)],
    "z_loss": [_rule(PLAIN, ZERO, None), _rule(OUT, ZERO, -1, INF)],
    "soft_cap": [_rule(PLAIN, CAP, False), _rule(OUT, CAP, 0, INF)],
    "temperature": [_rule(PLAIN, ABOVE, None), _rule(OUT, ABOVE, 0, INF)],
    "sample temperature": [_rule(NO_ARRAY, MAKE_ONE, None), _rule(OUT, "a finite number, at least 0", -1, NAN, INF)],
    "top_p": [_rule(NO_ARRAY, MAKE_ONE, [0.5]), _rule(OUT, "more than 0, at most 1", np.float32(0), 1.5, NAN)],
    "min_p": [_rule(NO_ARRAY, MAKE_ONE, [0.5]), _rule(OUT, SHARE, np.float32(-1), 1.5, NAN)],
    "ignore_index": [_rule(INT, LABEL, 0.5)],
    "out_of_range": [_rule(UNKNOWN, "use 'ignore', 'nan' or 'clip'", "drop", None, 3, ("nan",), ["nan"], True)],
    "return_log_sum_exp": [_rule("is not a bool", "True or False", None, 1)],
    "return_entropy": [_rule("is not a bool", "True or False", None, 1)],
    "gradients": [_rule(UNKNOWN, "use 'backward' or 'forward'", "both")],
    "token_chunk": _CHUNK,
    "column_chunk": _CHUNK,
}
# For these arguments None is valid.
MAY_BE_NONE = {
    ("matmul", "bias"),
    ("matmul", "size"),
    *((f"matmul-{way}", name) for way in ("columns", "rows", "scatter") for name in ("bias", "size", "tokens")),
    ("layer_norm", "bias_shard"),
    ("log_softmax_cross_entropy", "weights"),
    ("linear_cross_entropy", "weights"),
    ("linear_cross_entropy", "bias"),
}
# For these it is valid too, unless something is added to what is left out.
MAY_BE_NONE_WITHOUT_OFFSET = {("rms_norm", "scale_shard"), ("layer_norm", "scale_shard")}
NOT_ARRAYS = (None, [[1.0, 2.0], [3.0, 4.0]], "x", np.array(["x"]), {"x": 1})


def _shown(value):
    """Return how a message shows the value, or the beginning of that: -1 may be shown as -1.0."""
    if isinstance(value, np.ndarray) and (value.ndim or value.dtype.kind != "i"):
        return f"<{'<U1' if value.dtype.kind == 'U' else value.dtype}[{','.join(map(str, value.shape))}] array>"
    is_number = isinstance(value, np.ndarray | np.generic) and value.dtype.kind != "b"
    text = repr(value.item() if is_number else value)
    return text if len(text) < 300 else "inf"


# Other forms of an op have the same arguments, so they are slow.
each_op = pytest.mark.parametrize("op", [pytest.param(op, marks=pytest.mark.slow) if "-" in op else op for op in OPS])


@each_op
def test_a_bad_value_of_any_option_is_told(op):
    fn, arrays, given, _ = OPS[op]
    _traced(op)
    options = set(inspect.signature(fn).parameters) - set(arrays) - {"key"} - set(getattr(fn, "keywords", ()))
    assert set(given) <= options
    for option in options:
        for rule, mend, values in RULES.get(f"{op.split('-')[0]} {option}") or RULES[option]:
            for value in values:
                if value is None and (op, option) in MAY_BE_NONE:
                    _traced(op, {option: None})
                    continue
                with refused(f"{option}={_shown(value)}", rule, mend):
                    _traced(op, {option: value})


@each_op
def test_what_is_no_array_is_told(op):
    for name in OPS[op][1]:
        for value in NOT_ARRAYS:
            if value is None and (op, name) in MAY_BE_NONE:
                _traced(op, {name: None})
            elif value is None and (op, name) in MAY_BE_NONE_WITHOUT_OFFSET:
                _traced(op, {name: None, "scale_offset": 0})
            else:
                with refused(f"{name}={_shown(value)} {NO_ARRAY}", MAKE_ONE):
                    _traced(op, {name: value})


# Under check_vma=True, types express what is split over an axis. The ops must look at their own axis only: on a mesh of
# two axes, operands may or may not vary over the other one. If wrong operands were accepted, results would be wrong: a
# hidden that is split would be multiplied by the shards of other features, and whole logits be counted n times.
WHOLE, SPLIT, PART = "whole", "split", "part of a sum"
PARTS = ("reduce_to", "reduce_to_all", "reduce_scatter_tokens")
OF_ANY_TYPE = ("to_all", "debug_sharding")  # an operand of these may be split, or the same everywhere
# Options that may be arrays.
ARRAYS_TOO = {
    "to_all": {"owner": np.int32(0)},
    "reduce_to": {"owner": np.int32(0)},
    "sample": {"temperature": np.ones(6, np.float32), "top_p": np.ones(6, np.float32), "key": KEY},
}


def _kinds(op):
    """Return each operand on an IPU, and whether it must be split over the op's axis, whole, or part of a sum."""
    kinds = {}
    for name, (whole, spec) in OPS[op][1].items():
        shape = [size // 2 if "ipu" in spec[dim : dim + 1] else size for dim, size in enumerate(whole.shape)]
        kind = WHOLE if spec == ALL else PART if op in PARTS else SPLIT
        if op not in OF_ANY_TYPE:
            kinds[name] = (np.zeros(shape, np.float32 if whole.dtype == np.float64 else np.int32), kind)
    return kinds | {name: (value, WHOLE) for name, value in ARRAYS_TOO.get(op, {}).items()}


def _typed(op, swapped=None, *, typed=True, others=()):
    """Trace the op with operands of the right types, except for one."""
    fn, arrays, options, _ = OPS[op]
    fn = sample if op == "sample" else fn
    kinds = _kinds(op)
    fixed = {name: whole for name, (whole, _) in arrays.items() if name not in kinds}

    def each_ipu(values):
        given = {}
        for name, (_, kind) in kinds.items():
            over = (("ipu",) if (kind is WHOLE) == (name == swapped) else ()) + tuple(others)
            given[name] = jax.lax.pcast(values[name], over, to="varying") if over and typed else values[name]
        fn(**options | fixed | given)
        return jnp.zeros(())

    values = {name: value for name, (value, _) in kinds.items()}
    jax.eval_shape(on_ipus(each_ipu, 2, ALL, ALL, typed, replicas=2), values)


@pytest.mark.parametrize(("op", "name"), [(op, name) for op in OPS for name in _kinds(op)])
@pytest.mark.parametrize("others", [pytest.param((), marks=pytest.mark.slow), ("data",)], ids=["", "tokens-over-data"])
def test_each_operand_that_is_whole_where_it_must_be_split_or_the_reverse_is_told(op, name, others):
    value, kind = _kinds(op)[name]
    holds = {
        WHOLE: (f"{name} varies over axis 'ipu'", "must be the same on all its IPUs", "in_specs that don't name 'ipu'"),
        SPLIT: (f"{name} of shape {value.shape}", "same on all 2 IPUs", "must be split", "in_specs that name 'ipu'"),
        PART: (f"{name} of shape {value.shape}", "same on all 2 IPUs", "not part of a sum", "lax.pcast(x, 'ipu', to="),
    }
    with refused(*holds[kind]):
        _typed(op, name, others=others)


@pytest.mark.parametrize("op", OPS)
def test_the_right_types_are_taken_whatever_varies_over_the_other_axis(op):
    _typed(op)
    _typed(op, others=("data",))
    _typed(op, typed=False)  # where types say nothing, nothing is refused


@pytest.mark.parametrize("op", ["softmax", "argmax", "tied_projection", "matmul", "matmul-scatter"])
def test_on_one_ipu_the_whole_is_the_shard(op):
    fn, arrays, options, _ = OPS[op]
    sharded = on_ipus(lambda arrays: fn(**arrays, **options), 1, ALL, OF_ROWS)
    jax.eval_shape(sharded, {name: whole for name, (whole, _) in arrays.items()})


@each_op
def test_numpys_numbers_are_as_good_as_pythons(op):
    options, plain = OPS[op][2], str(_traced(op))
    floats = {name: np.float32(value) for name, value in options.items() if isinstance(value, float)}
    for dtype in (np.int64, np.uint8, np.int32):
        ints = {name: dtype(value) for name, value in options.items() if isinstance(value, int)}
        assert str(_traced(op, floats | ints)) == plain


def test_the_host_takes_numpys_ints():
    split = Split(np.int64(10), np.uint8(4))
    assert split == Split(10, 4)
    assert repr(split) == "Split(size=10, parts=4)"
    assert split.spec(np.int32(-1), np.int64(2), "ipu") == P(None, "ipu")
    assert split.count(np.int64(3)) == 1
    assert split.pad(np.ones((2, 10)), np.int64(1)).shape == (2, 12)
    params = {"table": np.ones((10, 3), np.float32)}
    layout = Layout.of(params, {"table": np.int64(-2)})
    assert Layout.from_json(layout.to_json()) == layout == Layout.of(params, {"table": 0})
    assert layout.pad(params, np.int64(4))["table"].shape == (12, 3)
