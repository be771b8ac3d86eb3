"""Test that the public names and their signatures are those of `public_api.txt`, and what a line of that list tells."""

import dataclasses
import enum
import re
from collections.abc import Callable
from typing import Any

import pytest

from support import public_api


def test_the_public_api_is_the_one_that_is_listed():
    listed, found = public_api.LISTED.read_text().splitlines(), public_api.public_api()
    changes = public_api.changes(listed, found)
    assert not changes, "the public API changed: run `make api`, and tell users in CHANGELOG.md:\n" + "\n".join(changes)
    assert listed == found  # in the same order


def test_each_name_is_listed_once():
    lines = public_api.LISTED.read_text().splitlines()
    names = [re.search(r"(?:^|[@ ])((?:ipu_jax|sharded_ops)\.[\w.]+)", line)[1] for line in lines]  # pyright: ignore
    assert len(names) == len(set(names))
    for name in ("ipu_jax.Pipeline", "ipu_jax.verify", "ipu_jax.popdist.getNumInstances", "sharded_ops.matmul"):
        assert name in names


class Base:
    def inherited(self) -> int:
        return 1

    def _private(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Example(Base):
    field: int
    other: tuple[int, ...] = (1, 2)
    _hidden: int = 0

    @property
    def area(self) -> float:
        return 1.0

    @classmethod
    def of(cls, *, size: int = 2, **rest: Any) -> "Example":
        return cls(size)


class Holder:
    def __init__(self, sizes: Callable[..., int]) -> None:
        self.sizes, self._own = sizes, {"{}": 1}


class Colour(enum.Enum):
    RED = "red"


def example(a, /, b: "int | None" = None, *, c: str = "}") -> None: ...


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            Example,
            [
                "@dataclass(frozen=True) class m.X(Base)",
                "m.X.field: int",
                "m.X.other: tuple[int, ...] = (1, 2)",
                "m.X.area: float (property)",
                "@classmethod m.X.of(cls, *, size: int=2, **rest: Any) -> 'Example'",
                "m.X.inherited(self) -> int",
            ],
        ),
        (
            Holder,
            [
                "class m.X()",
                "m.X.sizes (attribute)",
                "m.X.__init__(self, sizes: Callable[..., int]) -> None",
            ],
        ),
        (Colour, ["class m.X(enum.Enum)", "m.X.RED = 'red'"]),
        (example, ["m.X(a, /, b: 'int | None'=None, *, c: str='}') -> None"]),
        ("0.1.0", ["m.X = a version"]),
        ((1, "ipu"), ["m.X = (1, 'ipu')"]),
    ],
    ids=["dataclass", "attributes", "enum", "function", "version", "value"],
)
def test_a_line_tells_all_that_a_caller_can_see(monkeypatch, found, expected):
    monkeypatch.setattr(public_api, "PACKAGES", (__name__.split(".")[0],))
    assert list(public_api.lines_of("m.X", found)) == expected


def test_changes_are_told_as_what_is_gone_and_what_is_new():
    assert public_api.changes(["a()", "b(x)"], ["b(x, y)", "a()", "c()"]) == ["- b(x)", "+ b(x, y)", "+ c()"]
