"""Make the model that a training step runs, on all replicas in the chosen precision, and map programs over its IPUs.

Pipeline        -- replicate --> on a wider mesh -- computing_in --> its stages cast what they read
loss function   ------------->   Replicas        --------------->    of a function that casts what it reads
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ipu_jax.core.mesh_axes import over_ipus
from ipu_jax.core.options import TrainOptions
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.training.update._precision import cast_floats, computing_in, function_in
from ipu_jax.training.update.replicas import Replicas, over_replicas, replicate


def model_for(model: Any, options: TrainOptions) -> Any:
    """Return the model that a step runs: a `Pipeline` if one is given, else `Replicas`.

    Raises:
        ValueError: the options contradict the model's own options, or the model is neither of these nor callable.
    """
    half = None if options.precision == "32.32" else jnp.dtype(options.half)
    asked_for: dict[str, Any] = {
        name: value for name in ("gradient_accumulation", "reduction") if (value := getattr(options, name)) is not None
    }
    if isinstance(model, Pipeline | Replicas):
        for name, value in asked_for.items():
            own = model.given[name]
            if own is not None and value != own:
                raise ValueError(
                    f"TrainOptions({name}={value!r}), but the {type(model).__name__} was made with {name}={own!r}: "
                    "give it in one of the two places, or the same in both"
                )
    count = options.replication_factor
    if isinstance(model, Pipeline):
        if any(value != getattr(model.options, name) for name, value in asked_for.items()):
            model = model.replace(**asked_for)
        if count is not None and count != model.replicas:
            model = replicate(model, replication_factor=count)
        if half is None:
            return model
        if model.function is not None:
            held = half if options.precision == "16.16" else jnp.float32
            return model.replace(function=function_in(model.function, half, held))
        return model.replace(stages=[computing_in(stage, half) for stage in model.stages])
    if isinstance(model, Replicas):
        if count is not None and count != model.replicas:
            raise ValueError(
                f"TrainOptions(replication_factor={count}), but the Replicas are {model.replicas}: "
                "give it in one of the two places, or the same in both"
            )
        loss_fn, random, count, devices = model.loss_fn, model.random, model.replicas, model.given_devices
        asked_for = {**model.given, **asked_for}
    else:
        if not callable(model):
            raise ValueError(f"model={model!r} is neither a Pipeline, nor Replicas, nor callable: give a loss function")
        loss_fn, random, devices = model, False, None
    fn = loss_fn
    if half is not None:
        fn = lambda p, mb, **asked_for: loss_fn(cast_floats(p, half), cast_floats(mb, half), **asked_for)  # noqa: E731
    return Replicas(fn, replication_factor=count or 1, random=random, devices=devices, **asked_for)


def aux_of_loss(model: Pipeline | Replicas, aux: Any) -> Any:
    """Return the aux that came with the loss itself: the last stage's aux, if the aux is a dict by stage name."""
    if not isinstance(model, Pipeline):
        return aux
    last, names = model.stages[-1].name, {stage.name for stage in model.stages}
    return aux[last] if isinstance(aux, dict) and last in aux and aux.keys() <= names else aux


def on_ipus(model: Pipeline | Replicas, program: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Any:
    """Map a program over the IPUs of all replicas. The result is a function from global arrays to global arrays."""
    if isinstance(model, Pipeline):
        return over_ipus(program, model.mesh, in_specs=in_specs, out_specs=out_specs)
    return over_replicas(program, model.devices, in_specs=in_specs, out_specs=out_specs)


def described(model: Pipeline | Replicas) -> str:
    """Return a line about a model: its kind and its sizes."""
    kind = f"Pipeline of {len(model.stages)} stages" if isinstance(model, Pipeline) else "loss function"
    m, replicas = model.options.gradient_accumulation, model.replicas
    ipus = f"{model.ipus} IPU{'s' * (model.ipus > 1)}" + (f" x {replicas} replicas" if replicas > 1 else "")
    return f"{kind} on {ipus}, {m} micro-batch{'es' * (m > 1)} per update"
