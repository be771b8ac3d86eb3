"""Test every op with bad values for each of its arguments, and with NumPy's numbers for those that are numbers.

Nothing here is compiled: errors are raised while the op is traced.
"""

# Wrong arguments are intended here.
# pyright: reportArgumentType=false

import functools

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
    log_softmax,
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
from sharded_ops._arguments import array, array_like, one_axis, one_of, real_number, whole_number
from support.harness import exactly, mesh_of

KEY = jax.random.key(0)
TABLE, X, IDS, W, SCALE = np.ones((8, 4)), np.ones((6, 8)), np.zeros(6, np.int32), np.ones((4, 8)), np.ones(8)
HIDDEN = np.ones((6, 4))
OF_ROWS, OF_COLUMNS, ALL = P("ipu"), P(None, "ipu"), P()

# For each op: the op, its arrays by name with their specs on 2 IPUs, its other arguments, and its result's spec.
OPS = {
    "embedding": (embedding, {"table": (TABLE, OF_ROWS), "ids": (IDS, ALL)}, {"size": 8}, ALL),
    "take_along_last_dim": (take_along_last_dim, {"x_shard": (X, OF_COLUMNS), "indices": (IDS, ALL)}, {"size": 8}, ALL),
    "matmul": (
        matmul,
        {"x": (HIDDEN, OF_ROWS), "w": (W, OF_COLUMNS), "bias": (SCALE, OF_ROWS)},
        {"size": 8, "tokens": 6},
        OF_COLUMNS,
    ),
    "tied_projection": (
        tied_projection,
        {"hidden": (HIDDEN, ALL), "table": (TABLE, OF_ROWS)},
        {"size": 8},
        OF_COLUMNS,
    ),
    "rms_norm": (
        rms_norm,
        {"x_shard": (X, OF_COLUMNS), "scale_shard": (SCALE, OF_ROWS)},
        {"size": 8, "epsilon": 0.5, "scale_offset": 1.0},
        OF_COLUMNS,
    ),
    "layer_norm": (
        layer_norm,
        {"x_shard": (X, OF_COLUMNS), "scale_shard": (SCALE, OF_ROWS), "bias_shard": (SCALE, OF_ROWS)},
        {"size": 8, "epsilon": 0.5, "scale_offset": 1.0},
        OF_COLUMNS,
    ),
    "softmax": (softmax, {"logits_shard": (X, OF_COLUMNS)}, {"size": 8}, OF_COLUMNS),
    "log_softmax": (log_softmax, {"logits_shard": (X, OF_COLUMNS)}, {"size": 8}, OF_COLUMNS),
    "argmax": (argmax, {"x_shard": (X, OF_COLUMNS)}, {"size": 8}, ALL),
    "top_k": (top_k, {"x_shard": (X, OF_COLUMNS)}, {"size": 8, "k": 3}, ALL),
    "sample": (
        functools.partial(sample, KEY),
        {"logits_shard": (X, OF_COLUMNS)},
        {"size": 8, "temperature": 0.5, "top_k": 3, "top_p": 0.5, "min_p": 0.1},
        ALL,
    ),
    "to_all": (to_all, {"x": (X, OF_ROWS)}, {"owner": 1}, ALL),
    "from_all": (from_all, {"x_shard": (X, OF_ROWS)}, {"dim": 0, "size": 6}, ALL),
    "reduce_to_all": (reduce_to_all, {"x": (X, OF_ROWS)}, {}, ALL),
    "reduce_to": (reduce_to, {"x": (X, OF_ROWS)}, {"owner": 1}, OF_ROWS),
    "scatter_tokens": (scatter_tokens, {"x": (X, ALL)}, {"dim": 0}, OF_ROWS),
    "reduce_scatter_tokens": (reduce_scatter_tokens, {"x": (X, OF_ROWS)}, {"dim": 0}, OF_ROWS),
    "debug_sharding": (debug_sharding, {"x": (X, OF_ROWS)}, {"name": "x"}, OF_ROWS),
}


