"""Options are checked when they are made: the value, the rule and the mend."""

import dataclasses
import re

import pytest

from ipu_jax import PipelineOptions
from ipu_jax.options import check_choice, check_count


@pytest.mark.parametrize("value", [1, 84, 10**9])
def test_a_count_is_given_back(value):
    assert check_count("m", value) is value


@pytest.mark.parametrize("value", [0, -1, True, False, 2.5, 1.0, float("nan"), "1", None, [1]])
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
