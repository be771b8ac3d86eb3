"""Whole models with unusual dependencies between weights, state, key and layers. Each function returns an `Example`."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .example import D, Example, normal, rows, squared_error
from .library_models import initialized


def layers_of(rng: np.random.Generator, count: int) -> list[np.ndarray]:
    return [normal(rng, D, D) for _ in range(count)]


def tower(weights, x):
    for w in weights:
        x = x + jnp.tanh(x @ w)
    return x


def one_block_again_and_again() -> Example:
    """All layers share their weights, as in ALBERT, and each has a learned scale of its own."""
    rng = np.random.default_rng(21)
    params = {"block": normal(rng, D, D), "scales": normal(rng, 6), "temperature": np.float32(1.3)}

    def outputs(params, batch):
        x = batch["x"]
        for k in range(6):
            x = x + params["scales"][k] * jnp.tanh(x @ params["block"] / params["temperature"])
        return x

    def loss(params, batch):
        return squared_error(outputs(params, batch), batch["y"])

    return Example(loss, params, rows, outputs=outputs)


def scan_with_results_of_layers() -> Example:
    """A scan in reverse over stacked weights, whose results of all layers the loss and the aux read."""
    rng = np.random.default_rng(22)
    params = {"w": normal(rng, 5, D, D), "gate": normal(rng, 5, D), "mix": normal(rng, 5)}

    def outputs(params, batch):
        def layer(x, p):
            y = jnp.tanh(x @ p["w"].astype(jnp.float32)) * jax.nn.sigmoid(p["gate"])
            return x + y, (y, jnp.abs(y).max())

        x, (ys, largest) = lax.scan(layer, batch["x"], {k: params[k] for k in ("w", "gate")}, reverse=True, unroll=2)
        return x + jnp.einsum("l,lrd->rd", jax.nn.softmax(params["mix"]), ys), {"largest": largest}

    def loss(params, batch):
        y, aux = outputs(params, batch)
        return squared_error(y, batch["y"]), aux

    return Example(loss, params, rows, outputs=outputs)


def scan_with_a_key_per_layer() -> Example:
    """A scan over stacked weights, keys split for the layers, and numbers of the layers; weights are scaled."""
    rng = np.random.default_rng(23)
    params = {"w": normal(rng, 6, D, D), "b": np.zeros((6, D), np.float32)}

    def outputs(params, batch, key):
        stacked = jax.tree.map(lambda w: 0.9 * w, params)

        def layer(x, inputs):
            p, key, number = inputs
            keep = jax.random.bernoulli(key, 1 - number / 20, x.shape)
            return x + jnp.where(keep, jnp.tanh(x @ p["w"] + p["b"]), 0), None

        return lax.scan(layer, batch["x"], (stacked, jax.random.split(key, 6), jnp.arange(6)))[0]

    def loss(params, batch, key):
        return squared_error(outputs(params, batch, key), batch["y"])

    return Example(loss, params, rows, takes_key=True, outputs=outputs)


def state_read_everywhere() -> Example:
    """Every layer reads how many steps there were; the loss's average is kept."""
    rng = np.random.default_rng(27)
    state = {"steps": np.int32(2), "average": np.float32(1.0), "unchanged": np.ones(3, np.float32)}

    def outputs(params, state, batch):
        x, warm = batch["x"], jnp.minimum(state["steps"] / 5, 1.0)
        for w in params:
            x = x + warm * jnp.tanh(x @ w)
        return x, warm

    def loss(params, state, batch):
        x, warm = outputs(params, state, batch)
        value = squared_error(x, batch["y"])
        average = 0.9 * state["average"] + 0.1 * lax.stop_gradient(value)
        return value / average, {"warm": warm}, state | {"steps": state["steps"] + 1, "average": average}

    return Example(loss, layers_of(rng, 5), rows, state=state, outputs=outputs)


def learning_to_learn() -> Example:
    """An inner step of gradient descent moves all weights before the loss reads them (MAML)."""
    rng = np.random.default_rng(29)

    def fit(params, x, y):
        return squared_error(tower(params, x), y)

    def loss(params, batch):
        gradients = jax.grad(fit)(params, batch["x"], batch["y"])
        adapted = jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)
        return fit(adapted, batch["y"], batch["x"])

    return Example(loss, layers_of(rng, 4), rows, tolerance=5e-5)


def state_space() -> Example:
    """Linear recurrences with complex values, by an associative scan over time; a Fourier transform at the end."""
    rng = np.random.default_rng(30)
    layer = lambda: {
        "decay": normal(rng, D),
        "angle": normal(rng, D),
        "in": normal(rng, D, D),
        "out": normal(rng, 2 * D, D),
    }
    params = [layer() for _ in range(4)]

    def outputs(params, batch):
        x = batch["x"][None] * jnp.ones((2, 1, 1))
        for p in params:
            a = jnp.exp(-jnp.exp(p["decay"]) + 1j * p["angle"])
            elements = jnp.broadcast_to(a, x.shape), (x @ p["in"]).astype(jnp.complex64)
            join = lambda one, two: (one[0] * two[0], two[0] * one[1] + two[1])
            _, h = lax.associative_scan(join, elements, axis=1)
            x = x + jnp.concatenate([h.real, h.imag], -1) @ p["out"]
        return jnp.fft.rfft(x[0] - batch["y"], axis=-1)

    def loss(params, batch):
        return jnp.mean(jnp.abs(outputs(params, batch)) ** 2) / D

    return Example(loss, params, rows, outputs=outputs)


