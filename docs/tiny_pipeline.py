"""1F1B as one `lax.scan` inside one `jax.shard_map`: pipeline parallelism for reading, with jax and numpy alone.

Four stages on four devices, and six micro-batches. F2 and B2 are the forward and the backward of micro-batch 2:

    tick      0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17
    device 0  F0      F1      F2      F3  B0  F4  B1  F5  B2      B3      B4      B5
    device 1      F0      F1      F2  B0  F3  B1  F4  B2  F5  B3      B4      B5
    device 2          F0      F1  B0  F2  B1  F3  B2  F4  B3  F5  B4      B5
    device 3              F0  B0  F1  B1  F2  B2  F3  B3  F4  B4  F5  B5

Of S stages, stage s does F of micro-batch m in tick s + 2m, and B of it in tick 2S - 1 - s + 2m. All else follows:

- F moves one device to the right per tick, and B one to the left. A device sends its y or dx at the end of a tick, and
  its neighbour reads it in the next. No message waits.
- On one device, ticks of F and ticks of B differ by an odd number. So a device has at most one task per tick.
- On the first device, B of micro-batch m comes one tick before F of m + S; on the others, even earlier. So each keeps
  the inputs of at most S micro-batches, however large M is. It keeps nothing else, since B computes the forward again.
- A step takes 2(M + S - 1) ticks, and each device works in 2M of them. The rest, (S - 1) / (M + S - 1), is the bubble.

Each device does its tasks in the order of 1F1B (Narayanan et al. 2021, arXiv:2104.04473, section 2.2).

The usual pipeline in JAX is a loop of F and `ppermute`, and `jax.grad` differentiates the whole loop (`autodiff_loss`).
That does all F before all B, and keeps values of every tick. Here `jax.vjp` stands inside the tick. Temporary memory of
a device, as `python docs/tiny_pipeline.py` prints it (jax 0.10.2 on a CPU, November 2026):

                               M=8       M=64
    this file                  0.32 MB   0.32 MB
    jax.grad of the loop       2.64 MB   16.56 MB

Dims in names: S stages, M micro-batches, N examples in one, D and H features, V classes, R slots of a ring, T ticks.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import AxisType

IDLE, FORWARD, BACKWARD = range(3)
# Each block has its weights on its own device. The head is on all devices, to keep this short; only the last uses it.
SPECS = {"up_SDH": P("stage"), "down_SHD": P("stage"), "head_DV": P()}


def task(tick, stage, stages, micro_batches):
    """Return what a stage does in a tick: the kind, and the micro-batch. Ints and traced values will do."""
    twice_f, twice_b = tick - stage, tick - (2 * stages - 1 - stage)  # 2m, if F or B of a micro-batch m is due
    is_forward = (twice_f % 2 == 0) & (twice_f >= 0) & (twice_f < 2 * micro_batches)
    is_backward = (twice_b % 2 == 0) & (twice_b >= 0) & (twice_b < 2 * micro_batches)
    return FORWARD * is_forward + BACKWARD * is_backward, (is_forward * twice_f + is_backward * twice_b) // 2


def block(up_DH, down_HD, x_ND):
    """The work of one stage: a residual MLP."""
    return x_ND + jax.nn.gelu(x_ND @ up_DH) @ down_HD


def cross_entropy(head_DV, y_ND, labels_N):
    logits_NV = (y_ND @ head_DV).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits_NV), labels_N[:, None], axis=1))


class State(NamedTuple):
    """What a device keeps from tick to tick."""

    inputs_RND: jax.Array  # a ring of R slots: from its F to its B, the input of micro-batch m is in slot m % R
    right_ND: jax.Array  # moves to the right: F reads x from it, and puts y into it
    left_ND: jax.Array  # moves to the left: B reads dy from it, and puts dx into it
    gradients: dict  # sums, in float32 whatever the dtype of the weights
    loss: jax.Array


def value_and_grad(params, batch, mesh):
    """Return the mean loss of all micro-batches and its gradients, like `jax.value_and_grad(unsharded_loss)`.

    Args:
        params: "up_SDH", "down_SHD" and "head_DV".
        batch: "x_MND" and "labels_MN". All devices get all of it; the first reads x, and the last reads labels.
        mesh: one axis, "stage", with S devices.
    """
    step = jax.shard_map(partial(_on_device, mesh.size), mesh=mesh, in_specs=(SPECS, P()), out_specs=(P(), SPECS))
    return step(params, batch)


def _on_device(stages, params, batch):
    s, micro_batches = lax.axis_index("stage"), len(batch["x_MND"])
    varying = partial(lax.pcast, axis_name="stage", to="varying")
    # The gradient of a value that all devices share is a sum over devices. `jax.vjp` would sum in every B, and a device
    # in B would wait for ever for devices in F. So each device gets a head of its own, and the sum is at the end.
    params, batch = params | {"head_DV": varying(params["head_DV"])}, varying(batch)

    def own_block(params, x_ND):
        return block(params["up_SDH"][0], params["down_SHD"][0], x_ND)

    def block_and_loss(params, x_ND, labels_N):
        y_ND = own_block(params, x_ND)
        return y_ND, lax.cond(s == stages - 1, cross_entropy, no_loss, params["head_DV"], y_ND, labels_N)

    def no_loss(head_DV, y_ND, labels_N):
        return varying(jnp.float32(0))

    def forward(state: State, m):
        x_ND = jnp.where(s == 0, batch["x_MND"][m], state.right_ND)
        return state._replace(inputs_RND=state.inputs_RND.at[m % slots].set(x_ND), right_ND=own_block(params, x_ND))

    def backward(state: State, m):
        function = partial(block_and_loss, labels_N=batch["labels_MN"][m])
        (_, loss), pull_back = jax.vjp(function, params, state.inputs_RND[m % slots])
        # One call serves all devices. The last has a loss, and its dy is zero, since ppermute gives zeros to a device
        # that nobody sends to. The others have a dy, and a loss that is constant.
        gradients, dx_ND = pull_back((state.left_ND, varying(jnp.float32(1 / micro_batches))))
        sums = jax.tree.map(lambda total, new: total + new.astype(jnp.float32), state.gradients, gradients)
        return state._replace(left_ND=dx_ND, gradients=sums, loss=state.loss + loss / micro_batches)

    def run_tick(state: State, tick):
        kind, m = task(tick, s, stages, micro_batches)
        state = lax.switch(kind, (lambda state, m: state, forward, backward), state, m)  # idle: as it was
        # Outside of the branches, since all devices must take part. A device that did no F sends an old value; its
        # neighbour does no F in the next tick, and so does not read it.
        right_ND = lax.ppermute(state.right_ND, "stage", [(i, i + 1) for i in range(stages - 1)])
        left_ND = lax.ppermute(state.left_ND, "stage", [(i + 1, i) for i in range(stages - 1)])
        return state._replace(right_ND=right_ND, left_ND=left_ND), None

    slots = min(stages, micro_batches)
    x_ND = jnp.zeros_like(batch["x_MND"][0])
    sums = jax.tree.map(lambda weight: jnp.zeros_like(weight, jnp.float32), params)
    state = State(jnp.stack([x_ND] * slots), x_ND, x_ND, sums, varying(jnp.float32(0)))
    state, _ = lax.scan(run_tick, state, jnp.arange(2 * (micro_batches + stages - 1)))
    loss, head_DV = lax.psum((state.loss, state.gradients["head_DV"]), "stage")
    return loss, state.gradients | {"head_DV": head_DV}


def unsharded_loss(params, batch):
    """The same model on one device, without a pipeline."""
    x_MND = batch["x_MND"]
    for up_DH, down_HD in zip(params["up_SDH"], params["down_SHD"], strict=True):
        x_MND = block(up_DH, down_HD, x_MND)
    return jnp.mean(jax.vmap(partial(cross_entropy, params["head_DV"]))(x_MND, batch["labels_MN"]))


def autodiff_loss(params, batch, mesh):
    """The usual pipeline, to compare with: a loop of F, for `jax.grad` to differentiate."""
    stages, micro_batches = mesh.size, len(batch["x_MND"])

    def on_device(params, batch):
        s = lax.axis_index("stage")

        def run_tick(x_ND, tick):
            x_ND = jnp.where(s == 0, batch["x_MND"][jnp.minimum(tick, micro_batches - 1)], x_ND)
            y_ND = block(params["up_SDH"][0], params["down_SHD"][0], x_ND)
            return lax.ppermute(y_ND, "stage", [(i, i + 1) for i in range(stages - 1)]), y_ND

        x_ND = lax.pcast(jnp.zeros_like(batch["x_MND"][0]), "stage", to="varying")
        _, y_TND = lax.scan(run_tick, x_ND, jnp.arange(micro_batches + stages - 1))
        losses_M = jax.vmap(partial(cross_entropy, params["head_DV"]))(y_TND[stages - 1 :], batch["labels_MN"])
        return lax.psum(jnp.where(s == stages - 1, jnp.mean(losses_M), 0), "stage")

    return jax.shard_map(on_device, mesh=mesh, in_specs=(SPECS, P()), out_specs=P())(params, batch)


def example(stages, micro_batches, N=32, D=64, H=256, V=50):
    """Return random weights, a random batch, and a mesh."""
    rng = np.random.default_rng(0)
    shapes = {"up_SDH": (stages, D, H), "down_SHD": (stages, H, D), "head_DV": (D, V)}
    params = {name: rng.normal(0, shape[-2] ** -0.5, shape).astype(np.float32) for name, shape in shapes.items()}
    x_MND = rng.normal(size=(micro_batches, N, D)).astype(np.float32)
    labels_MN = rng.integers(V, size=(micro_batches, N), dtype=np.int32)
    mesh = jax.make_mesh((stages,), ("stage",), (AxisType.Auto,), devices=jax.devices()[:stages])
    return params, {"x_MND": x_MND, "labels_MN": labels_MN}, mesh


def temporary_bytes(function, stages, micro_batches):
    """Return the bytes per device that the compiled function needs beside its arguments and results."""
    *arguments, mesh = example(stages, micro_batches)
    analysis = jax.jit(partial(function, mesh=mesh)).lower(*arguments).compile().memory_analysis()
    assert analysis is not None, "XLA does not report memory on this platform"
    return analysis.temp_size_in_bytes


def main(stages=4, micro_batches=6):
    for s in range(stages):
        tasks = [task(tick, s, stages, micro_batches) for tick in range(2 * (micro_batches + stages - 1))]
        print(f"device {s} ", *((f"{' FB'[kind]}{m}" if kind else "").ljust(3) for kind, m in tasks))

    params, batch, mesh = example(stages, micro_batches)
    result = jax.jit(partial(value_and_grad, mesh=mesh))(params, batch)
    expected = jax.jit(jax.value_and_grad(unsharded_loss))(params, batch)
    differences = jax.tree.map(lambda a, b: float(np.max(np.abs(a - b))), result, expected)
    print(f"loss {result[0]:.6f}; largest difference from one device {max(jax.tree.leaves(differences)):.1e}")

    for name, function in (("this file", value_and_grad), ("jax.grad of the loop", jax.value_and_grad(autodiff_loss))):
        sizes = [f"M={m}: {temporary_bytes(function, stages, m) / 1e6:.2f} MB" for m in (8, 64)]
        print(f"temporary memory per device, {name}:", *sizes)


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 4)
    main()
