"""Test the tools of an embedding and of a matmul: output, exit codes, and that they notice an op that is wrong."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharded_ops
from ipu_jax.tools import sharded_embedding_tool as embedding_tool
from ipu_jax.tools import sharded_matmul_tool as matmul_tool
from ipu_jax.tools.comparison import HALF_TOLERANCE, differences
from ipu_jax.tools.sharded_embedding_tool import NORM_TOLERANCE, Inputs, run_dense

SMALL = {
    embedding_tool: ["--vocab-size", "10", "--feature-size", "8", "--sequence-length", "6"],
    matmul_tool: ["--rows", "6", "--cols", "8", "--outsize", "10"],
}
SIZES = [f"--vocab-size {size} --feature-size 768" for size in ("1 --ipus 2", "3 --ipus 8", "8001 --ipus 4")]
EMBEDDINGS = ["--ipus 3", "--ipus 1", "--ipus 8", "--ipus 4 --fp16", "--bf16"]
EMBEDDINGS += [f"{size}{half}" for size in SIZES for half in ("", " --fp16", " --bf16")]
EMBEDDINGS += ["--ipus 4 --vocab-size 8000 --feature-size 768 --sequence-length 256"]  # the original program's sizes
MATMULS = ["--ipus 1", "--ipus 3", "--ipus 8 --fp16", "--bf16"]
MATMULS += [f"--rows {r} --cols {c} --outsize {n} --ipus 4" for r, c, n in ((1, 1, 1), (3, 1, 2), (2, 64, 1000))]
CASES = [pytest.param(embedding_tool, flags, id=f"embedding {flags}") for flags in EMBEDDINGS]
CASES += [pytest.param(matmul_tool, flags, id=f"matmul {flags}") for flags in MATMULS]
both_tools = pytest.mark.parametrize("tool", SMALL, ids=lambda tool: tool.__name__.split(".")[-1])


@pytest.mark.fast("matmul --ipus 3")
@pytest.mark.parametrize(("tool", "flags"), CASES)
def test_the_sharded_program_matches_the_unsharded(tool, flags, capsys):
    assert tool.main([*SMALL[tool], *flags.split()]) == 0
    printed = capsys.readouterr().out.splitlines()
    sharded, dense = (float(line.split()[-1]) for line in printed[:2])
    assert sharded == pytest.approx(dense, abs=1e-2 if tool is embedding_tool else 1e-3)
    assert printed[2:] == ["Results match."]


def test_the_unsharded_embedding_is_right():
    """Test one token: the loss by hand, and the gradient by finite differences in its steepest direction."""
    table = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]], np.float32)
    inputs = Inputs(table, np.array([0], np.int32), np.array([1], np.int32))
    logits = np.array([1.0, 0.0, 1.0])  # row 0 with each row
    loss, gradient = run_dense(inputs)
    assert loss == pytest.approx(np.log(np.exp(logits).sum()) - logits[1])
    step = 0.02 * gradient / np.linalg.norm(gradient)
    ahead, behind = (run_dense(inputs._replace(table=table + s)).loss for s in (step, -step))
    assert (ahead - behind) / 0.04 == pytest.approx(np.linalg.norm(gradient), rel=1e-3)


@pytest.mark.slow
@both_tools
def test_without_checks_only_the_sharded_program_runs_on_inputs_of_the_seed(tool, capsys, monkeypatch):
    monkeypatch.setattr(tool, "run_dense", None)

    def printed(seed):
        assert tool.main([*SMALL[tool], "--no-checks", "--ipus", "2", "--seed", seed]) == 0
        return capsys.readouterr().out

    one, same, other = map(printed, "112")
    assert one == same != other
    assert re.fullmatch(r"Loss on 2 IPUs: \d\.\d{4}\n", one)


@both_tools
def test_the_seed_makes_every_input(tool):
    one, same, other = (tool.random_inputs(10, 8, 6, seed, "float32") for seed in (1, 1, 2))
    for a, b, c in zip(one, same, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(a, c)
    shapes, below = (((10, 8), (6,), (6,)), 10) if tool is embedding_tool else (((10, 8), (8, 6), (10,)), 6)
    assert tuple(leaf.shape for leaf in one) == shapes
    numbers = [leaf for leaf in one if leaf.dtype == np.int32]
    assert all(0 <= leaf.min() <= leaf.max() < below for leaf in numbers)


@pytest.mark.parametrize(("rows", "cols", "outsize"), [(8, 16, 500), (64, 256, 2000)])
def test_random_logits_are_as_large_whatever_the_sizes(rows, cols, outsize):
    lhs, rhs, _ = matmul_tool.random_inputs(rows, cols, outsize, seed=0, dtype="float32")
    assert np.std(lhs @ rhs) == pytest.approx(1 / 3, rel=0.1)


# ops that are wrong: each is made of the right op, which is the first argument
still, FILLED = jax.lax.stop_gradient, {"mode": "fill", "fill_value": 0}
first_of = lambda table: len(table) * jax.lax.axis_index("ipu")
BROKEN = {
    "one percent off": lambda op, *args, **how: 1.01 * op(*args, **how),
    "not a number": lambda op, *args, **how: op(*args, **how) * jnp.nan,
    "without gradient": lambda op, *args, **how: still(op(*args, **how)),
    "without gradient of the first": lambda op, x, w, **how: op(still(x), w, **how),
    "without gradient of the second": lambda op, x, w, **how: op(x, still(w), **how),
    "twice the gradient of the first": lambda op, x, w, **how: op(2 * x - still(x), w, **how),
    "twice the gradient of the second": lambda op, x, w, **how: op(x, 2 * w - still(w), **how),
    "only this shard's tokens": lambda op, table, ids, size: table.at[ids - first_of(table)].get(**FILLED),
}

OF_EMBEDDING = [
    (embedding_tool, "tied_projection", "without gradient of the second", ["gradient"]),
    (embedding_tool, "tied_projection", "without gradient of the first", ["gradient"]),
    (embedding_tool, "embedding", "without gradient", ["gradient"]),
    (embedding_tool, "embedding", "only this shard's tokens", ["loss", "gradient"]),
    (embedding_tool, "log_softmax_cross_entropy", "twice the gradient of the first", ["gradient"]),
    (embedding_tool, "log_softmax_cross_entropy", "not a number", ["loss", "gradient"]),
]


def named_as_wrong(tool, op, broken, argv, capsys, monkeypatch):
    monkeypatch.setattr(sharded_ops, op, functools.partial(BROKEN[broken], getattr(sharded_ops, op)))
    assert tool.main(argv) == 1
    *_, text = capsys.readouterr().out.partition("Loss unsharded")
    return re.findall(r"^Max ABS error: (?:nan|[\d.e-]+) \((\w+)\)$", text, re.MULTILINE)


@pytest.mark.fast(
    "-embedding-only this shard's tokens-",
    "-log_softmax_cross_entropy-twice the gradient of the first-",
    "-matmul-without gradient of the first-",
)
@pytest.mark.parametrize(
    ("tool", "op", "broken", "wrong"),
    [
        *OF_EMBEDDING,
        (embedding_tool, "tied_projection", "one percent off", ["loss", "gradient"]),
        (matmul_tool, "matmul", "one percent off", ["logits", "loss", "dLhs", "dRhs"]),
        (matmul_tool, "matmul", "without gradient of the first", ["dLhs"]),
        (matmul_tool, "matmul", "twice the gradient of the second", ["dRhs"]),
        (matmul_tool, "matmul", "not a number", ["logits", "loss", "dLhs", "dRhs"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_op_is_noticed(tool, op, broken, wrong, capsys, monkeypatch):
    assert named_as_wrong(tool, op, broken, SMALL[tool], capsys, monkeypatch) == wrong


@pytest.mark.slow
@pytest.mark.parametrize(("tool", "op", "broken", "wrong"), OF_EMBEDDING)
def test_a_broken_gradient_is_noticed_in_half_types_however_small_it_is(tool, op, broken, wrong, capsys, monkeypatch):
    argv = ["--vocab-size", "500", "--feature-size", "64", "--bf16"]
    assert "gradient" in named_as_wrong(tool, op, broken, argv, capsys, monkeypatch)


@pytest.mark.parametrize("results", [embedding_tool.LossAndGradient, matmul_tool.Results])
def test_differences_are_judged_as_numpy_does(results):
    judged = results._fields[-1]
    want = results(**(dict.fromkeys(results._fields, 1.0) | {judged: np.array([2.0, -2.0])}))
    limit = HALF_TOLERANCE.atol + HALF_TOLERANCE.rtol * 2
    less = lambda by: want._replace(**{judged: getattr(want, judged) - by})
    assert differences(less(0.99 * limit), want, HALF_TOLERANCE) == {}
    beyond = differences(less([0, 1.01 * limit]), want, HALF_TOLERANCE)
    assert beyond == {judged: pytest.approx(1.01 * limit)}


def test_a_small_gradient_is_judged_by_its_norm_too():
    want = embedding_tool.LossAndGradient(loss=1.0, gradient=np.array([3e-4, -4e-4]))
    near, far = (want._replace(gradient=want.gradient * factor) for factor in (1.04, 1.06))
    assert differences(near, want, HALF_TOLERANCE, NORM_TOLERANCE) == {}
    assert differences(far, want, HALF_TOLERANCE, NORM_TOLERANCE) == {"gradient": pytest.approx(0.06 * 4e-4)}


@pytest.mark.parametrize(
    ("tool", "runs", "argv", "line"),
    [
        (embedding_tool, "run_pipeline", "--ipus 9", r"--ipus 9, but jax already started its CPU backend with 8: .*"),
        (matmul_tool, "random_inputs", "--ipus 9", r"--ipus 9, but jax .*"),
        (
            embedding_tool,
            "run_pipeline",
            "--vocab-size 2147483647 --feature-size 100000",
            r"--vocab-size 2147483647, --feature-size 100000 and --sequence-length 256 need 3,440,372 GB or more, and "
            r"this machine has [\d,]+ GB of memory: give smaller ones",
        ),
    ],
)
def test_what_this_machine_cannot_hold_is_refused_in_one_line(tool, runs, argv, line, capsys, monkeypatch):
    monkeypatch.setattr(tool, runs, None)
    with pytest.raises(SystemExit) as stopped:
        tool.main(argv.split())
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"sharded-(embedding|matmul)-tool: {line}\n", err)