def _traced(op, given=None):
    """Return the result's shape, with arguments `given` as they are rather than passed through the shard_map."""
    given = given or {}
    fn, arrays, options, out_spec = OPS[op]
    passed = {name: array for name, array in arrays.items() if name not in given}
    options = {**options, **given}
    sharded = jax.shard_map(
        lambda passed: fn(**passed, **options),
        mesh=mesh_of(2),
        in_specs=({name: spec for name, (_, spec) in passed.items()},),
        out_specs=out_spec,
    )
    return jax.eval_shape(sharded, {name: array for name, (array, _) in passed.items()})


def _least(least):
    return f"give an int of at least {least}"


SIZE = [
    ("size", 0, f"size=0 is out of range: {_least(1)}"),
    ("size", np.int64(-8), f"size=-8 is out of range: {_least(1)}"),
    ("size", True, f"size=True is not an int: {_least(1)}"),
    ("size", np.True_, f"size=np.True_ is not an int: {_least(1)}"),
    ("size", 8.0, f"size=8.0 is not an int: {_least(1)}"),
    ("size", np.float32(8), f"size=8.0 is not an int: {_least(1)}"),
    ("size", "8", f"size='8' is not an int: {_least(1)}"),
    ("size", [8], f"size=[8] is not an int: {_least(1)}"),
    ("size", np.array([8]), f"size=<int64[1] array> is not an int: {_least(1)}"),
]
NO_SIZE = [("size", None, f"size=None is not an int: {_least(1)}")]
AXIS = [
    ("axis", ("ipu",), "axis=('ipu',) is not the name of one mesh axis: give a single name, such as 'ipu'"),
    (
        "axis",
        ("data", "ipu"),
        "axis=('data', 'ipu') is not the name of one mesh axis: give a single name, such as 'ipu'",
    ),
    ("axis", ["ipu"], "axis=['ipu'] is not the name of one mesh axis: give a single name, such as 'ipu'"),
    ("axis", None, "axis=None is not the name of one mesh axis: give a single name, such as 'ipu'"),
    ("axis", 0, "axis=0 is not the name of one mesh axis: give a single name, such as 'ipu'"),
    (
        "axis",
        "model",
        "axis='model' is no axis of an enclosing shard_map: call the op inside jax.shard_map on a mesh that has this "
        "axis, or give the axis that its mesh has",
    ),
]
EPSILON = [
    ("epsilon", value, f"epsilon={shown} {wrong}: give a finite number of at least 0")
    for value, shown, wrong in (
        (None, "None", "is not a plain number"),
        ("0", "'0'", "is not a plain number"),
        ([0.5], "[0.5]", "is not a plain number"),
        (True, "True", "is not a plain number"),
        (np.ones(2), "<float64[2] array>", "is not a plain number"),
        (-1, "-1.0", "is out of range"),
        (np.float32(-1), "-1.0", "is out of range"),
        (np.float16(np.nan), "nan", "is out of range"),
        (float("inf"), "inf", "is out of range"),
    )
]
OWNER = [
    ("owner", value, f"owner={value} names no IPU of axis 'ipu', which has 2: give 0 to 1")
    for value in (2, -1, np.int64(7), np.int8(-1), np.array(7))
] + [
    ("owner", None, "owner=None is not an int: give an int"),
    ("owner", True, "owner=True is not an int: give an int"),
    ("owner", 1.0, "owner=1.0 is not an int: give an int"),
    ("owner", [1], "owner=[1] is not an int: give an int"),
    ("owner", np.array([1]), "owner=<int64[1] array> is not one index of an IPU: give an int, or an integer scalar"),
    ("owner", np.array(1.0), "owner=<float64[] array> is not one index of an IPU: give an int, or an integer scalar"),
]
DIM = [
    ("dim", None, "dim=None is not an int: give an int"),
    ("dim", False, "dim=False is not an int: give an int"),
    ("dim", 0.0, "dim=0.0 is not an int: give an int"),
    ("dim", (0,), "dim=(0,) is not an int: give an int"),
]
K = [
    ("k", value, f"k={value} {wrong}: give an int from 1 to 8")
    for value, wrong in (
        (0, "is out of range"),
        (np.int32(9), "is out of range"),
        (None, "is not an int"),
        (True, "is not an int"),
        (2.5, "is not an int"),
    )
]
TOP_K = [
    ("top_k", value, f"top_k={value} {wrong}: give an int from 1 to 8, or None for all columns")
    for value, wrong in (
        (0, "is out of range"),
        (np.int64(-3), "is out of range"),
        (False, "is not an int"),
        (2.0, "is not an int"),
        ([2], "is not an int"),
    )
]
TEMPERATURE = [
    ("temperature", None, "temperature=None is not an array: give a jax or NumPy array, such as jnp.asarray makes"),
    (
        "temperature",
        [0.5, 2.0],
        "temperature=[0.5, 2.0] is not an array: give a jax or NumPy array, such as jnp.asarray makes",
    ),
    ("temperature", "hot", "temperature='hot' is not an array: give a jax or NumPy array, such as jnp.asarray makes"),
    ("temperature", True, "temperature has dtype bool, but must be a real number: convert it first"),
    ("temperature", 1j, "temperature has dtype complex128, but must be a real number: convert it first"),
    ("temperature", np.float32(-1), "temperature=-1.0 is out of range: give a finite number, at least 0"),
    ("temperature", np.nan, "temperature=nan is out of range: give a finite number, at least 0"),
    ("temperature", np.inf, "temperature=inf is out of range: give a finite number, at least 0"),
    (
        "temperature",
        np.ones(5),
        "temperature has shape (5,), but logits of (6,) tokens take one for all or one for each: give shape () or (6,)",
    ),
    ("top_p", [0.5], "top_p=[0.5] is not an array: give a jax or NumPy array, such as jnp.asarray makes"),
    ("top_p", np.float32(0), "top_p=0.0 is out of range: give more than 0, at most 1"),
    ("top_p", 1.5, "top_p=1.5 is out of range: give more than 0, at most 1"),
    ("top_p", np.nan, "top_p=nan is out of range: give more than 0, at most 1"),
    ("min_p", [0.5], "min_p=[0.5] is not an array: give a jax or NumPy array, such as jnp.asarray makes"),
    ("min_p", np.float32(-1), "min_p=-1.0 is out of range: give a number from 0 to 1"),
    ("min_p", 1.5, "min_p=1.5 is out of range: give a number from 0 to 1"),
    ("min_p", np.nan, "min_p=nan is out of range: give a number from 0 to 1"),
]
OFFSET = [
    ("scale_offset", None, "scale_offset=None is not a plain number: give a finite number"),
    ("scale_offset", True, "scale_offset=True is not a plain number: give a finite number"),
    ("scale_offset", "1", "scale_offset='1' is not a plain number: give a finite number"),
    ("scale_offset", np.nan, "scale_offset=nan is out of range: give a finite number"),
]
TOKENS = [
    ("tokens", -1, "tokens=-1 is out of range: give an int of at least 0, or None if all IPUs hold x"),
    ("tokens", True, "tokens=True is not an int: give an int of at least 0, or None if all IPUs hold x"),
    ("tokens", 6.0, "tokens=6.0 is not an int: give an int of at least 0, or None if all IPUs hold x"),
    ("tokens", 2**31, "tokens=2147483648 does not fit the int32 indices of the ops: use at most 2**31 - 2"),
    (
        "tokens",
        np.int64(9),
        "x has shape (3, 4) on each IPU, with 3 rows in dim 0, but tokens=9 over the 2 IPUs of axis 'ipu' takes 5: pad "
        "the whole array with Split(size=9, parts=2).pad(array, 0) and shard it with in_specs=Split(size=9, "
        "parts=2).spec(0, 2, 'ipu')",
    ),
]


