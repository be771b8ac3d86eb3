"""The exhibits of docs/museum.md: faults of other frameworks, each rebuilt in this engine by replacing one function.

Each fault was in a release or on a main branch of the framework whose thread is named. It went unseen, since the loss
was right, or fell as it should. An exhibit is a function that returns the fault, given the function that it replaces:

    @exhibit("deepspeedai/DeepSpeed#8152", replaces="ipu_jax.core.engine._tasks:Tasks.with_dx", ...)
    def divided_again_by_each_stage(original):
        return lambda self, c, dx, carry: original(self, c, [leaf / M for leaf in dx], carry)
"""

import dataclasses
import functools
import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from ipu_jax import Feed, Pipeline, make_mesh, make_train_step, stage_end, verify
from ipu_jax.base.jaxprs import in_scan_parts
from support import documents

PAGE = documents.ROOT / "docs/museum.md"
M, ROWS, D, V, EXPERTS, LAYERS = 5, 6, 4, 7, 3, 7


@dataclasses.dataclass(frozen=True)
class Exhibit:
    """A fault, and what finds it.

    Attributes:
        name: the name of the function `fault`.
        threads: where it was reported, as "owner/name#number".
        replaces: the function that is replaced, as "module:Class.function".
        fault: returns what takes the place of the original, which it is given.
        found_by: "verify"; the page's "recipe"; or the "Feed" of a training run that is resumed.
        model: makes what these look at.
        says: parts of the error's message, with the leaf or the number, joined by " ... ".
        loss: whether the first loss is "equal" to the right one and the next ones fall; whether it "falls" from another
            one; or whether only the "first" one is equal.
    """

    name: str
    threads: tuple[str, ...]
    replaces: str
    fault: Callable[[Any], Any]
    found_by: Literal["verify", "recipe", "Feed"]
    model: Callable[[], Any]
    says: str
    loss: Literal["equal", "falls", "first"]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put the fault in the place of the original."""
        module, _, path = self.replaces.partition(":")
        *owners, last = path.split(".")
        owner: Any = functools.reduce(getattr, owners, importlib.import_module(module))
        monkeypatch.setattr(owner, last, self.fault(getattr(owner, last)))

    def look(self, made: Any) -> None:
        """Look for the fault, by a public call on what `model` made. Raise an error if it is there."""
        if self.found_by == "verify":
            pipeline, weights, batch = made
            verify(pipeline, pipeline.shard(weights), batch)
        elif self.found_by == "recipe":
            exec(documents.blocks(PAGE, "python")[-1], made)
        else:
            made()

    def losses(self, made: Any) -> list[float]:
        """Return the losses of six updates of what `model` made; none for a `Feed`."""
        if self.found_by == "Feed":
            return []
        return _losses_of_pipeline(*made) if self.found_by == "verify" else _losses_of_step(**made)


EXHIBITS: list[Exhibit] = []


def exhibit(threads: str, *, found_by: Any = "verify", loss: Any = "equal", **rest: Any) -> Callable[[Any], Any]:
    """Add an exhibit of threads with spaces between. It has the name of the decorated function."""

    def add(fault: Callable[[Any], Any]) -> Callable[[Any], Any]:
        EXHIBITS.append(
            Exhibit(fault.__name__, tuple(threads.split()), fault=fault, found_by=found_by, loss=loss, **rest)
        )
        return fault

    return add


def _losses_of_pipeline(pipeline: Any, weights: Any, batch: Any) -> list[float]:
    """Return the losses of updates of length 0.1, along the gradients."""
    losses = []
    for _ in range(6):
        loss, gradients = pipeline.value_and_grad(pipeline.shard(weights), batch)
        whole = jax.device_get(pipeline.unshard(gradients))
        length = 10 * np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(whole)))
        weights = jax.tree.map(lambda w, g, length=length: w - g / length, weights, whole)
        losses.append(float(loss))
    return losses


def _losses_of_step(step: Any, weights: Any, batch: Any, **others: Any) -> list[float]:
    state, losses = step.init(weights), []
    for _ in range(6):
        state, outputs = step(state, batch)
        losses.append(float(outputs.loss))
    return losses


# the models: loss functions without a word of pipelines, cut into stages


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) / 2


def rows(*names: str) -> dict[str, np.ndarray]:
    return {name: 2 * normal(seed, M, ROWS, D) for seed, name in enumerate(names)}


def tokens() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    return {name: rng.integers(0, V, (M, ROWS), np.int32) for name in ("tokens", "targets")}


def matrices(*names: str) -> dict[str, np.ndarray]:
    return {name: normal(7 + seed, D, D) for seed, name in enumerate(names)}


def cut(loss: Any, weights: Any, batch: Any, ipus: int = 3, schedule: str = "1f1b", **options: Any) -> Any:
    one = jax.tree.map(lambda leaf: leaf[0], batch)
    options |= {"ipus": ipus, "schedule": schedule, "gradient_accumulation": M}
    return Pipeline.from_function(loss, weights, one, **options), weights, batch


def layers_loss(p: Any, mb: Any) -> Any:
    x = jnp.tanh(jnp.tanh(mb["x"] @ p["first"]) @ p["second"])
    return jnp.mean((x @ p["third"] - mb["y"]) ** 2)


def layers() -> Any:
    return cut(layers_loss, matrices("first", "second", "third"), rows("x", "y"))


def stepped(optimizer: Any) -> dict[str, Any]:
    """Return what the page's recipe names."""
    pipeline, weights, batch = layers()
    names = {"loss": layers_loss, "weights": weights, "batch": batch, "optimizer": optimizer}
    return {**names, "step": make_train_step(pipeline, optimizer), "jax": jax, "jnp": jnp, "np": np, "optax": optax}


