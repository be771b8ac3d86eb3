"""Test that options are checked when they are made, and that errors give the value, the rule and a remedy."""

import dataclasses
import re
from enum import IntEnum
from typing import Any

import numpy as np
import pytest

from ipu_jax import DynamicScale, PipelineOptions, TrainOptions
from ipu_jax._checks import check_bool, check_choice, check_count, check_positive


@pytest.mark.parametrize("value", [1, 84, 10**9])
def test_a_count_is_given_back(value):
    assert check_count("m", value) is value


@pytest.mark.parametrize("value", [np.int64(3), np.int8(3), np.uint16(3)])
def test_numpys_integers_are_counts_as_pythons_own(value):
    assert type(check_count("m", value)) is int
    assert type(check_count("m", IntEnum("Counts", "one two three").three)) is int
    assert check_count("m", value) == 3


@pytest.mark.parametrize(
    "value",
    [0, -1, True, False, 2.5, 1.0, float("nan"), "1", None, [1], np.int64(0), np.True_, np.float32(1), np.ones(1, int)],
)
def test_what_is_no_count_is_refused(value):
    with pytest.raises(
        ValueError, match=r"^" + re.escape(f"m={value!r} is not a count: give an int of at least 1") + "$"
    ):
        check_count("m", value)


def test_a_choice_is_given_back():
    assert check_choice("way", "there", ("here", "there")) == "there"


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("grouepd", "did you mean 'grouped'? "),
        ("Sequential", "did you mean 'sequential'? "),
        ("1f1b", ""),
        ("", ""),
        (None, ""),
        (3, ""),
        (("grouped",), ""),
    ],
)
def test_an_unknown_choice_is_refused_with_the_nearest(value, hint):
    with pytest.raises(ValueError, match="is unknown") as caught:
        check_choice("schedule", value, ("sequential", "grouped"))
    assert str(caught.value) == f"schedule={value!r} is unknown: {hint}Choose one of 'sequential', 'grouped'"


def test_pipeline_options_are_frozen_data_with_defaults():
    options = PipelineOptions()
    assert options == PipelineOptions(gradient_accumulation=1, reduction="mean")
    assert hash(options) == hash(PipelineOptions(1))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.gradient_accumulation = 2  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("value", [0, True, 2.5, "8"])
def test_pipeline_options_check_the_accumulation(value):
    with pytest.raises(
        ValueError, match=f"^gradient_accumulation={value!r} is not a count: give an int of at least 1$"
    ):
        PipelineOptions(gradient_accumulation=value)


@pytest.mark.parametrize(
    ("value", "hint"), [("means", "did you mean 'mean'? "), ("Sum", "did you mean 'sum'? "), ("max", ""), (None, "")]
)
def test_pipeline_options_check_the_reduction(value, hint):
    with pytest.raises(ValueError, match=r"^reduction=") as caught:
        PipelineOptions(reduction=value)
    assert str(caught.value) == f"reduction={value!r} is unknown: {hint}Choose one of 'mean', 'sum'"


def test_pipeline_options_survive_a_replace_with_the_same_checks():
    options = PipelineOptions(4, "sum")
    assert dataclasses.replace(options, gradient_accumulation=8) == PipelineOptions(8, "sum")
    with pytest.raises(ValueError, match=r"^gradient_accumulation=0 "):
        dataclasses.replace(options, gradient_accumulation=0)


@pytest.mark.parametrize("value", [np.float32(0.5), np.float64(0.5), np.float16(0.5), 0.5])
def test_numpys_numbers_are_positive_numbers_as_pythons_own(value):
    assert (type(check_positive("p", value)), check_positive("p", value)) == (float, 0.5)
    assert type(check_positive("p", np.int32(2))) is int


@pytest.mark.parametrize("value", [0, -0.5, float("inf"), np.float32("nan"), True, np.True_, None, "1", [1.0], 1j])
def test_what_is_no_positive_number_is_refused(value):
    with pytest.raises(ValueError, match=re.escape(f"p={value!r} is not a positive number: give a finite one above 0")):
        check_positive("p", value)


def test_numpys_bools_are_bools():
    assert check_bool("b", np.False_) is False
    for value in (0, 1, None, "yes", np.int64(1)):
        with pytest.raises(ValueError, match=re.escape(f"b={value!r} is no bool: give True or False")):
            check_bool("b", value)


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_iterations": None}, "device_iterations=None is not a count: give an int of at least 1"),
        ({"outputs": None}, "outputs=None is not a count: give an int of at least 1"),
        ({"outputs": 0}, "outputs=0 is not a count: give an int of at least 1"),
        ({"outputs": True}, "outputs=True is not a count: give an int of at least 1"),
        ({"loss_scale": None}, "loss_scale=None is not a positive number: give a finite one above 0"),
        ({"max_gradient_norm": True}, "max_gradient_norm=True is not a positive number: give a finite one above 0"),
        ({"precision": None}, "precision=None is unknown: Choose one of '32.32', '16.32', '16.16'"),
        ({"half": None}, "half=None is unknown: Choose one of 'bfloat16', 'float16'"),
        ({"donate": None}, "donate=None is no bool: give True or False"),
        ({"replication_factor": 2.0}, "replication_factor=2.0 is not a count: give an int of at least 1"),
    ],
)
def test_train_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match="^" + re.escape(message) + "$"):
        TrainOptions(**options)
