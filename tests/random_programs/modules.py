"""Test pipelines of random Flax and Equinox modules: loss, gradients and state, by calls of the modules themselves.

The modules run one after the other, a micro-batch at a time, written as in their own library's documentation. Other
tests compare stages with dense programs; these are about the way from a module to a stage and back: its weights and
state, its mode, its keys, its skips, and the values that it sows.
"""

import dataclasses
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ipu_jax import Pipeline, make_mesh
from ipu_jax.nn import equinox_stage, gather_stages, linen_stage, nnx_stage
from random_programs.closeness import assert_close, nudged
from random_programs.dice import Dice, normal
from random_programs.drawing import draw_schedule
from random_programs.pipelines import bubbles_of_nan

EPS = float(np.finfo(np.float32).eps)
ROWS = 5
MOMENTUM = 0.5


@dataclasses.dataclass(frozen=True)
class Spec:
    """A module: y = dropout(tanh(norm(x W + b + sum of skip V))). It may sow the mean square of y."""

    library: str
    place: int
    d_in: int
    d_out: int
    norm: bool = False
    rate: float = 0.0
    sows: float = 0.0  # the weight of the sown value in the loss; below 0 the value is sown and dropped
    sends: str = ""
    takes: tuple[str, ...] = ()
    skip_sizes: tuple[int, ...] = ()
    recompute: str = "auto"


class LinenModule(nn.Module):
    spec: Spec

    @nn.compact
    def __call__(self, x: Any, *skips: Any, train: bool) -> Any:
        spec = self.spec
        y = nn.Dense(spec.d_out, name="own")(x)
        for i, skip in enumerate(skips):
            y = y + nn.Dense(spec.d_out, use_bias=False, name=f"skip{i}")(skip)
        if spec.norm:
            y = nn.BatchNorm(use_running_average=not train, momentum=MOMENTUM)(y)
        y = nn.Dropout(spec.rate, deterministic=not train)(jnp.tanh(y))
        if spec.sows:
            self.sow("penalty", "square", jnp.mean(y**2))
        return (y, 0.5 * y) if spec.sends else y


class Penalty(nnx.Variable):
    """A value that an NNX module sows."""


class NnxModule(nnx.Module):
    def __init__(self, spec: Spec, rngs: nnx.Rngs):
        self.spec = spec
        self.own = nnx.Linear(spec.d_in, spec.d_out, rngs=rngs)
        self.skips = nnx.List([nnx.Linear(d, spec.d_out, use_bias=False, rngs=rngs) for d in spec.skip_sizes])
        if spec.norm:
            self.norm = nnx.BatchNorm(spec.d_out, momentum=MOMENTUM, rngs=rngs)
        if spec.rate:
            self.dropout = nnx.Dropout(spec.rate, rngs=rngs)

    def __call__(self, x: Any, *skips: Any) -> Any:
        y = self.own(x)
        for own, skip in zip(self.skips, skips, strict=True):
            y = y + own(skip)
        y = jnp.tanh(self.norm(y) if self.spec.norm else y)
        y = self.dropout(y) if self.spec.rate else y
        if self.spec.sows:
            self.sow(Penalty, "square", jnp.mean(y**2))
        return (y, 0.5 * y) if self.spec.sends else y


class EquinoxModule(eqx.Module):
    spec: Spec
    own: eqx.nn.Linear
    skips: list[eqx.nn.Linear]
    norm: eqx.nn.BatchNorm | None
    dropout: eqx.nn.Dropout

    def __init__(self, spec: Spec, key: Any):
        self.spec, keys = spec, jax.random.split(key, 1 + len(spec.skip_sizes))
        self.own = eqx.nn.Linear(spec.d_in, spec.d_out, key=keys[0])
        self.skips = [
            eqx.nn.Linear(d, spec.d_out, use_bias=False, key=k) for d, k in zip(spec.skip_sizes, keys[1:], strict=True)
        ]
        norm = lambda: eqx.nn.BatchNorm(spec.d_out, "batch", momentum=MOMENTUM, mode="batch")
        self.norm = norm() if spec.norm else None
        self.dropout = eqx.nn.Dropout(spec.rate)

    def __call__(self, x: Any, *skips: Any, key: Any = None) -> Any:
        of_norm: Any = skips[-1] if self.norm else None
        skips = skips[:-1] if self.norm else skips
        y = self.own(x)
        for own, skip in zip(self.skips, skips, strict=True):
            y = y + own(skip)
        if self.norm:
            y, of_norm = self.norm(y, of_norm)
        y = jnp.tanh(y)
        y = self.dropout(y, key=key) if self.spec.rate else y
        result = (y, 0.5 * y) if self.spec.sends else y
        return (result, of_norm) if self.norm else result


