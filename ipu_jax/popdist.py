"""Where and with whom this process runs: `ipu_jax.distributed.popdist`, under the name by which users import it."""

import sys
from typing import TYPE_CHECKING

from ipu_jax.distributed import popdist

if TYPE_CHECKING:
    from ipu_jax.distributed.popdist import *  # noqa: F403

sys.modules[__name__] = popdist