def bfloat16_weights() -> Example:
    """Some weights are bfloat16, and the aux is, too; a norm's scale is float32."""
    rng = np.random.default_rng(32)
    params = [{"w": jnp.asarray(w, jnp.bfloat16), "scale": np.ones(D, np.float32)} for w in layers_of(rng, 4)]

    def outputs(params, batch):
        x = batch["x"].astype(jnp.bfloat16)
        for p in params:
            x = x + (jnp.tanh(x @ p["w"]) * p["scale"]).astype(jnp.bfloat16)
        return x

    def loss(params, batch):
        x = outputs(params, batch)
        return squared_error(x.astype(jnp.float32), batch["y"]), {"x": x}

    return Example(loss, params, rows, tolerance=0.06, outputs=outputs)


def unusual_aux() -> Example:
    """The aux holds the loss itself, a weight, a leaf of the batch, a Python number and None."""
    rng = np.random.default_rng(33)

    def loss(params, batch):
        value = squared_error(tower(params, batch["x"]), batch["y"])
        return value, {
            "loss": value,
            "weight": params[1],
            "x": batch["x"],
            "number": 3,
            "none": None,
            "twice": (value, value),
        }

    return Example(loss, layers_of(rng, 4), rows)


class LowRank(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        for _ in range(3):
            x = x + nn.tanh(nn.SpectralNorm(nn.Dense(D), collection_name="spectral")(x, update_stats=train))
        return x


def linen_spectral_norm() -> Example:
    """The new state depends on weights and state, and on no activation."""
    model = LowRank()
    variables = initialized(model, rows(np.random.default_rng(0))["x"])

    def loss(params, spectral, batch):
        variables = {"params": params, "spectral": spectral}
        y, new = model.apply(variables, batch["x"], mutable=["spectral"])
        return squared_error(y, batch["y"]), new["spectral"]

    def in_evaluation(params, spectral, batch):
        return model.apply({"params": params, "spectral": spectral}, batch["x"], train=False)

    state = variables["spectral"]
    return Example(loss, variables["params"], rows, state=state, tolerance=5e-5, outputs=in_evaluation)


class NormedLayer(nn.Module):
    train: bool

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(D, use_bias=False)(x)
        y = nn.BatchNorm(use_running_average=not self.train, momentum=0.9)(y)
        return x + nn.Dropout(0.2, deterministic=not self.train)(nn.tanh(y)), None


class ScannedNorms(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        x = nn.Dense(D)(x)
        scanned = nn.scan(
            NormedLayer,
            variable_axes={"params": 0, "batch_stats": 0},
            split_rngs={"params": True, "dropout": True},
            length=3,
        )
        x, _ = scanned(train)(x, None)
        return nn.Dense(D)(nn.tanh(nn.Dense(D)(x)))


def linen_scan_with_state() -> Example:
    """The scan's layers have stacked state, and keys."""
    model = ScannedNorms()
    variables = initialized(model, rows(np.random.default_rng(0))["x"])

    def loss(params, stats, batch, key):
        variables = {"params": params, "batch_stats": stats}
        y, new = model.apply(variables, batch["x"], mutable=["batch_stats"], rngs={"dropout": key})
        return squared_error(y, batch["y"]), new["batch_stats"]

    def in_evaluation(params, stats, batch):
        return model.apply({"params": params, "batch_stats": stats}, batch["x"], train=False)

    stats = variables["batch_stats"]
    own = {"state": stats, "outputs": in_evaluation}
    return Example(loss, variables["params"], rows, takes_key=True, tolerance=5e-5, **own)


def equinox_scanned() -> Example:
    """Layers made by `filter_vmap`, run by a scan over their arrays with a checkpoint, for each row of the batch."""
    keys = jax.random.split(jax.random.key(5), 5)
    layers = eqx.filter_vmap(lambda key: eqx.nn.MLP(D, D, D, depth=1, key=key))(keys)
    params, static = eqx.partition(layers, eqx.is_inexact_array)

    def outputs(params, batch):
        def run(x):
            @jax.checkpoint
            def layer(x, arrays):
                return x + eqx.combine(arrays, static)(x), None

            return lax.scan(layer, x, params)[0]

        return jax.vmap(run)(batch["x"])

    def loss(params, batch):
        return squared_error(outputs(params, batch), batch["y"])

    return Example(loss, params, rows, outputs=outputs)


UNUSUAL_MODELS = (
    one_block_again_and_again, scan_with_results_of_layers, scan_with_a_key_per_layer, state_read_everywhere,
    learning_to_learn, state_space, bfloat16_weights, unusual_aux, linen_scan_with_state,
    linen_spectral_norm, equinox_scanned,
)  # fmt: skip