class Linen:
    """A linen module, as a stage and on its own."""

    def __init__(self, spec: Spec, seed: int):
        self.spec, self.module = spec, LinenModule(spec)
        sizes = (spec.d_in, *spec.skip_sizes)
        of_init = self.module.init(jax.random.key(seed), *(jnp.ones((ROWS, d)) for d in sizes), train=False)
        self.variables = {name: tree for name, tree in of_init.items() if name != "penalty"}

    def part(self, **options: Any) -> Any:
        sows = {"penalty": max(self.spec.sows, 0)} if self.spec.sows else None
        return linen_stage(self.module, self.variables, random=bool(self.spec.rate), losses=sows, **options)

    def call(self, params: Any, state: Any, args: tuple[Any, ...], key: Any) -> tuple[Any, Any, Any]:
        given, rngs = {"params": params, **(state or {})}, {"dropout": key} if self.spec.rate else None
        y, new = self.module.apply(given, *args, train=True, rngs=rngs, mutable=["batch_stats", "penalty"])
        added = new["penalty"]["square"][0] if self.spec.sows else 0.0
        return y, {"batch_stats": new["batch_stats"]} if state else None, added


class Nnx:
    """An NNX module, as a stage and on its own."""

    def __init__(self, spec: Spec, seed: int):
        self.spec, self.module = spec, NnxModule(spec, nnx.Rngs(seed))

    def part(self, **options: Any) -> Any:
        sows = {Penalty: max(self.spec.sows, 0)} if self.spec.sows else None
        return nnx_stage(self.module, losses=sows, **options)

    def call(self, params: Any, state: Any, args: tuple[Any, ...], key: Any) -> tuple[Any, Any, Any]:
        running = nnx.clone(self.module)
        running.train()
        nnx.update(running, params, *([] if state is None else [state]))
        if self.spec.rate:
            nnx.reseed(running, default=key)
        y = running(*args)
        sown = jax.tree.leaves(nnx.pop(running, Penalty)) if self.spec.sows else [0.0]
        return y, nnx.state(running, nnx.BatchStat) if state is not None else None, sown[0]


class Equinox:
    """An Equinox module, as a stage and on its own, an example at a time."""

    def __init__(self, spec: Spec, seed: int):
        self.spec = spec
        self.module, self.state = eqx.nn.make_with_state(EquinoxModule)(spec, jax.random.key(seed))

    def part(self, **options: Any) -> Any:
        state = self.state if self.spec.norm else None
        return equinox_stage(self.module, state=state, random=bool(self.spec.rate), **options)

    def call(self, params: Any, state: Any, args: tuple[Any, ...], key: Any) -> tuple[Any, Any, Any]:
        running, keys = eqx.combine(params, self.module), jax.random.split(key, ROWS)
        if state is None:
            return jax.vmap(lambda key, *args: running(*args, key=key))(keys, *args), None, 0.0
        state = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(state))  # a state can be read only once
        over_rows = jax.vmap(
            lambda key, state, *args: running(*args, state, key=key),
            axis_name="batch",
            in_axes=(0, None, *(0 for _ in args)),
            out_axes=(0, None),
        )
        return *over_rows(keys, state, *args), 0.0


LIBRARIES = {"linen": Linen, "nnx": Nnx, "equinox": Equinox}


