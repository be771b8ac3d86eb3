"""Test stages with complex values inside, between them and in their state, against plain jax, under every policy."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import checkpoint_policies as policies
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ipu_jax import Pipeline, Stage, make_mesh
from support.against_plain import assert_equals_plain
from support.layers import ROWS, D, normal

M = 3


def to_complex(p, x, mb):
    return {"z": jnp.exp(1j * (mb["x"] @ p["w"])), "x": mb["x"]}


def of_complex(p, x, mb):
    z = x["z"] * jnp.exp(1j * (x["x"] @ p["w"])) * lax.complex(*p["z"])
    return jnp.abs(z * z) + z.imag


def filtered(p, x, mb):
    return jnp.fft.ifft(checkpoint_name(jnp.fft.fft(jnp.tanh(x)) * lax.complex(*p["z"]), "z"))


def loss(p, x, mb):
    """Return a loss of complex values that products, loops, branches and functions with their own derivative make."""
    z = jnp.sin(x @ p["w"]) @ (x.T @ x) / ROWS
    z = lax.scan(lambda c, _: (jnp.tanh(c) * x, c.real.sum()), z / (1 + abs(z)), None, length=2)[0]
    z = lax.cond(z.real.sum() > 0, lambda z: z * z, lambda z: z / (2 + abs(z)), z)
    turns = lax.stop_gradient(lax.while_loop(lambda c: abs(c).max() < 1, lambda c: c * 2, z + 1e-3))
    return jnp.mean(abs(z * turns * jax.nn.relu(z.real) - mb["y"]) ** 2)


FNS = {"first": to_complex, "second": of_complex, "third": filtered, "last": loss}
SHAPES: dict[str, Any] = {
    "first": {"w": (D, D)},
    "second": {"w": (D, D), "z": (2, D)},
    "third": {"z": (2, D)},
    "last": {"w": (D, D)},
}
POLICIES: dict[str, Any] = {
    "auto": "auto",
    "none": "none",
    "all": "all",
    **{
        name: getattr(policies, name)
        for name in (
            "everything_saveable",
            "nothing_saveable",
            "dots_saveable",
            "checkpoint_dots",
            "dots_with_no_batch_dims_saveable",
        )
    },
    "names": policies.save_only_these_names("z"),
    "any names but": policies.save_anything_except_these_names("other"),
    "from both": policies.save_from_both_policies(policies.dots_saveable, policies.save_only_these_names("z")),
}


def weights():
    seeds = iter(range(20))
    return jax.tree.map(lambda shape: normal(*shape, seed=next(seeds)), SHAPES, is_leaf=lambda s: isinstance(s, tuple))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recompute", "ipus"),
    [pytest.param(policy, (1, 2, 4)[k % 3], id=name) for k, (name, policy) in enumerate(POLICIES.items())],
)
def test_complex_values_under_every_policy(recompute, ipus):
    names = list(FNS)
    stages = [
        Stage(FNS[name], params=name, ipu=i * ipus // len(names), recompute=recompute) for i, name in enumerate(names)
    ]
    pipeline = Pipeline(stages, mesh=make_mesh(1, ipus), gradient_accumulation=M)
    params, batch = weights(), {"x": normal(M, ROWS, D, seed=21), "y": normal(M, ROWS, D, seed=22)}

    def dense(params):
        def one(mb):
            x: Any = None
            for name, fn in FNS.items():
                x = fn(params[name], x, mb)
            return x

        return jnp.mean(jnp.stack([one({k: v[m] for k, v in batch.items()}) for m in range(M)]))

    assert_equals_plain(pipeline, params, batch, dense)
