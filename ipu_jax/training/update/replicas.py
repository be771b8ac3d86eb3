"""Run copies of the model, the replicas, on parts of the batch, and reduce their losses and gradients.

    batch (R, M, B, ...) --+-- replica 0: loss of its M micro-batches, gradients --+
                           +-- replica 1                                           +-- one reduction -- the same on all
                           +-- ...                                               --+

A replica of one IPU runs a plain loss function under `jax.pmap`, or under `jax.shard_map` if the IPUs are on several
instances. A replica of several IPUs runs a `Pipeline`; its mesh has an axis over the replicas. In both cases the user
calls `replicate(model, replication_factor=R)`, or gives the total number of IPUs instead, and gets an object with
`shard`, `value_and_grad` and `unshard`.
"""

from collections.abc import Sequence
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ipu_jax.base import status
from ipu_jax.base.annotations import Batch, Device, Function, Key, Params, Tree, Value
from ipu_jax.base.checks import check_count
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.base.jaxprs import check_context_mesh
from ipu_jax.base.keys import is_one_key
from ipu_jax.core.layout.leaf import check_array, check_weight
from ipu_jax.core.layout.packing import check_alive
from ipu_jax.core.mesh.axes import further_axes, reduced, rounded
from ipu_jax.core.mesh.devices import REPLICA_AXIS, check_there, devices_of, is_described, make_mesh
from ipu_jax.core.mesh.in_flight import InFlight
from ipu_jax.core.mesh.instances import on_host, put_copy, spans_instances, taken
from ipu_jax.core.options import PipelineOptions, Reduction
from ipu_jax.core.pipeline import Pipeline
from ipu_jax.core.pipeline.arguments import check_batch, count_samples
from ipu_jax.core.stage import Outputs
from ipu_jax.core.step_args import StepArgs, given_dims, without_dims
from ipu_jax.training.update._precision import widened


def replicas_of(
    *, replication_factor: int | None = None, num_ipus: int | None = None, ipus_per_replica: int = 1
) -> int:
    """Return the number of replicas, given directly or as the total number of IPUs.

    Args:
        replication_factor: R itself.
        num_ipus: R x `ipus_per_replica`.
        ipus_per_replica: the IPUs of one replica.

    Raises:
        ValueError: neither or both are given, a number is not a positive int, or `num_ipus` is not a multiple of
            `ipus_per_replica`.

    >>> replicas_of(num_ipus=8, ipus_per_replica=2)
    4
    """
    ipus_per_replica = check_count("ipus_per_replica", ipus_per_replica)
    if (replication_factor is None) == (num_ipus is None):
        given = "neither" if num_ipus is None else "both"
        raise ValueError(f"replication_factor and num_ipus: {given} given; give one of the two")
    if num_ipus is None:
        return check_count("replication_factor", replication_factor)
    num_ipus = check_count("num_ipus", num_ipus)
    if num_ipus % ipus_per_replica:
        below = num_ipus // ipus_per_replica * ipus_per_replica
        nearest = f"{below} or {below + ipus_per_replica}" if below else f"{ipus_per_replica}"
        raise ValueError(
            f"num_ipus={num_ipus} does not make a whole number of replicas of ipus_per_replica={ipus_per_replica}: "
            f"give a multiple of it, such as {nearest}"
        )
    return num_ipus // ipus_per_replica


@overload
def replicate(model: Pipeline, *, replication_factor: int | None = None, num_ipus: int | None = None) -> Pipeline: ...


@overload
def replicate(
    model: Function,
    *,
    replication_factor: int | None = None,
    num_ipus: int | None = None,
    gradient_accumulation: int | None = None,
    reduction: Reduction | None = None,
    random: bool = False,
    devices: Sequence[Device] | None = None,
) -> "Replicas": ...


