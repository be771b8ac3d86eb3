"""Compare the cost of the split projection and cross-entropy with that of commonly used programs.

Each program computes the mean loss and both gradients, for 1024 tokens, 768 features and 32000 columns in float32, on 2
IPUs. The rivals are the unsharded optax program on both cores; XLA's own partitioning of that program (`jit` with the
table's `NamedSharding`), which reduces three times; and torch's `loss_parallel` in two processes over gloo.
`linear_cross_entropy` is also compared with the unsharded program for 4096 tokens and 65536 columns. All programs run
in turn, in one run.

    python benchmarks/cross_entropy.py [--check]
"""

import re
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from figures import Cost, Figures, cost_of, largest_relative_difference, least, temporary_bytes
from ipu_jax import configure, make_mesh
from rivals_of.workers import NEEDS_TORCH, Workers, torch_is_installed
from sharded_ops import linear_cross_entropy, log_softmax_cross_entropy, tied_projection

TOKENS, FEATURES, VOCABULARY = 1024, 768, 32000
LARGE = (4096, 65536)  # tokens and columns
IPUS = 2
THREADS = (1, 2)  # of each torch process; the figures use the better of the two
ROUNDS, LARGE_ROUNDS = 12, 6

UNSHARDED, XLA, SPLIT = "the unsharded program", "XLA's own partitioning", "split"
BACKWARD, FORWARD = "fused, gradients in the backward pass", "fused, gradients in the forward pass"
NAMES = (UNSHARDED, XLA, SPLIT, BACKWARD, FORWARD)