def losses_of_tokens(p: Any, x: Any, table: Any, mb: Any) -> Any:
    logits = jnp.tanh(jnp.tanh(x @ p["first"]) @ p["second"]) @ table.T
    return optax.softmax_cross_entropy_with_integer_labels(logits, mb["targets"])


def vocabulary(of_all: Callable[[Any], Any] = jnp.mean) -> Any:
    """Return a model whose head all IPUs compute, with a vocabulary that their number does not divide."""

    def loss(p: Any, mb: Any) -> Any:
        return of_all(losses_of_tokens(p, p["table"][mb["tokens"]], p["head"], mb))

    weights = matrices("first", "second") | {"table": normal(1, V, D), "head": normal(2, V, D)}
    return cut(loss, weights, tokens(), ipus=2, head="concurrent")


def squared() -> Any:
    """Return the same model with a loss in which each token has another weight."""
    return vocabulary(lambda losses: jnp.mean(losses**2))


def tied() -> Any:
    def loss(p: Any, mb: Any) -> Any:
        return jnp.mean(losses_of_tokens(p, p["table"][mb["tokens"]], p["table"], mb))

    return cut(loss, matrices("first", "second") | {"table": normal(1, V, D)}, tokens(), ipus=2)


def routed() -> Any:
    """Return a mixture of experts whose router is on the IPU before."""

    def loss(p: Any, mb: Any) -> Any:
        x, gates = stage_end((jnp.tanh(mb["x"] @ p["first"]), jax.nn.softmax(mb["x"] @ p["router"])))
        return jnp.mean((jnp.einsum("ne,nd,edf->nf", gates, x, p["experts"]) - mb["y"]) ** 2)

    weights = matrices("first") | {"router": normal(1, D, EXPERTS), "experts": normal(2, EXPERTS, D, D)}
    return cut(loss, weights, rows("x", "y"), ipus=2)


def gated() -> Any:
    """Return a layer whose weights are split in two, between two others, with B and W apart."""

    def loss(p: Any, mb: Any) -> Any:
        one, two = (jnp.tanh(mb["x"] @ p["first"]) @ p[name] for name in ("gate", "value"))
        return jnp.mean((jnp.tanh(one) * two @ p["last"] - mb["y"]) ** 2)

    return cut(loss, matrices("first", "gate", "value", "last"), rows("x", "y"), schedule="zb-h1")


def repeated() -> Any:
    """Return a model whose first stage uses a matrix twice, with B and W apart."""

    def loss(p: Any, mb: Any) -> Any:
        x = stage_end(jnp.tanh(jnp.tanh(mb["x"] @ p["twice"]) @ p["twice"]))
        return jnp.mean((x @ p["last"] - mb["y"]) ** 2)

    return cut(loss, matrices("twice", "last"), rows("x", "y"), ipus=2, schedule="zb-h1")


def stacked() -> Any:
    def loss(p: Any, mb: Any) -> Any:
        x, _ = lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), mb["x"], p["layers"])
        return jnp.mean((x - mb["y"]) ** 2)

    return cut(loss, {"layers": normal(1, LAYERS, D, D)}, rows("x", "y"), ipus=2)


# the exhibits

TASKS = "ipu_jax.core.engine._tasks:Tasks"
PROGRAM = "ipu_jax.core.programs.segment_program:SegmentProgram"


