"""Test the command line tool: what it prints, its exit codes, and that it notices an op that is wrong."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ipu_jax.tools import tied_embedding
from ipu_jax.tools.agreement import HALF_TOLERANCE
from ipu_jax.tools.sharded_embedding_tool import main
from ipu_jax.tools.tied_embedding import Inputs, Results, dense_program, differences, random_inputs

SMALL = ["--vocab-size", "10", "--feature-size", "8", "--sequence-length", "6"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv",
    [["--ipus", "1"], ["--ipus", "2"], ["--ipus", "3"], ["--ipus", "8"], ["--ipus", "4", "--fp16"], ["--bf16"]],
)
def test_the_pipeline_matches_the_unsharded_program(argv, capsys):
    assert main([*SMALL, *argv]) == 0
    printed = capsys.readouterr().out.splitlines()
    sharded, dense = (float(line.split()[-1]) for line in printed[:2])
    assert sharded == pytest.approx(dense, abs=1e-2)
    assert printed[2:] == ["Results match."]


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "ipus"), [("1", "2"), ("3", "8"), ("8001", "4")])
@pytest.mark.parametrize("half", [[], ["--fp16"], ["--bf16"]])
def test_any_vocabulary_on_any_number_of_ipus_matches(vocabulary, ipus, half, capsys):
    assert main(["--vocab-size", vocabulary, "--ipus", ipus, "--feature-size", "768", *half]) == 0
    assert capsys.readouterr().out.endswith("\nResults match.\n")


def test_the_sizes_of_the_original_match(capsys):
    argv = ["--ipus", "4", "--vocab-size", "8000", "--feature-size", "768", "--sequence-length", "256"]
    assert main(argv) == 0
    assert re.fullmatch(r"Loss on 4 IPUs: 8\.9\d+\nLoss unsharded: 8\.9\d+\nResults match\.\n", capsys.readouterr().out)


def test_the_unsharded_program_is_right():
    """Test one token: the loss by hand, and the gradient by finite differences in its steepest direction."""
    table = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], np.float32)
    inputs = Inputs(table, np.array([0], np.int32), np.array([1], np.int32))
    logits = np.array([1.0, 0.0, 1.0])  # row 0 with each row
    loss, gradient = dense_program(*map(jnp.asarray, inputs))
    assert loss == pytest.approx(np.log(np.exp(logits).sum()) - logits[1])
    step = 0.02 * np.asarray(gradient) / np.linalg.norm(gradient)
    ahead, behind = (dense_program(jnp.asarray(table + s), *map(jnp.asarray, inputs[1:]))[0] for s in (step, -step))
    assert (ahead - behind) / 0.04 == pytest.approx(np.linalg.norm(gradient), rel=1e-3)


def test_without_checks_only_the_pipeline_runs(capsys, monkeypatch):
    monkeypatch.setattr(tied_embedding, "dense_program", None)
    assert main([*SMALL, "--no-checks", "--ipus", "2"]) == 0
    assert re.fullmatch(r"Loss on 2 IPUs: \d\.\d{4}\n", capsys.readouterr().out)


def test_the_seed_makes_the_inputs():
    one, same, other = (random_inputs(10, 8, 6, seed, jnp.float32) for seed in (1, 1, 2))
    for a, b, c in zip(one, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)
    assert one.table.shape == (10, 8)
    assert one.tokens.shape == one.targets.shape == (6,)
    assert 0 <= min(one.tokens.min(), one.targets.min()) <= max(one.tokens.max(), one.targets.max()) < 10


def _one_percent_off(hidden, table, **kwargs):
    return 1.01 * _right_projection(hidden, table, **kwargs)


def _projection_without_dtable(hidden, table, **kwargs):
    return _right_projection(hidden, jax.lax.stop_gradient(table), **kwargs)


def _projection_without_dhidden(hidden, table, **kwargs):
    return _right_projection(jax.lax.stop_gradient(hidden), table, **kwargs)


def _lookup_without_gradient(table, ids, **kwargs):
    return jax.lax.stop_gradient(_right_embedding(table, ids, **kwargs))


def _only_this_shards_tokens(table, ids, size):
    return table.at[ids - len(table) * jax.lax.axis_index("ipu")].get(mode="fill", fill_value=0)


def _twice_the_gradient(logits, labels, **kwargs):
    return _right_loss(2 * logits - jax.lax.stop_gradient(logits), labels, **kwargs)


def _not_a_number(logits, labels, **kwargs):
    return _right_loss(logits, labels, **kwargs) * jnp.nan


_right_embedding = tied_embedding.embedding
_right_projection = tied_embedding.tied_projection
_right_loss = tied_embedding.log_softmax_cross_entropy

BROKEN = [
    ("tied_projection", _projection_without_dtable, ["gradient"]),
    ("tied_projection", _projection_without_dhidden, ["gradient"]),
    ("embedding", _lookup_without_gradient, ["gradient"]),
    ("embedding", _only_this_shards_tokens, ["loss", "gradient"]),
    ("log_softmax_cross_entropy", _twice_the_gradient, ["gradient"]),
    ("log_softmax_cross_entropy", _not_a_number, ["loss", "gradient"]),
]


@pytest.mark.parametrize(
    ("name", "broken", "wrong"), [*BROKEN, ("tied_projection", _one_percent_off, ["loss", "gradient"])]
)
def test_a_broken_op_is_noticed(name, broken, wrong, capsys, monkeypatch):
    monkeypatch.setattr(tied_embedding, name, broken)
    assert main(SMALL) == 1
    assert _named_as_wrong(capsys) == wrong


@pytest.mark.slow
@pytest.mark.parametrize(("name", "broken", "wrong"), BROKEN)
def test_a_broken_gradient_is_noticed_in_half_types_however_small_it_is(name, broken, wrong, capsys, monkeypatch):
    monkeypatch.setattr(tied_embedding, name, broken)
    assert main(["--vocab-size", "500", "--feature-size", "64", "--bf16"]) == 1
    assert "gradient" in _named_as_wrong(capsys)


def _named_as_wrong(capsys):
    *_, text = capsys.readouterr().out.partition("Loss unsharded")
    return re.findall(r"^Max ABS error: (?:nan|[\d.e-]+) \((\w+)\)$", text, re.MULTILINE)


def test_differences_are_judged_as_numpy_does():
    want = Results(loss=1.0, gradient=np.array([2.0, -2.0]))
    limit = HALF_TOLERANCE.atol + HALF_TOLERANCE.rtol * 2
    assert differences(want._replace(gradient=want.gradient - 0.99 * limit), want, HALF_TOLERANCE) == {}
    beyond = differences(want._replace(gradient=want.gradient - [0, 1.01 * limit]), want, HALF_TOLERANCE)
    assert beyond == {"gradient": pytest.approx(1.01 * limit)}


def test_a_small_gradient_is_judged_by_its_norm_too():
    want = Results(loss=1.0, gradient=np.array([3e-4, -4e-4]))
    near, far = (want._replace(gradient=want.gradient * factor) for factor in (1.04, 1.06))
    assert differences(near, want, HALF_TOLERANCE) == {}
    assert differences(far, want, HALF_TOLERANCE) == {"gradient": pytest.approx(0.06 * 4e-4)}


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["--ipus", "9"], r"--ipus 9, but jax already started its CPU backend with 8: .*"),
        (
            ["--vocab-size", "2147483647", "--feature-size", "100000"],
            r"--vocab-size 2147483647, --feature-size 100000 and --sequence-length 256 need 3,440,372 GB or more, and "
            r"this machine has [\d,]+ GB of memory: give smaller ones",
        ),
    ],
)
def test_what_this_machine_cannot_hold_is_refused_in_one_line(argv, line, capsys, monkeypatch):
    monkeypatch.setattr(tied_embedding, "run_pipeline", None)
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"sharded-embedding-tool: {line}\n", err)