def _words(name, what, first, second):
    for value in ("other", None, 3, (first,), [first], True):
        yield name, value, f"{name}={value!r} {what}: use {first!r} or {second!r}"


SPLIT_OF_TABLE = [*_words("split", "is no way to split a table", "rows", "features")]
SPLIT_OF_WEIGHT = [*_words("split", "is no way to split a weight", "columns", "rows")]
REDUCTION = [*_words("reduction", "is no way to leave the result", "sum", "scatter")]
NAME = [
    ("name", None, "name=None is not a text: give one to stand at the head of each line"),
    ("name", ["x"], "name=['x'] is not a text: give one to stand at the head of each line"),
]
# The bad values of each op's arguments, except for `axis` and arrays, which are common to all ops.
BAD = {
    "embedding": SIZE + NO_SIZE + SPLIT_OF_TABLE + REDUCTION,
    "take_along_last_dim": SIZE + NO_SIZE,
    "matmul": SIZE + TOKENS + SPLIT_OF_WEIGHT + REDUCTION,
    "tied_projection": SIZE + NO_SIZE,
    "rms_norm": SIZE + NO_SIZE + EPSILON + OFFSET,
    "layer_norm": SIZE + NO_SIZE + EPSILON + OFFSET,
    "softmax": SIZE + NO_SIZE,
    "log_softmax": SIZE + NO_SIZE,
    "argmax": SIZE + NO_SIZE,
    "top_k": SIZE + NO_SIZE + K,
    "sample": SIZE + NO_SIZE + TOP_K + TEMPERATURE,
    "to_all": OWNER,
    "from_all": SIZE + NO_SIZE + DIM,
    "reduce_to_all": [],
    "reduce_to": OWNER,
    "scatter_tokens": DIM,
    "reduce_scatter_tokens": DIM,
    "debug_sharding": NAME,
}
# For these arguments None is valid.
MAY_BE_NONE = {("matmul", "bias"), ("layer_norm", "bias_shard")}
# For these it is valid too, unless something is added to what is left out.
MAY_BE_NONE_WITHOUT_OFFSET = {("rms_norm", "scale_shard"), ("layer_norm", "scale_shard")}
NOT_ARRAYS = (
    (None, "None"),
    ([[1.0, 2.0], [3.0, 4.0]], "[[1.0, 2.0], [3.0, 4.0]]"),
    ("x", "'x'"),
    (np.array(["x"]), "<<U1[1] array>"),
    ({"x": 1}, "{'x': 1}"),
)


