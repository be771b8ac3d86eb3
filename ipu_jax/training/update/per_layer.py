"""Let an optimizer treat each layer of a stacked leaf as a leaf of its own.

    w (layers, n, m)      tx runs on w[0], w[1], ..., of shape (n, m) each      its state (layers, ...)

A norm or a factored moment is then of one layer, as in a model whose layers are separate leaves, and no IPU of a
pipeline that is cut between layers needs the rows of another.
"""

import functools
from typing import Any

import jax
import optax

from ipu_jax.base.annotations import Params, Tree


def per_layer(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Treat dim 0 of each leaf as layers: run `tx` on each row of each leaf as if it were a leaf of its own.

    It is plain optax, for any program. Leaves whose dim 0 is not layers, such as a table, need `optax.partition` or
    `optax.masked` around it. What combines several leaves, such as `optax.clip_by_global_norm`, goes outside, too;
    and so do masks, labels and noise: `tx` knows no path, and its random keys are the same for all layers.

    >>> state = per_layer(optax.adafactor(0.1, min_dim_size_to_factor=2)).init({"w": jax.numpy.ones((3, 4, 5))})
    >>> state["w"][0].v_row.shape, state["w"][0].count.shape
    ((3, 4), (3,))

    Args:
        tx: gets leaves (n, m) of a leaf (layers, n, m), each as a tree of its own. Leaves may have different numbers of
            layers. Further arguments of its update, such as `value=`, are the same for all layers.

    Returns:
        A transformation. Its state is a tree like the weights, with a state of `tx` in place of each leaf, in which
        layers are dim 0 of each array: a counter of `tx` is (layers,), one per layer.
        Communicates nothing in a pipeline that is cut between layers.

    Raises:
        ValueError: by `init`; a leaf has no dims.
    """
    of_layer = optax.with_extra_args_support(tx)

    def init(params: Params) -> Tree:
        for path, leaf in jax.tree.leaves_with_path(params):
            if not leaf.shape:
                raise ValueError(
                    f"per_layer: params{jax.tree_util.keystr(path)} is a number, without a dim of layers: leave it to "
                    "another optimizer, by optax.partition or optax.masked around per_layer"
                )
        return jax.tree.map(jax.vmap(of_layer.init), params)

    def update(updates: Params, state: Tree, params: Params | None = None, **further: Any) -> tuple[Params, Tree]:
        leaves, treedef = jax.tree.flatten(updates)
        weights = [None] * len(leaves) if params is None else treedef.flatten_up_to(params)
        each = zip(leaves, treedef.flatten_up_to(state), weights, strict=True)
        run = jax.vmap(functools.partial(of_layer.update, **further))
        found = [run(*of_leaf) for of_leaf in each]
        return treedef.unflatten([new for new, _ in found]), treedef.unflatten([new for _, new in found])

    return optax.GradientTransformationExtraArgs(init, update)
