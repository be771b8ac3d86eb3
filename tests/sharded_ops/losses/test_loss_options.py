"""Test the values of each option that the losses refuse, and those that they accept, with one table for both."""

import functools
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sharded_ops import linear_cross_entropy, log_softmax_cross_entropy
from support.harness import exactly, normal, on_ipus

ROWS, COLUMNS = P("ipu"), P(None, "ipu")
SHARE = "give a number from 0 to 1"
ZERO = "give a finite number of at least 0"
CAP = "give a finite number above 0, or None for no cap"
ABOVE = "give a finite number above 0"
LABEL = "give an int, or None if all labels count"
ONE = "give an int of at least 1"
CHUNK = f"{ONE}, or leave it out to have it chosen"
SCATTERED = "give an int of at least 0, or None if all IPUs hold hidden"
WAY, SUM = "use 'ignore', 'nan' or 'clip'", "use 'none', 'mean' or 'sum'"
WHERE = "use 'backward' or 'forward'"
NAME = "is not the name of one mesh axis: give a single name, such as 'ipu'"
ARRAY = "is not an array: give a jax or NumPy array, such as jnp.asarray makes"
PLAIN, INT, RANGE = "is not a plain number", "is not an int", "is out of range"

# (option, value, the whole message after "option=")
BAD: tuple[tuple[str, Any, str], ...] = (
    ("label_smoothing", None, f"None {PLAIN}: {SHARE}"),
    ("label_smoothing", True, f"True {PLAIN}: {SHARE}"),
    ("label_smoothing", [0.1], f"[0.1] {PLAIN}: {SHARE}"),
    ("label_smoothing", np.array(0.1), f"<float64[] array> {PLAIN}: {SHARE}"),
    ("label_smoothing", "0.1", f"'0.1' {PLAIN}: {SHARE}"),
    ("label_smoothing", 1.5, f"1.5 {RANGE}: {SHARE}"),
    ("label_smoothing", np.float32(-0.5), f"-0.5 {RANGE}: {SHARE}"),
    ("label_smoothing", np.nan, f"nan {RANGE}: {SHARE}"),
    ("z_loss", None, f"None {PLAIN}: {ZERO}"),
    ("z_loss", [1e-4], f"[0.0001] {PLAIN}: {ZERO}"),
    ("z_loss", 1j, f"1j {PLAIN}: {ZERO}"),
    ("z_loss", -1, f"-1.0 {RANGE}: {ZERO}"),
    ("z_loss", np.inf, f"inf {RANGE}: {ZERO}"),
    ("z_loss", np.nan, f"nan {RANGE}: {ZERO}"),
    ("soft_cap", [3.0], f"[3.0] {PLAIN}: {CAP}"),
    ("soft_cap", False, f"False {PLAIN}: {CAP}"),
    ("soft_cap", 0, f"0.0 {RANGE}: {CAP}"),
    ("soft_cap", -2.0, f"-2.0 {RANGE}: {CAP}"),
    ("soft_cap", np.inf, f"inf {RANGE}: {CAP}"),
    ("soft_cap", np.nan, f"nan {RANGE}: {CAP}"),
    ("temperature", None, f"None {PLAIN}: {ABOVE}"),
    ("temperature", (1.0,), f"(1.0,) {PLAIN}: {ABOVE}"),
    ("temperature", 0, f"0.0 {RANGE}: {ABOVE}"),
    ("temperature", -1.0, f"-1.0 {RANGE}: {ABOVE}"),
    ("temperature", np.inf, f"inf {RANGE}: {ABOVE}"),
    ("temperature", np.nan, f"nan {RANGE}: {ABOVE}"),
    ("ignore_index", 0.5, f"0.5 {INT}: {LABEL}"),
    ("ignore_index", True, f"True {INT}: {LABEL}"),
    ("ignore_index", [1], f"[1] {INT}: {LABEL}"),
    ("ignore_index", "pad", f"'pad' {INT}: {LABEL}"),
    ("size", None, f"None {INT}: {ONE}"),
    ("size", 4.0, f"4.0 {INT}: {ONE}"),
    ("size", [4], f"[4] {INT}: {ONE}"),
    ("size", True, f"True {INT}: {ONE}"),
    ("size", 0, f"0 {RANGE}: {ONE}"),
    ("size", np.int32(-4), f"-4 {RANGE}: {ONE}"),
    ("axis", ("ipu",), f"('ipu',) {NAME}"),
    ("axis", ["ipu"], f"['ipu'] {NAME}"),
    ("axis", None, f"None {NAME}"),
    ("axis", 0, f"0 {NAME}"),
    (
        "axis",
        "model",
        "'model' is no axis of an enclosing shard_map: call the op inside jax.shard_map on a mesh that has this axis, "
        "or give the axis that its mesh has",
    ),
    ("out_of_range", None, f"None is unknown: {WAY}"),
    ("out_of_range", "drop", f"'drop' is unknown: {WAY}"),
    ("out_of_range", ["clip"], f"['clip'] is unknown: {WAY}"),
    ("reduction", None, f"None is unknown: {SUM}"),
    ("reduction", "max", f"'max' is unknown: {SUM}"),
    ("reduction", ["sum"], f"['sum'] is unknown: {SUM}"),
    ("weights", [1.0, 1.0, 1.0], f"[1.0, 1.0, 1.0] {ARRAY}"),
    ("weights", "all", f"'all' {ARRAY}"),
    ("return_log_sum_exp", None, "None is not a bool: give True or False"),
    ("return_log_sum_exp", "yes", "'yes' is not a bool: give True or False"),
    ("return_log_sum_exp", 1, "1 is not a bool: give True or False"),
    ("labels", None, f"None {ARRAY}"),
    ("labels", [0, 1, 2], f"[0, 1, 2] {ARRAY}"),
)
OF_LOGITS = (
    ("logits_shard", [[0.0, 0.0]], f"[[0.0, 0.0]] {ARRAY}"),
    ("logits_shard", None, f"None {ARRAY}"),
)
OF_LINEAR = (
    ("gradients", "both", f"'both' is unknown: {WHERE}"),
    ("gradients", [], f"[] is unknown: {WHERE}"),
    ("gradients", False, f"False is unknown: {WHERE}"),
    ("bias", [1.0, 1.0], f"[1.0, 1.0] {ARRAY}"),
    ("tokens", -1, f"-1 {RANGE}: {SCATTERED}"),
    ("tokens", True, f"True {INT}: {SCATTERED}"),
    ("tokens", 3.0, f"3.0 {INT}: {SCATTERED}"),
    ("token_chunk", 0, f"0 {RANGE}: {CHUNK}"),
    ("token_chunk", np.int64(-1), f"-1 {RANGE}: {CHUNK}"),
    ("token_chunk", [2], f"[2] {INT}: {CHUNK}"),
    ("column_chunk", 1.5, f"1.5 {INT}: {CHUNK}"),
    ("column_chunk", True, f"True {INT}: {CHUNK}"),
    ("hidden", None, f"None {ARRAY}"),
    ("hidden", [[1.0]], f"[[1.0]] {ARRAY}"),
    ("table", [[1.0]], f"[[1.0]] {ARRAY}"),
)