def test_the_table_has_every_op_and_every_argument():
    assert set(BAD) == set(OPS)
    for op, (fn, arrays, options, _) in OPS.items():
        _traced(op)
        known = {name for name, _, _ in BAD[op] + AXIS} | set(arrays)
        arguments = set((fn.func if isinstance(fn, functools.partial) else fn).__code__.co_varnames[: _count(fn)])
        assert arguments - {"key"} == known, op
        assert set(options) <= known


def _count(fn):
    code = (fn.func if isinstance(fn, functools.partial) else fn).__code__
    return code.co_argcount + code.co_kwonlyargcount


@pytest.mark.parametrize("op", OPS)
def test_a_bad_value_of_any_option_is_told(op):
    for name, value, message in BAD[op] + AXIS:
        with pytest.raises(ValueError, match=exactly(message)):
            _traced(op, {name: value})


@pytest.mark.parametrize("op", OPS)
def test_what_is_no_array_is_told(op):
    for name in OPS[op][1]:
        for value, shown in NOT_ARRAYS:
            if value is None and (op, name) in MAY_BE_NONE:
                _traced(op, {name: None})
                continue
            if value is None and (op, name) in MAY_BE_NONE_WITHOUT_OFFSET:
                _traced(op, {name: None, "scale_offset": 0})
                continue
            message = f"{name}={shown} is not an array: give a jax or NumPy array, such as jnp.asarray makes"
            with pytest.raises(ValueError, match=exactly(message)):
                _traced(op, {name: value})


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.int32])
def test_numpys_numbers_are_as_good_as_pythons(op, dtype):
    options = OPS[op][2]
    numbers = {name: dtype(value) for name, value in options.items() if isinstance(value, int)}
    numbers |= {name: np.float32(value) for name, value in options.items() if isinstance(value, float)}
    assert str(_traced(op, numbers)) == str(_traced(op))


