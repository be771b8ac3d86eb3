"""Compare a few updates of training steps, with random optax chains and options, with optax on one device in float64.

Models compute in float32, in bfloat16 on weights that stay float32, or in float64.

The losses that the calls return, the weights, the stages' state and the optimizer's own state are compared.
"""

import dataclasses
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ipu_jax import Checkpoints, TrainOptions, make_train_step
from ipu_jax.core.options import Precision
from ipu_jax.io import export_weights, import_weights
from ipu_jax.options import DynamicScale
from ipu_jax.steps import NonFiniteLossWarning
from random_programs import placed
from random_programs.closeness import (
    as_float64,
    assert_close,
    assert_same_bits,
    coarsest,
    nudged,
    of_all_processes,
)
from random_programs.dice import Dice
from random_programs.drawing import draw_model
from random_programs.model import Model
from random_programs.pipelines import bubbles_of_nan, pipeline_of
from random_programs.plain import Dense

# Adam divides by the root of a gradient's square; an epsilon of this size keeps rounding errors small.
EPSILON = 1e-2


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An optax chain as data."""

    core: str
    rate: float
    schedule: str = ""
    clip: float | None = None
    clip_value: float | None = None
    decay: float = 0.0
    masked: bool = False

    def build(self) -> optax.GradientTransformation:
        rate: Any = self.rate
        if self.schedule == "linear":
            rate = optax.linear_schedule(self.rate, self.rate / 4, 3)
        elif self.schedule == "exponential":
            rate = optax.exponential_decay(self.rate, 2, 0.5, staircase=True)
        elif self.schedule == "warm-up":
            rate = optax.warmup_cosine_decay_schedule(self.rate / 8, self.rate, 2, 5)
        mask: Any = (lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)) if self.masked else None
        cores: dict[str, Callable[[], optax.GradientTransformation]] = {
            "sgd": lambda: optax.sgd(rate),
            "momentum": lambda: optax.sgd(rate, momentum=0.9),
            "nesterov": lambda: optax.sgd(rate, momentum=0.9, nesterov=True),
            "adam": lambda: optax.adam(rate, eps=EPSILON),
            "adamw": lambda: optax.adamw(rate, eps=EPSILON, weight_decay=self.decay, mask=mask),
            "lamb": lambda: optax.lamb(rate, eps=EPSILON, weight_decay=self.decay, mask=mask),
            "rmsprop": lambda: optax.rmsprop(rate, eps=EPSILON, momentum=0.5),
        }
        parts = [cores[self.core]()]
        if self.decay and self.core not in ("adamw", "lamb"):
            parts.insert(0, optax.add_decayed_weights(self.decay, mask))
        if self.clip_value is not None:
            parts.insert(0, optax.clip(self.clip_value))
        if self.clip is not None:
            parts.insert(0, optax.clip_by_global_norm(self.clip))
        return optax.chain(*parts) if len(parts) > 1 else parts[0]


class Case:
    """A case of a model, a chain and options, with `calls` calls of the step."""

    def __init__(self, dice: Dice):
        self.is_function = dice.chance(0.25)
        self.model = draw_model(dice, simple=True, one_ipu=self.is_function)
        if self.is_function:
            self.model = dataclasses.replace(self.model, replicas=dice.one_of((1, 2, 4)))
        if self.model.schedule == "own" or all(jax.tree.leaves(self.model.by_leaf(lambda leaf: leaf.frozen))):
            self.model = dataclasses.replace(self.model, schedule="grouped", groups=_thawed(self.model))
        if dice.chance(0.25):
            *others, last = self.model.pieces
            pieces = (*others, dataclasses.replace(last, aux=False))  # its aux is the count
            self.model = dataclasses.replace(self.model, weighted=True, pieces=pieces)
        self.recipe = draw_recipe(dice)
        self.options = draw_options(dice, self.model, self.is_function)
        if self.options.precision == "32.32":
            computes = dice.weighted({"float32": 2, "bfloat16": 1, "float64": 1})
            self.model = _computing_in(self.model, computes)
        self.calls = dice.between(1, 2)
        # how the state is kept: as a file of weights or as a checkpoint, read on more IPUs if there are more
        self.keeps = dice.weighted({"": 2, "safetensors": 1, "npz": 1, "checkpoint": 2})
        self._dense: dict[tuple[bool, bool], Dense] = {}
        self.bad = None
        if isinstance(self.options.loss_scale, DynamicScale) or self.options.on_nonfinite:
            self.bad = dice.between(0, 3)

    def __str__(self) -> str:
        what = "a plain function" if self.is_function else "a pipeline"
        drawn = f"calls: {self.calls}, bad update: {self.bad}, keeps: {self.keeps}"
        return f"{what}: {self.model}\n  {self.recipe}\n  {self.options}\n  {drawn}"

    @property
    def updates(self) -> int:
        return self.calls * self.options.device_iterations

    @property
    def is_wide(self) -> bool:
        """Return whether the model computes in float64."""
        return "float64" in self.model.dtypes

    def batches(self) -> list[dict[str, np.ndarray]]:
        """Return a batch for each update, leaves (replicas, M, ...); one may have infinity in a row of one replica."""
        found = [self.model.batch(u) for u in range(self.updates)]
        if self.bad is not None and self.bad < len(found):
            found[self.bad]["x"][-1, -1, 0, 0] = np.inf
            found[self.bad]["y"][-1, -1, 0, 0] = np.inf
        return as_float64(found) if self.is_wide else found

    def _stages(self) -> Any:
        state = self.model.state()
        return (as_float64(state) if self.is_wide else state) or None

    def check(self) -> None:
        exact = self._trained(exact=True)
        half = [self.options.half] if self.options.precision != "32.32" else []
        rounded = [self._trained(exact=self.is_wide, nudge=nudge) for nudge in ((1, 2) if self.is_wide else (0, 1))]
        if not {*self.model.dtypes, *half} <= {"float32", "float64"}:
            rounded.append(self._trained(exact=False, fused=False))
        whole, losses, updated, norms = self._found()
        eps = float(np.finfo(np.float64).eps) if self.is_wide else coarsest([*self.model.dtypes, *half])
        want = [_told(run["losses"], self.options) for run in (exact, *rounded)]
        assert np.array_equal(np.isfinite(losses), np.isfinite(want[0])), f"losses {losses}, and should be {want[0]}"
        finite = np.isfinite(want[0])
        assert_close("losses", losses[finite], want[0][finite], [told[finite] for told in want[1:]], eps)
        averaged = ("ema",) if self.options.ema_decay else ()
        for what in ("params", "optimizer", "stages", *averaged):
            assert_close(what, whole[what], exact[what], [run[what] for run in rounded], eps)
        if norms is not None:
            of_runs = [_told(run["norms"], self.options) for run in (exact, *rounded)]
            fine = np.isfinite(of_runs[0])
            assert_close("norms", norms[fine], of_runs[0][fine], [each[fine] for each in of_runs[1:]], eps)
        if updated is not None:
            wanted = _told(exact["updated"], self.options)
            assert np.array_equal(updated, wanted), f"updated {updated}, and should be {wanted}"

    def _found(self) -> tuple[dict[str, Any], np.ndarray, Any, Any]:
        jax.config.update("jax_enable_x64", self.is_wide)  # not the context, which other threads don't see
        try:
            return self._found_in()
        finally:
            jax.config.update("jax_enable_x64", False)

    def _found_in(self) -> tuple[dict[str, Any], np.ndarray, Any, Any]:
        """Return the results of the training step: whole state, losses, which updates were made, and norms."""
        model, options = self.model, self.options
        step = make_train_step(self._model(), self.recipe.build(), options)
        key = jax.random.key(model.seed) if step.random or options.stochastic_rounding else None
        weights: Any = model.weights()
        state = step.init(weights, stages=self._stages(), key=key)
        batches, told = self.batches(), []
        with bubbles_of_nan():
            for call in range(self.calls):
                mine = batches[call * options.device_iterations :][: options.device_iterations]
                stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *mine)
                stacked = jax.tree.map(lambda leaf: leaf[:, 0], stacked) if model.replicas == 1 else stacked
                stacked = jax.tree.map(lambda leaf: leaf[0], stacked) if options.device_iterations == 1 else stacked
                state, outputs = step(state, stacked)
                told.append(jax.device_get(jax.tree.map(of_all_processes, outputs)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteLossWarning)
            step.check(state)
        whole = step.whole(state)
        if jax.process_count() == 1:  # several instances would need a common folder
            self._check_kept(step, state, whole)
        found = {
            "ema": None if whole["ema"] is None else self._trained_leaves(whole["ema"]),
            "params": whole["params"],
            "optimizer": _floats(whole["optimizer"]),
            "stages": whole["stages"] or {},
        }
        flat = lambda of: np.concatenate([np.atleast_1d(of(outputs)) for outputs in told])
        losses = flat(lambda o: o.loss)
        norms = flat(lambda o: o.parameter_norm) if options.norms else None
        return found, losses, None if told[0].updated is None else flat(lambda o: o.updated), norms

    def _trained_leaves(self, tree: Any) -> Any:
        frozen = self.model.by_leaf(lambda leaf: leaf.frozen)
        return jax.tree.map(lambda still, leaf: optax.MaskedNode() if still else leaf, frozen, tree)

    def _check_kept(self, step: Any, state: Any, whole: Any) -> None:
        """Raise `AssertionError` unless a file or a checkpoint returns the same bits, if possible on one more IPU."""
        more = dataclasses.replace(self.model, ipus=self.model.ipus + 1)
        fits = not self.is_function and more.replicas * more.ipus <= 8
        other = make_train_step(pipeline_of(more, "grouped"), self.recipe.build(), self.options) if fits else step
        with tempfile.TemporaryDirectory() as folder:
            if self.keeps in ("safetensors", "npz"):
                path = f"{folder}/weights.{self.keeps}"
                export_weights(path, state)
                read = import_weights(path, other.model.shard_shapes(whole["params"]))
                assert_same_bits(other.model.unshard(read), whole["params"])
            elif self.keeps:
                with Checkpoints(folder, step) as checkpoints:
                    checkpoints.save(state, now=True)
                key = jax.random.key(0) if other.random or self.options.stochastic_rounding else None
                first = other.init(self.model.weights(), stages=self._stages(), key=key)
                with Checkpoints(folder, other) as checkpoints:
                    found = checkpoints.restore(first)
                assert found is not None
                assert_same_bits(other.whole(found.state), whole)

    def _model(self) -> Any:
        if not self.is_function:
            return pipeline_of(self.model, self.model.schedule)
        stages = placed.stages_of(self.model)

        def loss(params: Any, mb: Any) -> Any:
            x = None
            for stage in stages:
                x = stage.fn(params.get(stage.params), x, mb)
            return x

        return loss

    def _trained(self, *, exact: bool, nudge: int = 0, fused: bool = True) -> dict[str, Any]:
        """Return the results of plain optax on one device."""
        with jax.enable_x64(exact):
            return self._trained_in(exact, nudge, fused)

    def _trained_in(self, exact: bool, nudge: int, fused: bool) -> dict[str, Any]:
        model, options, recipe = self.model, self.options, self.recipe.build()
        dense = self._dense.setdefault((exact, fused), Dense(model, exact=exact, fused=fused))
        to_half = lambda tree: _cast(tree, options.half)
        weights = nudged(model.weights(), nudge) if nudge else model.weights()
        weights = to_half(weights) if options.precision == "16.16" else weights
        weights = as_float64(weights) if exact else weights
        # optax does not get frozen leaves
        masked = lambda tree: jax.tree.unflatten(
            jax.tree.structure(tree),
            [optax.MaskedNode() if f else leaf for f, leaf in zip(dense.frozen, jax.tree.leaves(tree), strict=True)],
        )
        optimizer, stages = recipe.init(masked(weights)), model.state()
        wide = lambda tree: jax.tree.map(lambda w: np.asarray(w, np.float64 if exact else np.float32), masked(tree))
        average, norms = wide(weights), []
        key = jax.random.key(model.seed) if model.random else None
        update = jax.jit(recipe.update)
        losses, updated = [], []
        for u, batch in enumerate(self.batches()):
            of_update = None if key is None else jax.random.fold_in(key, u)
            given, read = weights, batch
            if options.precision != "32.32":
                given, read = to_half(weights), to_half(batch)
            loss, gradients, _, new_stages = dense.run(given, read, stages, of_update)
            losses.append(loss)
            norms.append(np.sqrt(sum(np.sum(np.square(w)) for w in jax.tree.leaves(wide(weights)))))
            gradients = masked(jax.tree.map(lambda g, w: g.astype(w.dtype), gradients, weights))
            finite = all(np.isfinite(np.asarray(g, np.float64)).all() for g in jax.tree.leaves(gradients))
            updated.append(int(finite))
            if (isinstance(options.loss_scale, DynamicScale) or options.on_nonfinite) and not finite:
                continue
            if options.max_gradient_norm is not None:
                clip = optax.clip_by_global_norm(options.max_gradient_norm)
                gradients = clip.update(gradients, clip.init(gradients))[0]
            updates, optimizer = update(gradients, optimizer, masked(weights))
            new = iter(jax.tree.leaves(optax.apply_updates(masked(weights), updates)))
            leaves = [w if f else next(new) for f, w in zip(dense.frozen, jax.tree.leaves(weights), strict=True)]
            weights, stages = jax.tree.unflatten(jax.tree.structure(weights), leaves), new_stages
            weights = jax.device_get(weights)
            if options.precision == "16.16":
                weights = to_half(weights)
                weights = as_float64(weights) if exact else weights
            if options.ema_decay:
                step = 1 - options.ema_decay
                average = jax.tree.map(lambda e, w, step=step: e + step * (w - e), average, wide(weights))
        return {
            "ema": average,
            "norms": norms,
            "params": weights,
            "optimizer": _floats(optimizer),
            "stages": stages,
            "losses": losses,
            "updated": updated,
        }


def draw_recipe(dice: Dice) -> Recipe:
    core = dice.one_of(("sgd", "momentum", "nesterov", "adam", "adamw", "lamb", "rmsprop"))
    return Recipe(
        core,
        rate=dice.one_of((0.05, 0.2)),
        schedule=dice.weighted({"": 2, "linear": 1, "exponential": 1, "warm-up": 1}),
        clip=dice.weighted({None: 2, 0.3: 1, 100.0: 0.5}),
        clip_value=dice.weighted({None: 4, 0.05: 1}),
        decay=dice.weighted({0.0: 1, 0.1: 1}),
        masked=dice.chance(0.5),
    )


def draw_options(dice: Dice, model: Model, is_function: bool) -> TrainOptions:
    iterations = dice.weighted({1: 1, 2: 2, 3: 1, 4: 2})
    every = [k for k in (1, 2, 3, 4) if iterations % k == 0]
    precisions: dict[Precision, float] = {"32.32": 4, "16.32": 1, "16.16": 1}
    precision = dice.weighted(precisions)
    dynamic = DynamicScale(initial=2.0**4, growth_interval=dice.between(1, 3))
    return TrainOptions(
        replication_factor=model.replicas if is_function else None,
        gradient_accumulation=model.micro_batches if is_function else None,
        reduction=model.reduction if is_function else None,
        weighted=model.weighted,
        device_iterations=iterations,
        outputs=dice.weighted({"final": 1, "all": 1, "sum": 1, dice.one_of(every): 1}),
        max_gradient_norm=dice.weighted({None: 3, 0.5: 1}),
        loss_scale=dice.weighted({1.0: 3, 64.0: 1, dynamic: 1}),
        precision=precision,
        half=dice.one_of(("bfloat16", "float16")) if precision != "32.32" else "bfloat16",
        stochastic_rounding=precision == "16.16" and dice.chance(0.4),
        shard_optimizer=dice.chance(0.4),
        donate=dice.chance(0.8),
        norms=dice.chance(0.3),
        ema_decay=dice.weighted({None: 2, 0.75: 1}),
        on_nonfinite=dice.weighted({None: 2, "skip": 1}),
    )


def _thawed(model: Model) -> Any:
    thaw = lambda leaf: dataclasses.replace(leaf, frozen=leaf.dtype == "int32")
    return tuple((name, tuple((path, thaw(leaf)) for path, leaf in leaves)) for name, leaves in model.groups)


def _computing_in(model: Model, dtype: str) -> Model:
    """Return a model whose blocks compute in `dtype`; weights are float32, or float64 if it is."""
    block = lambda b: dataclasses.replace(b, dtype=dtype)
    pieces = tuple(dataclasses.replace(piece, blocks=tuple(map(block, piece.blocks))) for piece in model.pieces)
    if dtype != "float64":
        return dataclasses.replace(model, pieces=pieces)
    widened = lambda leaf: dataclasses.replace(leaf, dtype=dtype)
    groups = tuple((name, tuple((path, widened(leaf)) for path, leaf in leaves)) for name, leaves in model.groups)
    return dataclasses.replace(model, pieces=pieces, groups=groups)


def _told(values: list[Any], options: TrainOptions) -> np.ndarray:
    """Return the values that the calls should return, from the values of each update."""
    grouped = np.asarray(values).reshape(-1, options.device_iterations)
    if options.outputs == "sum":
        return grouped.sum(1)
    return grouped[:, options.every - 1 :: options.every].reshape(-1)


def _cast(tree: Any, dtype: str) -> Any:
    """Return the tree with floats rounded to `dtype`."""
    floating = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.tree.map(lambda leaf: np.asarray(leaf).astype(dtype) if floating(leaf) else leaf, tree)


def _floats(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
