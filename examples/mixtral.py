"""Train a Mixtral: the devices of an IPU have experts each, and exchange tokens by all-to-all. No token is dropped.

    IPU 0   device 0   sequences 0-3, experts 0-1   \\  layer 0
            device 1   sequences 4-7, experts 2-3   /           \\
    IPU 1   device 2   sequences 0-3, experts 0-1   \\            -> layer 1 -> loss
            device 3   sequences 4-7, experts 2-3   /

The router, its balance loss and attention are whole-array code, which XLA splits by sequences. The exchange is a
`jax.shard_map` over "expert", an axis of type Auto, in the function that `Pipeline.from_function` cuts. It learns to
count: python -m examples.mixtral

B sequences, T tokens, D features, E experts, K experts of a token, F hidden features, N devices of an IPU, R = B T K /
N rows that a device has, S = R N that it has room for (Jiang et al. 2024, arXiv:2401.04088).
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec

from examples.lora import LENGTH, VOCABULARY, B, M, norm, sequences, trained
from ipu_jax import configure

D, HEADS, E, K, F, LAYERS = 32, 2, 4, 2, 48, 2
SPLIT, WHOLE = PartitionSpec("expert"), PartitionSpec()  # sequences, or experts


def exchanged(x_BTD, chances_BTE, p):
    """Return what the experts of all devices make of a device's tokens, and the chosen experts (B, T, K).

    Communicates over "expert" three all-to-alls in F, of rows, numbers and results, and two in B. Shapes are static, so
    each block has room for all rows of a device. The products skip what is empty where XLA has a kernel for that.
    """
    experts, devices = len(p["up"]), lax.axis_size("expert")  # of a device, of an IPU
    exchange = lambda blocks: lax.all_to_all(blocks, "expert", 0, 0, tiled=True)
    best_BTK, chosen_BTK = lax.top_k(chances_BTE, K)
    rows_RD, chosen_R = jnp.repeat(x_BTD.reshape(-1, D), K, axis=0), chosen_BTK.reshape(-1)
    goes_NR = chosen_R // experts == jnp.arange(devices)[:, None]
    came_SD = exchange(jnp.where(goes_NR[..., None], rows_RD, 0)).reshape(-1, D)
    expert_S = exchange(jnp.where(goes_NR, chosen_R % experts, experts)).reshape(-1)  # no row: one beyond the last
    order_S, sizes = jnp.argsort(expert_S), jnp.bincount(expert_S, length=experts)
    product = lambda x, name: lax.ragged_dot(x, p[name], sizes)
    sorted_SD = came_SD[order_S]
    results_SD = product(jax.nn.silu(product(sorted_SD, "gate")) * product(sorted_SD, "up"), "down")
    back_NRD = exchange(results_SD[jnp.argsort(order_S)].reshape(devices, -1, D))
    back_RD = back_NRD[chosen_R // experts, jnp.arange(len(chosen_R))]
    gates_BTK = best_BTK / best_BTK.sum(-1, keepdims=True)
    return jnp.sum(back_RD.reshape(*gates_BTK.shape, D) * gates_BTK[..., None], axis=2), chosen_BTK


def mixture(p, x_BTD):
    """Return outputs, and the balance loss of Fedus et al. 2021 (arXiv:2101.03961) over all tokens."""
    over_devices = jax.shard_map(exchanged, axis_names={"expert"}, in_specs=(SPLIT,) * 3, out_specs=SPLIT)
    chances_BTE = jax.nn.softmax(x_BTD @ p["router"])
    y_BTD, chosen_BTK = over_devices(x_BTD, chances_BTE, p["experts"])
    return y_BTD, E * jax.nn.one_hot(chosen_BTK, E).mean((0, 1, 2)) @ chances_BTE.mean((0, 1))


def loss(params, batch):
    x_BTD, balance = params["table"][batch["tokens"]] + params["positions"], 0.0
    for p in params["layers"]:
        x_BTD = lax.with_sharding_constraint(x_BTD, SPLIT)
        q, k, v = jnp.split((norm(x_BTD) @ p["qkv"]).reshape(*x_BTD.shape[:2], 3 * HEADS, -1), 3, axis=2)
        x_BTD += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x_BTD.shape) @ p["out"]
        y_BTD, of_layer = mixture(p, norm(x_BTD))
        x_BTD, balance = x_BTD + y_BTD, balance + of_layer
    logits = norm(x_BTD)[:, :-1] @ params["table"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"][:, 1:]).mean() + 0.01 * balance


def make_weights() -> dict:
    random = np.random.default_rng(0)
    draw = lambda *shape: random.normal(scale=0.1, size=shape).astype(np.float32)
    experts = lambda: {"gate": draw(E, D, F), "up": draw(E, D, F), "down": draw(E, F, D)}
    one = lambda: {"qkv": draw(D, 3 * D), "out": draw(D, D), "router": draw(D, E), "experts": experts()}
    return {"table": draw(VOCABULARY, D), "positions": draw(LENGTH, D), "layers": [one() for _ in range(LAYERS)]}


def make_specs() -> dict:
    of_layer = {"qkv": WHOLE, "out": WHOLE, "router": WHOLE, "experts": SPLIT}
    return {"table": WHOLE, "positions": WHOLE, "layers": [of_layer] * LAYERS}


def exchanges(pipeline, params, op: str) -> None:
    """Print what the compiled stages send by a collective."""
    batch = {"tokens": sequences(1, 1)["tokens"][: M * B].reshape(M, B, LENGTH)}
    for one in pipeline.report(params, batch).collectives:
        if one.op == op:
            print(f"{one.stages[0]} {one.task}: {one.count} {op}s per micro-batch, {one.nbytes} B on a device")


def main() -> None:
    options = {"ipus": 2, "axes": {"expert": 2}, "specs": make_specs()}
    pipeline, state = trained(loss, make_weights(), sequences(0, 1), updates=20, **options)
    exchanges(pipeline, state.params, "all-to-all")


if __name__ == "__main__":
    configure(4)
    main()