class Case:
    """A case of one to five modules of any libraries on any IPUs."""

    def __init__(self, dice: Dice):
        self.ipus = dice.weighted({1: 1, 2: 3, 3: 2, 4: 1})
        self.replicas = dice.weighted({1: 2, 2: 1})
        self.micro_batches, self.seed = dice.between(1, 4), dice.number()
        self.reduction: Any = dice.one_of(("mean", "sum"))
        many = dice.between(1, 5)
        places = [dice.between(0, self.ipus - 1) for _ in range(many)]
        places = sorted(places) if dice.chance(0.6) else places
        specs: list[Spec] = []
        for i, place in enumerate(places):
            library = dice.one_of(list(LIBRARIES))
            spec = Spec(library, place, specs[-1].d_out if specs else dice.between(2, 6), dice.between(2, 6))
            spec = dataclasses.replace(spec, norm=dice.chance(0.4), rate=0.5 if dice.chance(0.4) else 0.0)
            spec = dataclasses.replace(spec, recompute=dice.one_of(("auto", "none", "all")))
            if library != "equinox" and dice.chance(0.4):
                spec = dataclasses.replace(spec, sows=dice.one_of((0.7, 1.5, -1.0)))
            senders = [other for other in specs if other.sends and dice.chance(0.7)]
            spec = dataclasses.replace(
                spec,
                takes=tuple(other.sends for other in senders),
                skip_sizes=tuple(other.d_out for other in senders),
                sends=f"skip{i}" if i < many - 1 and dice.chance(0.6) else "",
            )
            specs.append(spec)
        taken = {skip for spec in specs for skip in spec.takes}
        self.specs = [s if s.sends in taken else dataclasses.replace(s, sends="") for s in specs]
        self.schedule = draw_schedule(dice, tuple(places))
        if self.schedule == "own":
            self.schedule = "1f1b"

    def __str__(self) -> str:
        about = {name: value for name, value in vars(self).items() if name != "specs"}
        return "\n  ".join([str(about), *map(str, self.specs)])

    def check(self) -> None:
        """Compare loss, gradients and state with the modules run alone."""
        modules = [LIBRARIES[spec.library](spec, self.seed + i) for i, spec in enumerate(self.specs)]
        parts = []
        for i, (spec, module) in enumerate(zip(self.specs, modules, strict=True)):
            parts.append(
                module.part(
                    name=f"stage{i}",
                    ipu=spec.place,
                    inputs=None if i else "x",
                    loss=loss_of if i == len(modules) - 1 else None,
                    recompute=spec.recompute,
                    takes=spec.takes,
                    sends=(spec.sends,) if spec.sends else (),
                )
            )
        stages, params, state = gather_stages(parts)
        pipeline = Pipeline(
            stages,
            mesh=make_mesh(self.replicas, self.ipus),
            schedule=self.schedule,
            gradient_accumulation=self.micro_batches,
            reduction=self.reduction,
        )
        lead = (self.replicas, self.micro_batches, ROWS)
        batch: Any = {
            "x": normal(self.seed + 100, (*lead, self.specs[0].d_in), 1.0).astype(np.float32),
            "y": normal(self.seed + 101, lead, 1.0).astype(np.float32),
        }
        key = jax.random.key(self.seed) if any(spec.rate for spec in self.specs) else None
        given = batch if self.replicas > 1 else jax.tree.map(lambda leaf: leaf[0], batch)
        with bubbles_of_nan():
            loss, gradients, *new = pipeline.value_and_grad(
                pipeline.shard(params), given, None if state is None else pipeline.shard_state(state), key
            )
        own = Alone(self, modules)
        exact = own.run(params, state, batch, key)
        rounded = [own.run(nudged(jax.device_get(params), seed), state, batch, key) for seed in range(3)]
        results = (loss, pipeline.unshard(gradients), pipeline.unshard(new[0]) if new else None)
        for name, found, one, *others in zip(("loss", "gradients", "state"), results, exact, *rounded, strict=True):
            assert_close(name, found, one, others, EPS)


class Alone:
    """The modules one after the other on one device."""

    def __init__(self, case: Case, modules: list[Any]):
        self.case, self.modules = case, modules
        self._step = jax.jit(jax.value_and_grad(self._loss_of, has_aux=True))

    def run(self, params: Any, first_state: Any, batch: Any, key: Any) -> tuple[Any, Any, Any]:
        """Return the mean loss, the gradients and the state after one update."""
        case, losses, gradients, states = self.case, [], [], []
        key = jax.random.key(0) if key is None else key
        for replica in range(case.replicas):
            state = first_state or {}
            for m in range(case.micro_batches):
                of_micro_batch = jax.random.fold_in(jax.random.fold_in(key, replica), m)
                microbatch = jax.tree.map(lambda leaf, r=replica, m=m: leaf[r, m], batch)
                (loss, state), gradient = self._step(params, state, microbatch, of_micro_batch)
                losses.append(np.float64(loss))
                gradients.append(gradient)
            states.append(state)
        count = len(losses) if case.reduction == "mean" else 1
        mean = lambda *s: s[0] if jnp.issubdtype(s[0].dtype, jnp.integer) else sum(s) / len(s)
        new = jax.tree.map(mean, *states) if first_state else None
        return np.mean(losses), jax.tree.map(lambda *g: sum(g) / count, *gradients), new

    def _loss_of(self, params: Any, state: Any, microbatch: Any, key: Any) -> Any:
        x, sent, penalty, new = microbatch["x"], {}, 0.0, {}
        for i, (spec, module) in enumerate(zip(self.case.specs, self.modules, strict=True)):
            name = f"stage{i}"
            args = (x, *(sent[skip] for skip in spec.takes))
            x, moved, added = module.call(params[name], state.get(name), args, jax.random.fold_in(key, i))
            if spec.sends:
                x, sent[spec.sends] = x
            if moved is not None:
                new[name] = jax.lax.stop_gradient(moved)
            penalty = penalty + max(spec.sows, 0) * added
        return loss_of(x, microbatch) + penalty, new


def loss_of(y: Any, microbatch: Any) -> Any:
    return jnp.mean((y.sum(-1) - microbatch["y"]) ** 2)
