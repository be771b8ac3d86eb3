"""Let an unchanged `jax.distributed.initialize()` find its place under poprun, as it does under SLURM.

Importing this module registers `PoprunCluster` with jax, ahead of jax's own cluster types, since poprun may itself run
under SLURM. The module is imported during the import of jax, so it imports nothing else from jax.
"""

import os

from jax._src.clusters import ClusterEnv  # the documented way to add a cluster; jax exports it from nowhere else

from ipu_jax.distributed.environment import INSTANCE, InstancePlace, meet_seconds, place_of


class PoprunCluster(ClusterEnv):
    """A run of poprun, as jax sees it."""

    name: str = "poprun"

    @classmethod
    def is_env_present(cls) -> bool:
        """Return whether poprun started this process."""
        return INSTANCE in os.environ

    @classmethod
    def get_coordinator_address(cls, timeout_secs: int | None, override_coordinator_port: str | None) -> str:
        """Return "host:port" of jax's coordination service."""
        return cls._place().coordinator

    @classmethod
    def get_process_count(cls) -> int:
        """Return the number of instances."""
        return cls._place().instances

    @classmethod
    def get_process_id(cls) -> int:
        """Wait until all instances are here, and return the number of this one.

        Raises:
            InstancesDifferError, InstancesMissingError, PortTakenError: as `popdist.init` raises them.
        """
        from ipu_jax.distributed import _joining  # needs the whole of jax

        place = cls._place()
        _joining.join(place, seconds=meet_seconds(os.environ))
        return place.instance

    @staticmethod
    def _place() -> InstancePlace:
        place = place_of(os.environ)
        assert place is not None, "jax asks only where is_env_present is true"
        return place


# jax asks the classes in the order of this list, and appends each new class at its end
ClusterEnv._cluster_types.remove(PoprunCluster)
ClusterEnv._cluster_types.insert(0, PoprunCluster)
