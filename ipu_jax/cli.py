"""What a command of your own is written with: `ipu_jax.run.cli`, under the name by which users import it."""

import sys
from typing import TYPE_CHECKING

from ipu_jax.run import cli

if TYPE_CHECKING:
    from ipu_jax.run.cli import *  # noqa: F403

sys.modules[__name__] = cli