def replicate(
    model: Any,
    *,
    replication_factor: int | None = None,
    num_ipus: int | None = None,
    gradient_accumulation: int | None = None,
    reduction: Reduction | None = None,
    random: bool | None = None,
    devices: Sequence[Device] | None = None,
) -> Any:
    """Make R replicas of a model, on R times its IPUs.

    Args:
        model: a `Pipeline`, or a loss function as `Replicas` takes it.
        replication_factor: R. Give either this or `num_ipus`.
        num_ipus: the total number of IPUs; R is this divided by the IPUs of one replica.
        gradient_accumulation, reduction, random, devices: for a loss function, as `Replicas` takes them. A pipeline has
            its own.

    Returns:
        A `Pipeline` on a wider mesh, or `Replicas`. Batches are (R, M, micro-batch, ...), without the first dim if R
        is 1.

    Raises:
        ValueError: what `replicas_of` raises; options are given for a pipeline; or there are too few devices.

    >>> loss_fn = lambda w, rows: jnp.mean((rows @ w) ** 2)
    >>> replicas = replicate(loss_fn, replication_factor=2)
    >>> loss, gradients = replicas.value_and_grad(replicas.shard(jnp.ones(3)), jnp.ones((2, 1, 4, 3)))
    >>> float(loss), gradients.tolist()
    (9.0, [6.0, 6.0, 6.0])
    """
    if isinstance(model, Pipeline):
        options: dict[str, Any] = {"gradient_accumulation": gradient_accumulation, "reduction": reduction}
        for name, value in (options | {"random": random, "devices": devices}).items():
            if value is not None:
                raise ValueError(f"{name}={value!r} was given, but a pipeline has its own: make the Pipeline with it")
        count = replicas_of(replication_factor=replication_factor, num_ipus=num_ipus, ipus_per_replica=model.ipus)
        axes = further_axes(model.mesh)
        return model.replace(mesh=make_mesh(count, model.ipus, devices=model.given_devices, **axes))
    return Replicas(
        model,
        replication_factor=replicas_of(replication_factor=replication_factor, num_ipus=num_ipus),
        gradient_accumulation=gradient_accumulation,
        reduction=reduction,
        random=bool(random),
        devices=devices,
    )


