"""Test that the public names and their signatures are those of `public_api.txt`."""

import dataclasses
import enum

import pytest

from support import public_api


def test_the_public_api_is_the_one_that_is_listed():
    listed, found = public_api.LISTED.read_text().splitlines(), public_api.public_api()
    changes = public_api.changes(listed, found)
    assert not changes, "the public API changed: run `make api`, and tell users in CHANGELOG.md:\n" + "\n".join(changes)
    assert listed == found  # in the same order
    for name in ("ipu_jax.Pipeline(", "ipu_jax.verify(", "ipu_jax.popdist.getNumInstances(", "sharded_ops.matmul("):
        assert len([line for line in found if line.startswith(name)]) == 1


@dataclasses.dataclass
class Example:
    field: int
    other: tuple[int, ...] = (1, 2)
    _hidden: int = 0


class Holder(Example):
    def __init__(self, size: int, *, rest: str = "}") -> None:
        super().__init__(size)


class Colour(enum.Enum):
    RED = "red"


def example(a, /, b: "int | None" = None, *, c: str = "}") -> None: ...


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (Example, "(field: int, other: tuple[int, ...] = (1, 2))"),
        (Holder, "(self, size: int, *, rest: str='}')"),
        (Colour, "()"),
        (example, "(a, /, b: 'int | None'=None, *, c: str='}') -> None"),
        ("0.1.0", " = a version"),
        ((1, "ipu"), " = (1, 'ipu')"),
    ],
)
def test_a_line_tells_how_a_name_is_called(found, expected):
    assert public_api.how_called(found) == expected