def _of_logits(shard, _, **options):
    options = {"labels": np.arange(3), "size": 4, "logits_shard": shard} | options
    return log_softmax_cross_entropy(**options)


def _linear(_, shard, **options):
    options = {"labels": np.arange(3), "size": 4, "hidden": jnp.ones((3, 3)), "table": shard} | options
    return linear_cross_entropy(**options)


def _called(op, options):
    logits, table = normal(0, (3, 4)), normal(1, (4, 3))
    return on_ipus(functools.partial(op, **options), 2, (COLUMNS, ROWS), P())(logits, table)


def _id(value):
    return value.__name__ if callable(value) else str(value)[:30]


EVERY = (
    *((_of_logits, *bad) for bad in (*BAD, *OF_LOGITS)),
    *((_linear, *bad) for bad in (*BAD, *OF_LINEAR)),
)


@pytest.mark.parametrize(("op", "option", "value", "message"), EVERY, ids=_id)
def test_a_bad_value_is_refused_by_name_value_and_rule(op, option, value, message):
    with pytest.raises(ValueError, match=exactly(f"{option}={message}")):
        _called(op, {option: value})


@pytest.mark.parametrize("op", [_of_logits, _linear])
def test_a_traced_number_is_refused(op):
    def traced(logits, table, temperature):
        return op(logits, table, temperature=temperature)

    message = f"temperature=<float32[] array> {PLAIN}: {ABOVE}"
    with pytest.raises(ValueError, match=exactly(message)):
        on_ipus(traced, 2, (COLUMNS, ROWS, P()), P())(jnp.ones((3, 4)), jnp.ones((4, 3)), jnp.float32(1))


@pytest.mark.parametrize("op", [_of_logits, _linear])
def test_weights_that_are_not_real_are_refused(op):
    message = "weights has dtype complex64, but must be real numbers: give floats"
    with pytest.raises(ValueError, match=exactly(message)):
        _called(op, {"weights": np.ones(3, np.complex64)})


@pytest.mark.parametrize("op", [_of_logits, _linear])
def test_numpy_s_numbers_are_as_good_as_python_s(op):
    plain = {"label_smoothing": 0.25, "z_loss": 0.5, "soft_cap": 4.0, "temperature": 2, "ignore_index": 1, "size": 4}
    of_numpy = {
        "label_smoothing": ml_dtypes.bfloat16(0.25),
        "z_loss": np.float16(0.5),
        "soft_cap": np.float64(4),
        "temperature": np.uint8(2),
        "ignore_index": np.int16(1),
        "size": np.int64(4),
        "weights": np.array([True, True, True]),
        "labels": jnp.arange(3),
    }
    if op is _linear:
        plain |= {"token_chunk": 2, "column_chunk": 1, "gradients": "backward"}
        of_numpy |= {"token_chunk": np.uint16(2), "column_chunk": np.int32(1), "gradients": "backward"}
    got, want = _called(op, of_numpy), _called(op, plain)
    assert got.dtype == want.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)