@public_on_mesh
class Replicas:
    """Runs a loss function on R replicas of one IPU each.

    `loss_fn(params, microbatch) -> loss`, `(loss, aux)` or `Outputs(loss, aux=aux)`: the micro-batch's mean loss, a
    float scalar. It sees one micro-batch of one replica, and doesn't need to know of the others.

    Args:
        loss_fn: the function.
        replication_factor: R.
        gradient_accumulation: M, the number of micro-batches of a replica in one weight update. They run in sequence.
            Default: 1. `make_train_step` can give M and `reduction` later, in `TrainOptions`.
        reduction: gradients are the "mean" (the default) or the "sum" over the M micro-batches and the replicas. The
            loss is always the mean.
        random: whether `loss_fn` gets `key=`, a typed key of this replica and micro-batch.
        devices: as for `make_mesh`.

    Raises:
        ValueError: the function is not callable, an option is invalid, or there are too few devices.
    """

    def __init__(
        self,
        loss_fn: Function,
        *,
        replication_factor: int = 1,
        gradient_accumulation: int | None = None,
        reduction: Reduction | None = None,
        random: bool = False,
        devices: Sequence[Device] | None = None,
    ):
        if not callable(loss_fn):
            raise ValueError(f"model={loss_fn!r} is neither a Pipeline nor callable: give a loss function")
        self.loss_fn, self.random = loss_fn, random
        self.replicas, self.ipus = check_count("replication_factor", replication_factor), 1
        self.given = {"gradient_accumulation": gradient_accumulation, "reduction": reduction}
        self.options = PipelineOptions(**{name: value for name, value in self.given.items() if value is not None})
        mesh = make_mesh(self.replicas, 1, devices=devices)
        self.given_devices, self.devices = devices_of(mesh), list(mesh.devices.flat)
        self.mesh = _mesh_of(self.devices)
        self._window = InFlight()
        self._value_and_grad = self._mapped(backward=True)
        self._loss = self._mapped(backward=False)

    def __repr__(self) -> str:
        name = getattr(self.loss_fn, "__name__", repr(self.loss_fn))
        m, reduction = self.options.gradient_accumulation, self.options.reduction
        return f"Replicas({name}, replication_factor={self.replicas}, gradient_accumulation={m}, {reduction=})"

    @jax.transfer_guard("allow")  # the caller asks for this transfer
    def shard(self, params: Params) -> Params:
        """Place a pytree of whole weights on every replica. Communicates from host to device only."""
        check_there(self.mesh, "shard", "shard_shapes(params)")
        sharding = NamedSharding(self.mesh, PartitionSpec())
        return jax.tree.map(lambda leaf: put_copy(jnp.asarray(leaf), sharding), params)

    def shard_shapes(self, params: Params) -> Params:
        """Return what `shard` returns, with `jax.ShapeDtypeStruct`s in place of arrays: for `import_weights(like=)`."""
        self.check_params(params)
        sharding = NamedSharding(self.mesh, PartitionSpec())
        shape_of = lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype), sharding=sharding
        )
        return jax.tree.map(shape_of, params)

    @jax.transfer_guard("allow")  # the caller asks for this transfer
    def unshard(self, sharded: Params) -> Params:
        """Return the whole tree, on this instance's default device: the inverse of `shard`. Communicates nothing."""
        check_alive("sharded", sharded)
        return jax.tree.map(lambda leaf: jnp.asarray(on_host(leaf)), sharded)

    def value_and_grad(self, params: Params, batch: Batch, key: Key = None) -> tuple[Value, Params]:
        """Return the loss and the gradients of one weight update, the same on all replicas.

        Communicates one pmean of the loss and one psum of all gradients over the replicas.

        Args:
            params: from `shard`.
            batch: a pytree with leaves (M, micro-batch, ...), or (R, M, micro-batch, ...) with R above 1. Across
                several instances as `Pipeline.value_and_grad` takes it.
            key: a typed key, if the function is random.

        Returns:
            `(loss, gradients)`, or `((loss, aux), gradients)`; aux has a leading (M,), or (R, M,). Gradients have the
            dtypes of `params`; they are accumulated in float32 at least.

        Raises:
            ValueError: the batch does not fit, or the key is missing or superfluous. Raised before anything is
                compiled.
        """
        samples = count_samples(batch, 2 + given_dims(self.replicas))
        return self._run(self._value_and_grad, StepArgs(params, batch, None, key), updates=1, samples=samples)

    def loss(self, params: Params, batch: Batch, key: Key = None) -> Tree:
        """Return the loss, or `(loss, aux)`, without gradients."""
        return self._run(self._loss, StepArgs(params, batch, None, key), updates=0, samples=0)[0]

    def _run(self, program: Any, given: StepArgs, *, updates: int, samples: int) -> tuple[Tree, Params]:
        given = taken(given)
        self.check(given)
        self._window.begin(given)
        loss, aux, gradients = program(given)
        self._window.admit(loss, updates=updates, samples=samples)
        return (loss if aux is None else (loss, aux)), gradients

    def check(self, given: StepArgs) -> None:
        """Raise the `ValueError` that `value_and_grad` would raise for these arguments."""
        self.check_params(given.params)
        key = given.key
        if self.random and not is_one_key(key):
            raise ValueError(f"key={key!r} is not one typed key, which loss_fn takes: pass key=jax.random.key(seed)")
        if key is not None and not self.random:
            raise ValueError("a key was given, but loss_fn takes none: replicate(..., random=True)")
        check_batch(given.batch, self.replicas, self.options.gradient_accumulation)
        check_alive("params", given.params)
        check_alive("batch", given.batch)

    def check_params(self, params: Params) -> None:
        """Raise `ValueError` unless the leaves of `params` are floating arrays of at least 16 bits."""
        for path, leaf in jax.tree.leaves_with_path(params):
            where = f"params{jax.tree_util.keystr(path)}"
            check_array(where, leaf)
            check_weight(where, leaf.dtype)

    def _mapped(self, *, backward: bool) -> Any:
        count = self.replicas * self.options.gradient_accumulation
        loss_cotangent = 1.0 if self.options.reduction == "sum" else 1.0 / count

        def program(args: StepArgs) -> Tree:
            cotangent = loss_cotangent if backward else None
            own = args.of_replica()
            loss, aux, sums = accumulate(self.loss_fn, own, random=self.random, loss_cotangent=cotangent)
            sums = reduced(lax.psum, sums, REPLICA_AXIS)
            gradients = None if sums is None else jax.tree.map(lambda g, w: rounded(g, w.dtype), sums, args.params)
            return reduced(lax.pmean, loss, REPLICA_AXIS), jax.tree.map(lambda leaf: leaf[None], aux), gradients

        replicated, per_replica = PartitionSpec(), PartitionSpec(REPLICA_AXIS)
        in_specs = (StepArgs(replicated, per_replica, None, replicated),)
        out_specs = (replicated, per_replica, replicated)
        mapped = over_replicas(program, self.devices, in_specs=in_specs, out_specs=out_specs)

        def run(given: StepArgs) -> Tree:
            with status.tracing("the function"):
                loss, aux, gradients = mapped(given.entered(self.replicas))
            return loss, without_dims(aux, self.replicas), gradients

        return jax.jit(run)


