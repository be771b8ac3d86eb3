"""Call a segment and check its results: loss or outputs, new state and aux."""

from collections.abc import Mapping
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from ipu_jax.base.keys import is_key
from ipu_jax.core.devices import IPU_AXIS
from ipu_jax.core.mesh_axes import further_axes, names_in, parts
from ipu_jax.core.programs._agreement import refuse_differing
from ipu_jax.core.programs.segment import Message, MicrobatchInputs, Segment, loss_and_aux


def call_segment(
    segment: Segment, params: Any, x: Message, inputs: MicrobatchInputs, state: Mapping[str, Any], last: bool
) -> tuple[Any, dict[str, Any], dict[str, Any], bool]:
    """Return a segment's message, its new state, its aux, and whether it or an earlier one adds a loss.

    The last segment returns the loss in place of the message, or in prediction the outputs. Prediction has no aux.
    """
    message, new_state, aux = segment(params, x, inputs, state)
    if segment.role == "prediction":
        return (message.y if last else message), new_state, {}, False
    adds_loss = message.loss is not None
    if not last:
        return message, new_state, aux, adds_loss
    loss, aux = loss_and_aux(message, aux, segment.stages[-1])
    return loss, new_state, aux, adds_loss


def check_results(segment: Segment, differs: Any, y_and_aux: Any, last: bool, split_state: Any) -> None:
    """Refuse results that are random keys, or that may differ between IPUs and are not split over them.

    Args:
        segment: the segment that returned the results.
        differs: the tree of `call_segment`'s results; each leaf says whether its value may differ between IPUs.
        y_and_aux: the shapes of the message, loss or outputs, and of the aux.
        last: whether the segment is the last one.
        split_state: per leaf of the new state, whether it is split over the IPUs.

    Raises:
        ValueError: a result is refused. The message names the stage, the value and a fix.
    """
    of_y, of_state, of_aux = differs
    if last and segment.role == "prediction":
        _check_outputs(segment, of_y, y_and_aux[0])
    else:
        refuse_differing(segment, "a loss" if last else "a y or a skip", any(jax.tree.leaves(of_y)))
    refuse_differing(segment, "an aux", any(jax.tree.leaves(of_aux)))
    state = zip(jax.tree.leaves(of_state), jax.tree.leaves(split_state), strict=True)
    refuse_differing(segment, "state that is not split", any(may and not split for may, split in state))
    for path, leaf in jax.tree.leaves_with_path(y_and_aux):
        if is_key(leaf):
            raise ValueError(
                f"stage {segment.name!r} returns a random key, {leaf.dtype}, in its {'aux' if path[0].idx else 'y'}: "
                "return jax.random.key_data(key), and wrap it again with jax.random.wrap_key_data where it is used"
            )


def _check_outputs(segment: Segment, differs: Any, outputs: Any) -> None:
    stage = segment.stages[-1]
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
    try:
        specs = jax.tree.leaves(jax.tree.broadcast(stage.predict_specs, outputs, is_leaf=is_spec), is_leaf=is_spec)
    except ValueError as error:
        raise ValueError(
            f"stage {stage.name!r}: predict_specs does not fit the tree that predict returns: {error}"
        ) from error
    leaves = jax.tree.leaves_with_path(outputs)
    for (path, leaf), spec, may_differ in zip(leaves, specs, jax.tree.leaves(differs), strict=True):
        name = f"outputs{jax.tree_util.keystr(path)} of {leaf.dtype}{list(leaf.shape)}"
        if len(spec) > len(leaf.shape):
            raise ValueError(
                f"stage {stage.name!r}: predict_specs says {spec} for {name}, which has fewer dims: give a spec for "
                "the dims of one micro-batch's outputs"
            )
        axes = further_axes(jax.sharding.get_abstract_mesh())
        for dim, entry in enumerate(spec):
            if leaf.shape[dim] % parts(axes, PartitionSpec(entry)):
                sizes = ", ".join(f"{axis}={axes[axis]}" for axis in names_in(entry) if axis in axes)
                raise ValueError(
                    f"stage {stage.name!r}: predict_specs says {spec} for {name}: dim {dim} is not divisible by "
                    f"{sizes}; choose a size that is, or leave the dim whole"
                )
        if may_differ and IPU_AXIS not in spec:
            raise ValueError(
                f"concurrent stage {segment.name!r} returns {name} that may differ between IPUs: keep it split with "
                "Stage(predict_specs=PartitionSpec(...)), with 'ipu' for the dim that is split, or gather the parts "
                f"(jax.lax.all_gather) or add them up (jax.lax.psum) over axis {IPU_AXIS!r} first"
            )
        if IPU_AXIS in spec and not may_differ and lax.axis_size(IPU_AXIS) > 1:
            raise ValueError(
                f"stage {stage.name!r}: predict_specs says {spec} for {name}, but every IPU returns the same: leave "
                "'ipu' out of its spec"
            )