COLLECTIVE = re.compile(r" (all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def dense(hidden_ND: Any, table_VD: Any, labels_N: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(hidden_ND @ table_VD.T, labels_N).mean()


def split(hidden_ND: Any, table_VD: Any, labels_N: Any, *, size: int) -> Any:
    logits_NV = tied_projection(hidden_ND, table_VD, size=size)
    return log_softmax_cross_entropy(logits_NV, labels_N, size=size, reduction="mean")


def programs(
    tokens: int = TOKENS, vocabulary: int = VOCABULARY, names: tuple[str, ...] = NAMES
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the compiled programs and their arguments, both by the program's name."""
    random = np.random.default_rng(0)
    hidden = random.normal(size=(tokens, FEATURES)).astype(np.float32)
    table = (random.normal(size=(vocabulary, FEATURES)) / np.sqrt(FEATURES)).astype(np.float32)
    labels = random.integers(0, vocabulary, tokens).astype(np.int32)
    whole = jax.tree.map(jnp.asarray, (hidden, table, labels))
    mesh = make_mesh(1, IPUS)
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("ipu"))
    placed = jax.device_put((hidden, table, labels), (everywhere, rows, everywhere))

    def mapped(op: Callable[..., Any]) -> Callable[..., Any]:
        return jax.shard_map(op, mesh=mesh, in_specs=(P(), P("ipu"), P()), out_specs=P())

    fused = partial(linear_cross_entropy, size=vocabulary, reduction="mean")
    losses = {
        UNSHARDED: dense,
        XLA: dense,
        SPLIT: mapped(partial(split, size=vocabulary)),
        BACKWARD: mapped(partial(fused, gradients="backward")),
        FORWARD: mapped(fused),
    }
    compiled, arguments = {}, {}
    for name in names:
        arguments[name] = whole if name == UNSHARDED else placed
        layout = None if name == UNSHARDED else (everywhere, (everywhere, rows))
        step = jax.jit(jax.value_and_grad(losses[name], argnums=(0, 1)), out_shardings=layout)
        compiled[name] = step.lower(*arguments[name]).compile()
    return compiled, arguments


def main(argv: list[str] | None = None) -> int:
    figures = Figures("the split cross-entropy beside its rivals", argv)
    smallest = {"TOKENS": 8, "FEATURES": 4, "VOCABULARY": 34, "LARGE": (16, 66)}
    figures.shrink(__name__, **smallest, ROUNDS=1, LARGE_ROUNDS=1)
    configure(IPUS)
    compiled, arguments = programs(TOKENS, VOCABULARY)
    steps = {name: partial(program, *arguments[name]) for name, program in compiled.items()}
    expected = steps[UNSHARDED]()
    for name in (SPLIT, BACKWARD, FORWARD):
        figures.add(f"gradients, {name}: largest relative difference", _difference(steps[name](), expected), 1e-5)
    for name in (XLA, SPLIT, BACKWARD, FORWARD):
        figures.add(f"collectives in the program, {name}", len(COLLECTIVE.findall(compiled[name].as_text())))
    unsharded_bytes = temporary_bytes(compiled[UNSHARDED])
    for name, bound in ((XLA, None), (SPLIT, None), (BACKWARD, 1 / 20), (FORWARD, 1 / 20)):
        bytes_ = temporary_bytes(compiled[name])
        figures.add(f"temporary bytes an IPU / unsharded, {name}", bytes_ / unsharded_bytes, bound)

    hidden, table, labels = map(np.asarray, arguments[UNSHARDED])
    files = {"whole": {"hidden": hidden, "table": table, "labels": labels}}
    if not torch_is_installed():
        figures.leave_out("torch's loss_parallel", NEEDS_TORCH)
        _compare(figures, steps, None)
        _compare_large(figures)
        return figures.status()
    with Workers("torch loss_parallel", Path(__file__).parent / "rivals_of/torch_loss.py", files=files) as torch:
        torch.order(do="result", threads=1)
        results = torch.results()
        theirs = (results[0]["loss"], (results[0]["hidden"], np.concatenate([r["table"] for r in results])))
        figures.add(
            "gradients, torch's loss_parallel: largest relative difference", _difference(theirs, expected), 1e-5
        )
        _compare(figures, steps, torch)
    _compare_large(figures)
    return figures.status()


def _difference(found: Any, expected: Any) -> float:
    return largest_relative_difference(*(jax.tree.map(np.asarray, tree) for tree in (found, expected)))


def _compare(figures: Figures, steps: dict[str, Callable[[], Any]], torch: Workers | None) -> None:
    """Add the figures of the costs, over several rounds after a warm-up round.

    Each round runs one step of each program, so that other load on the machine affects all programs. The figures of the
    fused loss are medians of each round's ratio; the other figures are ratios of the least costs.
    """
    costs: dict[str, list[Cost]] = {name: [] for name in steps}
    theirs: dict[int, list[Cost]] = {threads: [] for threads in THREADS}
    for round_ in range(ROUNDS + 1):
        if round_ == 1:
            costs, theirs = {name: [] for name in steps}, {threads: [] for threads in THREADS}
        for name, step in steps.items():
            costs[name].append(cost_of(step))
        if torch is not None:
            for threads in THREADS:
                theirs[threads] += torch.costs(threads=threads, steps=1)
    found = {name: least(measured) for name, measured in costs.items()}
    rivals = {UNSHARDED: found[UNSHARDED], XLA: found[XLA]}
    if torch is not None:
        rivals["torch's loss_parallel"] = min(
            (least(measured) for measured in theirs.values()), key=lambda cost: cost.wall
        )
    bounds = {UNSHARDED: 1.05, XLA: 1.00, "torch's loss_parallel": 0.90}
    for name, rival in rivals.items():
        figures.add(f"step time / {name}, split", found[SPLIT].wall / rival.wall, bounds[name])
        figures.add(f"CPU work / {name}, split", found[SPLIT].cpu / rival.cpu)
    for name, bound in ((BACKWARD, None), (FORWARD, 1.10)):
        _add_medians(figures, name, costs[name], costs[UNSHARDED], bound)
    for name, measured in costs.items():
        spread = statistics.median(cost.wall for cost in measured) / found[name].wall
        figures.add(f"median / least step time, {name}", spread)


def _compare_large(figures: Figures) -> None:
    """Add the figures of the fused loss for many tokens and columns."""
    tokens, vocabulary = LARGE
    compiled, arguments = programs(tokens, vocabulary, (UNSHARDED, FORWARD))
    name = f"{FORWARD}, N={tokens}, V={vocabulary}"
    bytes_ = {of: temporary_bytes(program) for of, program in compiled.items()}
    figures.add(f"temporary bytes an IPU / unsharded, {name}", bytes_[FORWARD] / bytes_[UNSHARDED], 1 / 20)
    steps = {of: partial(program, *arguments[of]) for of, program in compiled.items()}
    difference = _difference(steps[FORWARD](), steps[UNSHARDED]())
    figures.add(f"gradients, {name}: largest relative difference", difference, 1e-5)
    rounds = [{of: cost_of(step) for of, step in steps.items()} for _ in range(LARGE_ROUNDS)]
    _add_medians(figures, name, *([costs[of] for costs in rounds] for of in (FORWARD, UNSHARDED)), bound=1.10)


def _add_medians(figures: Figures, name: str, ours: list[Cost], unsharded: list[Cost], bound: float | None) -> None:
    """Add the medians over the rounds of the ratios of a program's costs to the unsharded program's costs."""
    pairs = list(zip(ours, unsharded, strict=True))
    wall, cpu = (statistics.median(getattr(a, kind) / getattr(b, kind) for a, b in pairs) for kind in ("wall", "cpu"))
    figures.add(f"step time / {UNSHARDED}, median, {name}", wall, bound)
    figures.add(f"CPU work / {UNSHARDED}, median, {name}", cpu)


if __name__ == "__main__":
    sys.exit(main())
