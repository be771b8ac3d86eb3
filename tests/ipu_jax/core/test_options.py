"""Test that options are checked when they are made, and that errors give the value, the rule and a remedy."""

import dataclasses
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from ipu_jax import TrainOptions
from ipu_jax.base.checks import check_bool, check_choice, check_count, check_positive
from ipu_jax.options import DynamicScale, PipelineOptions
from support.refusals import refusals, refused

COUNTS = IntEnum("Counts", "one two three")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        *((check_count("m", value), value) for value in (1, 84, 10**9)),
        *((check_count("m", kind(3)), 3) for kind in (np.int64, np.int8, np.uint16, COUNTS)),
        *((check_positive("p", kind(0.5)), 0.5) for kind in (np.float32, np.float64, np.float16, float)),
        (check_positive("p", np.int32(2)), 2),
        (check_bool("b", np.False_), False),
        (check_choice("way", "there", ("here", "there")), "there"),
    ],
)
def test_what_means_something_is_given_back_and_numpys_numbers_as_pythons_own(found, expected):
    assert (type(found), found) == (type(expected), expected)


def test_pipeline_options_are_frozen_data_with_defaults():
    options = PipelineOptions()
    assert options == PipelineOptions(gradient_accumulation=1, reduction="mean")
    assert hash(options) == hash(PipelineOptions(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.gradient_accumulation = 2  # pyright: ignore[reportAttributeAccessIssue]


def test_pipeline_options_survive_a_replace_with_the_same_checks():
    options = PipelineOptions(4, "sum")
    assert dataclasses.replace(options, gradient_accumulation=8) == PipelineOptions(8, "sum")
    with pytest.raises(ValueError, match=r"^gradient_accumulation=0 "):
        dataclasses.replace(options, gradient_accumulation=0)


def test_options_keep_numpys_numbers_as_pythons_own():
    """Then equal options compare equal, have the same hash, and widen no array."""
    given = {
        "replication_factor": np.int64(2),
        "gradient_accumulation": np.int32(3),
        "device_iterations": np.int64(4),
        "outputs": np.int8(2),
        "max_gradient_norm": np.float64(0.5),
        "loss_scale": np.float32(8),
        "weighted": np.True_,
        "stochastic_rounding": np.False_,
        "shard_optimizer": np.True_,
        "donate": np.False_,
    }
    options, plain = TrainOptions(**given), TrainOptions(**{name: value.item() for name, value in given.items()})
    assert options == plain
    assert hash(options) == hash(plain)
    kinds = {name: type(getattr(options, name)) for name in given}
    assert set(kinds.values()) <= {int, float, bool}
    assert (options.every, type(options.every)) == (2, int)
    three: Any = np.int64(3)
    assert type(PipelineOptions(three).gradient_accumulation) is int
    of_scale: Any = (np.float32(8), np.int64(5), np.float64(2), np.int32(1), np.float32(64))
    scale = DynamicScale(*of_scale)
    assert {type(value) for value in dataclasses.astuple(scale)} <= {int, float}


NO_COUNTS = (0, -1, True, False, 2.5, 1.0, float("nan"), "1", None, [1])
NO_COUNTS += (np.int64(0), np.True_, np.float32(1), np.ones(1))
NOT_POSITIVE = (0, -0.5, float("inf"), np.float32("nan"), True, np.True_, None, "1", [1.0], 1j)
WAYS = ("sequential", "grouped")
ONE_OF_WAYS = "one of 'sequential', 'grouped'"
A_COUNT, POSITIVE = ("count", "an int of at least 1"), ("positive number", "a finite one above 0")


WRONG: Any = "means"


@refusals(
    *((lambda value=value: check_count("m", value), f"m={value!r}", *A_COUNT) for value in NO_COUNTS),
    *((lambda value=value: check_positive("p", value), f"p={value!r}", *POSITIVE) for value in NOT_POSITIVE),
    *(
        (lambda value=value: check_bool("b", value), f"b={value!r}", "bool", "True or False")
        for value in (0, 1, None, "yes", np.int64(1))
    ),
    *(
        (
            lambda value=value: check_choice("way", value, WAYS),
            f"way={value!r} is unknown: {hint}Choose {ONE_OF_WAYS}",
            "unknown",
        )
        for value, hint in (("grouepd", "did you mean 'grouped'? "), ("Sequential", "did you mean 'sequential'? "))
    ),
    *(
        (
            lambda value=value: check_choice("way", value, WAYS),
            f"way={value!r} is unknown: choose {ONE_OF_WAYS}",
            "unknown",
        )
        for value in ("1f1b", "", None, 3, ("grouped",))
    ),
    (lambda: PipelineOptions(reduction=WRONG), "reduction='means'", "did you mean 'mean'?", "one of 'mean', 'sum'"),
    (lambda: TrainOptions(outputs=True), "outputs=True", *A_COUNT),
    (lambda: TrainOptions(half=WRONG), "half='means'", "unknown", "'bfloat16', 'float16'"),
    (lambda: TrainOptions(donate=WRONG), "donate='means'", "bool", "True or False"),
)
def test_options_that_mean_nothing_are_refused(call, holds):
    with refused(*holds):
        call()