def test_the_host_takes_numpys_ints_and_refuses_the_rest():
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
    several = "axis=('data', 'ipu') is not the name of one mesh axis: give a single name, such as 'ipu'"
    for wrong, message in (
        (lambda: split.offset(np.int64(4)), "index=4 names no IPU of 4: give 0 to 3"),
        (lambda: split.offset(True), "index=True is not an int: give an int"),
        (lambda: split.pad(np.ones(10), None), "dim=None is not an int: give an int"),
        (lambda: split.unpad(np.ones(12), 0.0), "dim=0.0 is not an int: give an int"),
        (
            lambda: split.pad([1.0] * 3, 0),
            "array=[1.0, 1.0, 1.0] is not an array: give a jax or NumPy array, such as jnp.asarray makes",
        ),
        (lambda: split.spec(0, 2, ("data", "ipu")), several),
        (lambda: layout.specs(params, ("data", "ipu")), several),
        (lambda: layout.shardings(params, mesh_of(2), ("data", "ipu")), several),
        (lambda: layout.place(params, mesh_of(2), ("data", "ipu")), several),
        (lambda: layout.pad(params, None), "parts=None is not an int: give an int of at least 1"),
        (
            lambda: Layout.of({"n": 1.0}, None).pad({"n": 1.0}, 0),
            "leaf 'n' is 1.0, which is no array: make it one, with a dtype of its own",
        ),
        (
            lambda: Layout.of({"n": np.ones(1)}, None).pad({"n": np.ones(1)}, 0),
            "parts=0 is out of range: give an int of at least 1",
        ),
        (
            lambda: Layout.of(params, {"table": True}),
            "leaf 'table': dim=True is not an int: give an int, or None for a leaf that is not split",
        ),
        (
            lambda: Layout.of(params, {"table": 0.0}),
            "leaf 'table': dim=0.0 is not an int: give an int, or None for a leaf that is not split",
        ),
    ):
        with pytest.raises(ValueError, match=exactly(message)):
            wrong()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: whole_number("n", 5, at_most=4), "n=5 is out of range: give an int of at most 4"),
        (lambda: whole_number("n", 1, at_least=2, at_most=4), "n=1 is out of range: give an int from 2 to 4"),
        (lambda: real_number("p", 0, above=0), "p=0.0 is out of range: give a finite number above 0"),
        (
            lambda: real_number("p", 2, above=0, at_most=1),
            "p=2.0 is out of range: give a finite number above 0, at most 1",
        ),
        (lambda: real_number("p", -1, at_least=0, at_most=1), "p=-1.0 is out of range: give a number from 0 to 1"),
        (lambda: real_number("p", 2, at_most=1), "p=2.0 is out of range: give a finite number of at most 1"),
        (lambda: real_number("p", 10**400, instead="None"), "p=inf is out of range: give a finite number, or None"),
        (lambda: one_axis(b"ipu"), "axis=b'ipu' is not the name of one mesh axis: give a single name, such as 'ipu'"),
        (lambda: one_of("way", "z", ("x", "y")), "way='z' is unknown: use 'x' or 'y'"),
        (lambda: array("x", ()), "x=() is not an array: give a jax or NumPy array, such as jnp.asarray makes"),
    ],
)
def test_the_checks_themselves(wrong, message):
    with pytest.raises(ValueError, match=exactly(message)):
        wrong()


def test_what_passes_the_checks_is_plain():
    for value in (3, np.int8(3), np.uint64(3)):
        assert type(whole_number("n", value)) is int
    for value in (3, 3.0, np.float16(3), np.int8(3), jnp.bfloat16.dtype.type(3)):
        assert real_number("n", value) == 3.0
        assert type(real_number("n", value)) is float
    assert array("x", 3).dtype == jnp.int32
    assert array("x", np.ones(2, np.float16)).dtype == jnp.float16
    assert array_like("x", np.int64(2**40)).tolist() == 2**40
