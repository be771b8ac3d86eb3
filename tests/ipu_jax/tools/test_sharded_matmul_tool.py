"""Test the command line tool: what it prints, its exit codes, and that it notices an op that is wrong."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax.tools import split_matmul
from ipu_jax.tools.agreement import HALF_TOLERANCE
from ipu_jax.tools.sharded_matmul_tool import main
from ipu_jax.tools.split_matmul import Results, differences, random_inputs

SMALL = ["--rows", "6", "--cols", "8", "--outsize", "10"]


@pytest.mark.parametrize(
    "argv",
    [["--ipus", "1"], ["--ipus", "3"], ["--ipus", "8", "--fp16"], ["--bf16"]],
)
def test_the_sharded_program_matches_the_unsharded(argv, capsys):
    assert main([*SMALL, *argv]) == 0
    printed = capsys.readouterr().out.splitlines()
    sharded, dense = (float(line.split()[-1]) for line in printed[:2])
    assert sharded == pytest.approx(dense, abs=1e-3)
    assert printed[2:] == ["Results match."]


@pytest.mark.slow
@pytest.mark.parametrize("size", [("1", "1", "1"), ("3", "1", "2"), ("2", "64", "1000")])
def test_other_sizes_match_too(size, capsys):
    rows, cols, outsize = size
    assert main(["--rows", rows, "--cols", cols, "--outsize", outsize, "--ipus", "4"]) == 0
    assert capsys.readouterr().out.endswith("\nResults match.\n")


def test_without_checks_only_the_sharded_program_runs(capsys, monkeypatch):
    monkeypatch.setattr(split_matmul, "dense_program", None)
    assert main([*SMALL, "--no-checks"]) == 0
    assert re.fullmatch(r"Loss on 2 IPUs: \d\.\d{4}\n", capsys.readouterr().out)


def test_the_seed_makes_the_inputs(capsys):
    assert len({_printed(capsys, seed) for seed in ("1", "2")}) == 2
    assert _printed(capsys, "1") == _printed(capsys, "1")


def _printed(capsys, seed):
    main([*SMALL, "--seed", seed, "--no-checks"])
    return capsys.readouterr().out


def _one_percent_off(x, w, **kwargs):
    return 1.01 * _right_matmul(x, w, **kwargs)


def _without_dx(x, w, **kwargs):
    return _right_matmul(jax.lax.stop_gradient(x), w, **kwargs)


def _twice_dw(x, w, **kwargs):
    return _right_matmul(x, 2 * w - jax.lax.stop_gradient(w), **kwargs)


def _not_a_number(x, w, **kwargs):
    return _right_matmul(x, w, **kwargs) * jnp.nan


_right_matmul = split_matmul.matmul


@pytest.mark.parametrize(
    ("broken", "wrong"),
    [
        (_one_percent_off, ["logits", "loss", "dLhs", "dRhs"]),
        (_without_dx, ["dLhs"]),
        (_twice_dw, ["dRhs"]),
        (_not_a_number, ["logits", "loss", "dLhs", "dRhs"]),
    ],
)
def test_a_broken_matmul_is_noticed(broken, wrong, capsys, monkeypatch):
    monkeypatch.setattr(split_matmul, "matmul", broken)
    assert main(SMALL) == 1
    errors = capsys.readouterr().out.splitlines()[2:]
    assert [re.sub(r"Max ABS error: (nan|[\d.e-]+) \((\w+)\)", r"\2", line) for line in errors] == wrong


def test_differences_are_judged_as_numpy_does():
    want = Results(logits=np.array([2.0, -2.0]), loss=1.0, dLhs=0.0, dRhs=0.0)
    limit = HALF_TOLERANCE.atol + HALF_TOLERANCE.rtol * 2
    assert differences(want._replace(logits=want.logits - 0.99 * limit), want, HALF_TOLERANCE) == {}
    beyond = differences(want._replace(logits=want.logits - [0, 1.01 * limit]), want, HALF_TOLERANCE)
    assert beyond == {"logits": pytest.approx(1.01 * limit)}


@pytest.mark.parametrize(("rows", "cols", "outsize"), [(8, 16, 500), (64, 256, 2000)])
def test_random_logits_are_as_large_whatever_the_sizes(rows, cols, outsize):
    lhs, rhs, labels = random_inputs(rows, cols, outsize, seed=0, dtype=jnp.float32)
    assert np.std(lhs @ rhs) == pytest.approx(1 / 3, rel=0.1)
    assert labels.shape == (rows,)
    assert 0 <= labels.min() <= labels.max() < outsize


def test_more_ipus_than_there_are_is_refused_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(split_matmul, "random_inputs", None)
    with pytest.raises(SystemExit) as stopped:
        main(["--ipus", "9"])
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"sharded-matmul-tool: --ipus 9, but jax .*\n", err)
