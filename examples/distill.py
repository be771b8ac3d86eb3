"""Distil a teacher into a smaller student, in one pipeline: the teacher is frozen in bfloat16.

    IPU 0   teacher's and student's first layers \\
    IPU 1                                         -> their next layers -> ... -> KL + cross entropy -> loss

The loss is the Kullback-Leibler divergence of the student's soft labels from the teacher's, and the cross entropy of
the hard labels. A teacher of 64 features teaches a student of 16: python -m examples.distill

Source: Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531, section 2.
"""

import jax
import jax.numpy as jnp
import optax

from examples import lora
from examples.lora import LENGTH, B, make_base, model, sequences, trained
from ipu_jax import configure

TEMPERATURE, SOFT, FROZEN = 2.0, 0.5, {"teacher": True, "student": False}


def cross_entropy(logits, tokens):
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def loss(params, batch):
    teacher, student = (model(params[name], None, batch["tokens"])[:, :-1] for name in ("teacher", "student"))
    teacher = jax.lax.stop_gradient(teacher)  # it has no backward pass
    wanted, found = (jax.nn.log_softmax(logits / TEMPERATURE) for logits in (teacher, student))
    divergence = (jnp.exp(wanted) * (wanted - found)).sum(-1).mean()
    return SOFT * TEMPERATURE**2 * divergence + (1 - SOFT) * cross_entropy(student, batch["tokens"])


def main() -> None:
    data = sequences(0, 1)
    plain, state = trained(lora.loss, {"base": make_base(64)}, data, ipus=4)
    teacher = jax.tree.map(lambda w: w.astype(jnp.bfloat16), plain.unshard(state.params)["base"])
    params = {"teacher": teacher, "student": make_base(16)}
    pipeline, state = trained(loss, params, data, ipus=4, frozen=FROZEN)
    others = sequences(1, 1)["tokens"].reshape(-1, B, LENGTH)
    for name in ("teacher", "student"):
        entropy = lambda p, tokens, name=name: cross_entropy(model(p[name], None, tokens)[:, :-1], tokens)
        of = pipeline.forward(entropy, others[0])
        before, after = (of(weights, others).mean() for weights in (pipeline.shard(params), state.params))
        print(f"{name}: cross entropy of other sequences {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    configure(4)
    main()
