"""Test that the colours of pictures differ in lightness, also as people with deuteranopia or protanopia see them."""

import itertools

import numpy as np
import pytest

from ipu_jax.schedules._timetable import Kind
from ipu_jax.schedules.pictures.paints import CARD, FAINT_INK, IDLE, INK, UPDATE, Paint, paint_of, text_on

# Machado, Oliveira and Fernandes 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency",
# severity 1.0, for linear RGB
VISIONS = {
    "normal": np.eye(3),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
}
# for all numbers of chunks: those between lie between the ends
KINDS: tuple[Kind, ...] = ("F", "B", "W")
LOCAL: dict[Kind, list[Paint]] = {kind: [paint_of(kind, chunk, 3) for chunk in range(3)] for kind in KINDS}
CLASSES: dict[str, list[Paint]] = {**LOCAL, "concurrent": [paint_of("F", None), paint_of("B", None)], "idle": [IDLE]}


def luminance(colour: str, vision: str = "normal") -> float:
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(np.clip(VISIONS[vision] @ linear, 0, 1) @ (0.2126, 0.7152, 0.0722))


def contrast(a: str, b: str, vision: str = "normal") -> float:
    """Return the contrast ratio of WCAG 2: 1 for equal lightness, 21 for black and white."""
    dark, light = sorted((luminance(a, vision), luminance(b, vision)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_wcag():
    assert contrast("#ffffff", "#000000") == pytest.approx(21)
    assert contrast("#ffffff", "#767676") == pytest.approx(4.54, abs=0.01)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("dark", [False, True])
def test_kinds_of_cells_differ_in_lightness_in_every_vision(vision, dark):
    for (a, some), (b, others) in itertools.combinations(CLASSES.items(), 2):
        for one, other in itertools.product(some, others):
            ratio = contrast(one.on(dark=dark), other.on(dark=dark), vision)
            assert ratio >= 1.2, f"{a} {one} and {b} {other}: {ratio:.2f}"


@pytest.mark.parametrize("dark", [False, True])
def test_texts_can_be_read(dark):
    for kind, paints in LOCAL.items():
        for chunk, paint in enumerate(paints):
            assert contrast(paint.on(dark=dark), text_on(kind, chunk).on(dark=dark)) >= 4.5
        if kind != "W":
            assert contrast(paint_of(kind, None).on(dark=dark), text_on(kind, None).on(dark=dark)) >= 4.5
    for ink in (INK, FAINT_INK):
        assert contrast(ink.on(dark=dark), CARD.on(dark=dark)) >= 4.5
    assert contrast(UPDATE.on(dark=dark), CARD.on(dark=dark)) >= 3
