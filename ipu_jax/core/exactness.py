"""Choose the options with which XLA computes an operation alike in every program, so that bits can be compared.

XLA rewrites operations that meet in one program: a / sqrt(b) becomes a * rsqrt(b), but not where sqrt(b) was stashed. A
pipeline divides the operations over other programs than one device has, and so other operations meet.
"""

import os
import re
from typing import Final

import jax

from ipu_jax.base.annotations import Json

UNFUSED: Final[dict[str, Json]] = {"xla_allow_excess_precision": False, "xla_cpu_experimental_ynn_fusion_type": ""}
"""Every operation rounds its result to its own dtype. A library of XLA's CPU backend fuses a product with its
neighbours, and rounds otherwise than XLA does."""

_PASSES: Final = "xla_disable_hlo_passes"


def exact_options(*, optimized: bool, half: bool = False) -> dict[str, Json]:
    """Return compiler options with which no operation is rewritten.

    Args:
        optimized: whether XLA may compute several operations in one loop, and optimize its code. A CPU may then round
            a product and a sum once (FMA) if both are in one loop, and twice in another program.
        half: whether the program computes in less than float32. Without such loops jax 0.10 compiles it for minutes, so
            that it may have them.

    Passes that `XLA_FLAGS` disables stay disabled.

    >>> exact_options(optimized=True)["xla_disable_hlo_passes"]
    'algsimp'
    """
    given = re.findall(rf"--{_PASSES}=(\S*)", os.environ.get("XLA_FLAGS", ""))
    fuses = optimized or (half and jax.__version_info__ < (0, 11))
    passes = [*filter(None, ",".join(given).split(",")), "algsimp", *([] if fuses else ["fusion"])]
    level: dict[str, Json] = {} if optimized else {"xla_backend_optimization_level": 0}
    return {**UNFUSED, _PASSES: ",".join(dict.fromkeys(passes)), **level}
