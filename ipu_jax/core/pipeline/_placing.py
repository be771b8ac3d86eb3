"""Place a pipeline's weights and state on the IPUs, or make them there, and read them whole."""

from jax.sharding import Mesh

from ipu_jax.base import facts
from ipu_jax.base.annotations import Function, Params, Tree
from ipu_jax.base.decorators import public_on_mesh
from ipu_jax.core.layout import packing
from ipu_jax.core.layout.packing import Sharded, check_alive
from ipu_jax.core.mesh.devices import check_there
from ipu_jax.core.pipeline.init_function import InitFunction, weights_of
from ipu_jax.core.pipeline.placed_stages import PlacedStages


@public_on_mesh
class Placing:
    """The methods of `Pipeline` between whole trees and arrays on the IPUs."""

    mesh: Mesh
    placement: PlacedStages

    @facts.during("placing weights")
    def shard(self, params: Params) -> Sharded:
        """Place whole weights on the IPUs.

        Each IPU gets the weights of its own stages and its own shard of the concurrent groups. Communicates from host
        to device only.

        Args:
            params: whole weights, floating arrays (jax or numpy), in `{group: pytree}`; of a function that was cut, in
                its own tree. A leaf of a concurrent group has its whole shape, without padding.

        Returns:
            A `Sharded`, a pytree of `jax.Array`. `value_and_grad` takes it, and returns gradients in the same form.
            Its arrays are packed: `Sharded` says which optimizers are right on them.

        Raises:
            ValueError: a group is missing or unknown, a leaf is not a floating array, a spec does not fit, or the
                devices are only described.
        """
        check_there(self.mesh, "shard", "shard_shapes(params)")
        return packing.shard_tree(params, self.placement.weights.layout(params), self.mesh)

    @facts.during("making weights")
    def init(self, init_fn: Function, *args: Tree) -> Sharded:
        """Make weights on the IPUs that hold them: `shard(init_fn(*args))`, of which no host or device has the whole.

        The function is traced once. Each IPU computes the part of it that its own leaves need, and each instance
        computes for its own IPUs only. The numbers are those that `jax.jit(init_fn)(*args)` computes on one device. An
        IPU needs memory for its weights, and for its largest leaves in one piece. Communicates from host to device
        only.

        Args:
            init_fn: `init_fn(*args)` returns whole weights, as `shard` takes them. It draws by `jax.random`. A function
                that calls the host is computed whole on one device, and a warning says so.
            args: what it takes: a key, perhaps inputs; pytrees of arrays, the same on every instance.

        Returns:
            As `shard`.

        Raises:
            ValueError: it is not a function, it takes or returns something else than arrays, or as in `shard`.

        >>> import jax, jax.numpy as jnp
        >>> from ipu_jax import Pipeline, Stage
        >>> stage = lambda w, x, mb: jnp.mean((mb @ w) ** 2)
        >>> pipeline = Pipeline([Stage(stage, params="w", ipu=0)], gradient_accumulation=2)
        >>> params = pipeline.init(lambda key: {"w": jax.random.normal(key, (3, 1))}, jax.random.key(0))
        >>> params["w"].shape
        (3, 1)
        """
        check_there(self.mesh, "init", "shard_shapes(jax.eval_shape(init_fn, *args))")
        init = InitFunction.traced(init_fn, args)
        return weights_of(init, self.placement.weights.layout(init.shapes), self.mesh, stacklevel=4)

    def shard_shapes(self, params: Params) -> Sharded:
        """Return the result of `shard` with `jax.ShapeDtypeStruct`s in place of arrays, for `import_weights(like=)`.

        Args:
            params: as for `shard`, whole arrays or their shapes, for example from `jax.eval_shape(init, key)`.

        Raises:
            ValueError: as in `shard`.
        """
        return packing.shapes_on(self.placement.weights.layout(params), self.mesh)

    def shard_state_shapes(self, state: Tree) -> Sharded:
        """Return the result of `shard_state` with `jax.ShapeDtypeStruct`s in place of arrays."""
        return packing.shapes_on(self.placement.state.layout(state), self.mesh)

    def shard_state(self, state: Tree) -> Sharded:
        """Place `{group: pytree of state}` on the IPUs, as `shard` places weights. Leaves can have any dtype.

        Raises:
            ValueError: a group is missing or unknown, a leaf is not an array, a spec does not fit, or the devices are
                only described.
        """
        check_there(self.mesh, "shard_state", "shard_state_shapes(state)")
        return packing.shard_tree(state, self.placement.state.layout(state), self.mesh)

    @facts.during("gathering weights")
    def unshard(self, sharded: Sharded) -> Tree:
        """Return the tree of parameters, gradients or state, whole and unpadded: the inverse of `shard`.

        Each instance gets the whole tree, on its default device. If a replica is on several instances, all of them must
        call this, since it communicates one all-gather per array that is split over them.
        """
        if not isinstance(sharded, Sharded):
            raise ValueError(f"sharded is a {type(sharded).__name__}: give what pipeline.shard(...) returns")
        check_alive("sharded", sharded)
        return packing.unshard_tree(sharded)