@exhibit(
    "pytorch/torchtitan#2972 pytorch/torchtitan#4194",
    replaces="ipu_jax.core.engine.scan:run",
    model=layers,
    says="by 29 relative ... (3 of 3 gradients differ)",
)
def divided_by_the_tokens_too_late(original: Any) -> Any:
    return lambda *args, loss_cotangent, **how: original(*args, loss_cotangent=loss_cotangent * M * ROWS, **how)


@exhibit(
    "deepspeedai/DeepSpeed#8152 deepspeedai/DeepSpeed#8154",
    replaces=f"{TASKS}.with_dx",
    model=layers,
    says="the gradient of params['first'] ... by 0.96 relative ... (2 of 3 gradients differ)",
)
def divided_again_by_each_stage(original: Any) -> Any:
    return lambda self, c, dx, carry: original(self, c, [leaf / M for leaf in dx], carry)


@exhibit(
    "NVIDIA-NeMo/Automodel#3530",
    replaces=f"{TASKS}.with_sums",
    model=layers,
    says="the gradient of params['first'] ... (3 of 3 gradients differ)",
)
def only_the_last_micro_batch(original: Any) -> Any:
    def with_sums(self: Any, c: int, totals: Any, carry: Any) -> Any:
        before = [total.total for total in self.sums(c, carry)]
        return original(self, c, [new - old for new, old in zip(totals, before, strict=True)], carry)

    return with_sums


@exhibit(
    "pytorch/torchtitan#4054",
    replaces="ipu_jax.core.engine._tasks:lax",
    model=vocabulary,
    says="the gradient of params['first'] ... (3 of 4 gradients differ)",
)
def not_summed_below_a_concurrent_stage(original: Any) -> Any:
    return types.SimpleNamespace(**{**vars(original), "psum": lambda x, axis: x})


@exhibit(
    "NVIDIA-NeMo/Automodel#2995",
    replaces=f"{TASKS}.with_dx",
    model=routed,
    says="the gradient of params['router'] ... by 1 relative ... (1 of 3 gradients differ)",
)
def router_detached(original: Any) -> Any:
    cleared = lambda leaf: jnp.zeros_like(leaf) if leaf.shape[-1] == EXPERTS else leaf
    return lambda self, c, dx, carry: original(self, c, [cleared(leaf) for leaf in dx], carry)


@exhibit(
    "uw-syfi/piper#13 uw-syfi/piper#25",
    replaces="ipu_jax.core.engine.scan:lax",
    model=tied,
    says="the gradient of params['table'] ... (1 of 3 gradients differ)",
)
def ties_not_summed(original: Any) -> Any:
    return types.SimpleNamespace(**{**vars(original), "psum": lambda x, axis: x})


@exhibit(
    "marin-community/marin#8077 marin-community/marin#8081",
    replaces=f"{TASKS}.exchange",
    model=layers,
    says="the gradient of params['first'] ... by nan relative ... nan instead of",
    loss="first",
)
def first_backward_reads_too_early(original: Any) -> Any:
    def exchange(self: Any, kind: str, k: int, rows: Any, carry: Any) -> Any:
        carry = original(self, kind, k, rows, carry)
        is_first = rows["tick"] == np.flatnonzero(self.plan.exchanges["dx"].any(axis=1))[0]
        spoilt = jax.tree.map(lambda leaf: jnp.where(is_first, jnp.nan, leaf), carry.dx_received)
        return dataclasses.replace(carry, dx_received=spoilt)

    return exchange


@exhibit(
    "pytorch/pytorch#170277 pytorch/pytorch#175705",
    replaces=f"{PROGRAM}.backward_weight",
    model=gated,
    says="the gradient of params['gate'] ... (2 of 4 gradients differ)",
)
def gradients_of_two_outputs_added(original: Any) -> Any:
    def backward_weight(self: Any, params: Any, inputs: Any, stash: Any, residuals: Any, *rest: Any) -> Any:
        alike = [r for r in residuals if r.shape == residuals[0].shape]
        added = [sum(alike), *(jnp.zeros_like(r) for r in alike[1:])]
        others = [r for r in residuals if r.shape != residuals[0].shape]
        return original(self, params, inputs, stash, [*added, *others], *rest)

    return backward_weight


@exhibit(
    "pytorch/pytorch#180952",
    replaces="ipu_jax.core.programs.gradient_sums:_Walk.parts_of",
    model=repeated,
    says="the gradient of params['twice'] ... (1 of 2 gradients differ)",
)
def counted_twice_where_used_twice(original: Any) -> Any:
    def parts_of(self: Any, want: Any) -> Any:
        first, *others = original(self, want)
        return [first, *others, *[first] * bool(others)]

    return parts_of