def loss_and_aux(result: Tree) -> tuple[Value, Tree]:
    """Return the result of a loss function as `(loss, aux)`; aux is None if there is none.

    Raises:
        ValueError: the loss is not a float scalar, or it comes with a loss to add.
    """
    loss, aux = result, None
    if isinstance(result, Outputs):
        loss, aux = result.y, result.aux
        if result.loss is not None:
            raise ValueError("loss_fn returned Outputs(loss=...), which stages add to a loss: add it to y")
    elif isinstance(result, tuple) and len(result) == 2:
        loss, aux = result
    if not hasattr(loss, "shape") or loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        described = f"{loss.dtype}{list(loss.shape)}" if hasattr(loss, "shape") else type(loss).__name__
        raise ValueError(f"loss_fn returned {described} as its loss: return a float scalar, or (loss, aux)")
    return loss, aux


def counts_of(aux: Tree, *, dims: int) -> Value:
    """Return the counts of a model whose losses are sums: an array with `dims` dims, one count per micro-batch.

    Args:
        aux: the aux of the loss function or of the last stage.
        dims: the number of dims of the counts.

    Raises:
        ValueError: the model returns no count.
    """
    counts: Value = aux["count"] if isinstance(aux, dict) and "count" in aux else aux
    if not hasattr(counts, "shape") or counts.ndim != dims:
        raise ValueError(
            "weighted=True, but the model gives no count: return (sum, count), or (sum, aux) with aux['count'], "
            "the count a number"
        )
    return counts


def accumulate(
    loss_fn: Function, args: StepArgs, *, random: bool, loss_cotangent: Value = None
) -> tuple[Value, Tree, Params]:
    """Return the mean loss over the micro-batches of one replica, aux with a leading M, and sums of gradients.

    Args:
        loss_fn: the loss function.
        args: this replica's, batch leaves (M, micro-batch, ...).
        random: whether the function takes a key.
        loss_cotangent: the backward pass starts from it, so that a loss scale acts before anything can underflow: sums
            are gradients of `loss_cotangent` x loss, in float32 at least. None for no gradients.
    """
    call, batch = _caller(loss_fn, args.key, random), args.batch

    def of_microbatch(index: Value, microbatch: Batch) -> Any:
        fn = lambda p: loss_and_aux(call(p, index, microbatch))
        if loss_cotangent is None:
            (loss, aux), gradients = fn(args.params), None
        else:
            loss, vjp, aux = jax.vjp(fn, args.params, has_aux=True)
            (gradients,) = vjp(jnp.full((), loss_cotangent, loss.dtype))
        return jax.tree.map(widened, (loss, gradients)), aux

    def add(sums: Tree, index_and_microbatch: Tree) -> tuple[Tree, Tree]:
        loss_and_gradients, aux = of_microbatch(*index_and_microbatch)
        return jax.tree.map(jnp.add, sums, loss_and_gradients), aux

    m, first = jax.tree.leaves(batch)[0].shape[0], jax.tree.map(lambda leaf: leaf[0], batch)
    if m == 1:  # no scan: its carry would be another copy of the gradients
        (loss, sums), aux = of_microbatch(jnp.int32(0), first)
        return loss, jax.tree.map(lambda leaf: jnp.asarray(leaf)[None], aux), sums
    like = jax.eval_shape(of_microbatch, jnp.int32(0), first)[0]
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    (loss, sums), aux = lax.scan(add, zeros, (jnp.arange(m), batch))
    return loss / m, aux, sums


