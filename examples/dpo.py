"""Teach a model preferences by DPO: a policy of LoRA adapters, its frozen base as the reference, four passes.

    IPU 0   layer 0 of policy and reference, on chosen and rejected \\
    IPU 1                                                            -> layer 1 of all four -> ... -> loss

The loss function calls the model four times, as it is written in the paper. Each IPU holds the weights of its layers
once, and runs them in all passes. The base has learned to count up and down, and the policy learns to prefer up:
python -m examples.dpo

Source: Rafailov et al. 2023, "Direct Preference Optimization", arXiv:2305.18290, equation 7.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from examples import lora
from examples.lora import LENGTH, B, make_adapters, make_base, model, sequences, trained
from ipu_jax import configure

BETA, FROZEN = 0.1, {"base": True, "lora": False}


def log_likelihood(base, adapters, tokens):
    """Return the log-likelihood (B,) of sequences (B, T) after their first tokens."""
    logits = model(base, adapters, tokens)[:, :-1]
    return -optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).sum(-1)


def loss(params, pairs):
    base, low = params["base"], params["lora"]
    reference = lambda tokens: jax.lax.stop_gradient(log_likelihood(base, None, tokens))  # it has no backward pass
    gain = lambda tokens: log_likelihood(base, low, tokens) - reference(tokens)
    return -jax.nn.log_sigmoid(BETA * (gain(pairs["chosen"]) - gain(pairs["rejected"]))).mean()


def make_pairs(seed: int) -> dict[str, np.ndarray]:
    return {"chosen": sequences(seed, 1)["tokens"], "rejected": sequences(seed, -1)["tokens"]}


def main() -> None:
    both = {"tokens": np.concatenate([*make_pairs(0).values()])}
    plain, state = trained(lora.loss, {"base": make_base()}, both, ipus=4)
    base = jax.tree.map(lambda w: w.astype(jnp.bfloat16), plain.unshard(state.params)["base"])
    params = {"base": base, "lora": make_adapters(base)}
    pipeline, state = trained(loss, params, make_pairs(1), updates=15, ipus=4, frozen=FROZEN)
    others = [rows.reshape(-1, B, LENGTH) for rows in make_pairs(2).values()]
    policy = pipeline.forward(lambda p, tokens: log_likelihood(p["base"], p["lora"], tokens), others[0][0])
    for when, weights in (("before", pipeline.shard(params)), ("after", state.params)):
        chosen, rejected = (policy(weights, tokens) for tokens in others)
        print(f"{when}: of {chosen.size} other pairs the policy prefers {np.mean(chosen > rejected):.0%} as it should")


if __name__ == "__main__":
    configure(4)
    main()