@exhibit(
    "linkedin/Liger-Kernel#1298",
    replaces="sharded_ops.losses._token_losses:_dlogits",
    model=squared,
    says="the gradient of params['head'] ... (4 of 4 gradients differ)",
)
def scaled_as_the_first_token(original: Any) -> Any:
    def dlogits(logits: Any, tile: Any, row: Any, of_outputs: Any, *rest: Any) -> Any:
        of_loss, *others = of_outputs
        return original(logits, tile, row, (jnp.full_like(of_loss, of_loss[0]), *others), *rest)

    return dlogits


@exhibit(
    "NVIDIA/Megatron-LM#1754",
    replaces="sharded_ops.losses._statistics:_where_real",
    model=vocabulary,
    says="the loss differs ... loss 2.127 ... unsharded 1.995",
    loss="falls",
)
def padding_of_the_vocabulary_counted(original: Any) -> Any:
    return lambda x, first, terms, fill: x


@exhibit(
    "ml-explore/mlx-lm#1688 ml-explore/mlx-lm#1816",
    replaces="ipu_jax.core.cutting.trace:layers_of",
    model=stacked,
    says="the loss differs ... loss 3.56 ... unsharded 3.93",
    loss="falls",
)
def layer_in_the_middle_dropped(original: Any) -> Any:
    def layers_of(scan: Any) -> Any:
        *before, dropped, following = (layers := original(scan))[:5]
        _, values, _ = in_scan_parts(scan.params, dropped.invars)
        given = dict(zip(dropped.outvars, values, strict=False))
        following = dataclasses.replace(following, invars=[given.get(v, v) for v in following.invars])
        return [*before, following, *layers[5:]]

    return layers_of


@exhibit(
    "NVIDIA-NeMo/Automodel#3817 pytorch/torchtitan#596",
    replaces="ipu_jax.core.optimizer.update:combined",
    found_by="recipe",
    model=lambda: stepped(optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0))),
    says="update of params['first'] ... Mismatched elements: 16 / 16",
)
def clipped_by_the_norm_of_one_stage(original: Any) -> Any:
    def combined(blocks: Any, reduction: Any, v: Any, partials: Any) -> Any:
        own = jnp.arange(blocks.ipus) == lax.axis_index("ipu")
        return original(blocks, reduction, v, jax.vmap(jnp.where, (0, 1, None), 1)(own, partials, 0))

    return combined


@exhibit(
    "NVIDIA/Megatron-LM#5974 NVIDIA/Megatron-LM#5976",
    replaces="ipu_jax.core.optimizer.update:ShardedUpdate.first_state",
    found_by="recipe",
    model=lambda: stepped(optax.adam(0.05)),
    says="update of params['first'] ... -0.0372 ... -0.0499",
)
def adam_counts_an_update_before_the_first(original: Any) -> Any:
    def first_state(self: Any, trained: Any) -> Any:
        params = self.blocks.logical_tree(trained)
        return self.optimizer.update(jax.tree.map(jnp.zeros_like, params), original(self, trained), params)[1]

    return first_state


def dealt(examples: int, ranks: int) -> Iterator[int]:
    """Yield the numbers of examples as data-parallel ranks take turns to read one each: 0, 1, 2, ..."""
    return (turn + rank for turn in range(0, examples, ranks) for rank in range(ranks))


def resumed_on_fewer_ranks() -> None:
    """Read two batches with two ranks, and go on with one."""
    loader = lambda ranks: lambda epoch: ({"x": np.int32(number)} for number in dealt(32, ranks))
    how = {"items": "examples", "prefetch": 0}
    with Feed(loader(2), mesh=make_mesh(2, 1), micro_batch=2, **how) as feed:
        seen = [number for _ in range(2) for number in np.ravel(next(feed).data["x"])]
        state = feed.state()
    with Feed(loader(1), mesh=make_mesh(1, 1), micro_batch=4, state=state, **how) as feed:
        seen += [*np.ravel(next(feed).data["x"])]
    assert seen == [*range(12)]


@exhibit(
    "NVIDIA-NeMo/Megatron-Bridge#5637",
    replaces="museum.exhibits:dealt",
    found_by="Feed",
    model=lambda: resumed_on_fewer_ranks,
    says="the source gave other examples before the batch from example 8 of epoch 0",
)
def resumed_at_another_place_of_the_data(original: Any) -> Any:
    """Let each rank read a part of its own, so that the order depends on the number of ranks."""
    return lambda examples, ranks: (
        turn + rank * (examples // ranks) for turn in range(examples // ranks) for rank in range(ranks)
    )