def _caller(loss_fn: Function, key: Key, random: bool) -> Function:
    def call(params: Params, index: Value, microbatch: Batch) -> Tree:
        if not random:
            return loss_fn(params, microbatch)
        own = jax.random.fold_in(jax.random.fold_in(key, lax.axis_index(REPLICA_AXIS)), index)
        return loss_fn(params, microbatch, key=own)

    return call


def over_replicas(
    program: Function, devices: Sequence[Device], *, in_specs: tuple[Tree, ...], out_specs: Tree
) -> Function:
    """Map a program over the axis "replica" by `jax.pmap`, with the interface of `jax.shard_map`.

    `pmap` takes only arrays of one process. So devices of several processes, and devices that are only described, are
    mapped by `jax.shard_map` itself.

    Args:
        program: gets blocks as under `shard_map`: a split dim is kept, and has size 1.
        devices: one per replica.
        in_specs, out_specs: trees of `PartitionSpec`, prefixes of arguments and result. Each spec names "replica" at
            most once and no other axis.

    Returns:
        A function from whole arrays to whole arrays.
    """
    if spans_instances(np.array(devices)) or is_described(devices[0]):
        mesh = _mesh_of(devices)
        return jax.shard_map(program, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    is_spec = lambda leaf: isinstance(leaf, PartitionSpec)
    dim_of = lambda spec: next((d for d, axis in enumerate(spec) if axis is not None), None)

    def run(*args: Tree) -> Tree:
        given = jax.tree.broadcast(in_specs, args, is_leaf=is_spec)
        dims = [*map(dim_of, jax.tree.leaves(given, is_leaf=is_spec))]
        leaves, treedef = jax.tree.flatten(args)
        check_context_mesh()
        if not any(dim is not None for dim in (*dims, *map(dim_of, jax.tree.leaves(out_specs, is_leaf=is_spec)))):
            return program(*args)  # every replica has everything: there is nothing to map

        def with_dims(*leaves: Tree) -> Tree:
            # pmap removes the mapped dim, shard_map keeps it: give `program` the dim that it has under shard_map
            blocks = [x if dim is None else jnp.expand_dims(x, dim) for x, dim in zip(leaves, dims, strict=True)]
            result = program(*jax.tree.unflatten(treedef, blocks))
            specs = jax.tree.broadcast(out_specs, result, is_leaf=is_spec)
            without = lambda spec, x: x if dim_of(spec) is None else jnp.squeeze(x, dim_of(spec))
            return jax.tree.map(without, specs, result, is_leaf=is_spec)

        out_axes = jax.tree.map(dim_of, out_specs, is_leaf=is_spec)
        return jax.pmap(
            with_dims, axis_name=REPLICA_AXIS, in_axes=tuple(dims), out_axes=out_axes, devices=list(devices)
        )(*leaves)

    return run


def _mesh_of(devices: Sequence[Device]) -> Mesh:
    return Mesh(np.array(devices), (REPLICA_AXIS,), axis_types=(AxisType.Auto,))
