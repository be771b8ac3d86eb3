"""Test that models of installed packages are cut and verified as they are, and that the table of all has them."""

import ast
import inspect

import pytest

from strangers.models import FILES, PACKAGES
from strangers.table import HEAD, IPUS, PAGE, row_of


@pytest.mark.slow
@pytest.mark.parametrize("one", [pytest.param(one, id=one.problem.__name__) for one in PACKAGES])
def test_a_model_of_a_package_is_cut_and_verified(one):
    _, _, shares, weights, error = row_of(one)
    assert len(shares.split("/")) == len(weights.split(",")) == IPUS
    assert "0%" not in shares.split(" / ")
    assert float(error) < 1e-5  # the bound of verify


@pytest.mark.parametrize("one", [pytest.param(one, id=one.problem.__name__) for one in [*FILES, *PACKAGES]])
def test_a_stranger_takes_few_statements_and_has_a_row_in_the_gallery(one):
    (function,) = ast.parse(inspect.getsource(one.problem)).body
    assert isinstance(function, ast.FunctionDef)
    assert len(function.body) <= 5
    (row,) = [row for row in PAGE.read_text().splitlines() if row.startswith(f"| `{one.name}` |")]
    cells = [cell.strip() for cell in row.strip("| ").split(" | ")]
    assert len(cells) == len(HEAD)
    assert cells[1] == one.unusual
    assert float(cells[-1]) < 1e-5  # the bound of verify
