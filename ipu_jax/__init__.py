"""Multi-IPU programming on any JAX device: pipelines, concurrent stages, and how they compare with one device.

What most programs need is here; all the rest is in the modules, such as `ipu_jax.schedules`.
"""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from ipu_jax.base import facts
from ipu_jax.base.other_words import gone
from ipu_jax.base.version import __version__ as __version__

# Type checkers read these imports. At run time, a name is imported when it is first used: so a command line is checked,
# and a schedule printed, without importing jax, which takes a second.
if TYPE_CHECKING:
    from ipu_jax import chips, costs, io, nn, observe, options, pipelines, schedules, steps
    from ipu_jax.distributed import popdist
    from ipu_jax.io import Checkpoints, Feed
    from ipu_jax.options import TrainOptions
    from ipu_jax.pipelines import (
        ALL_IPUS,
        Outputs,
        Pipeline,
        Stage,
        configure,
        everywhere,
        make_mesh,
        stage_end,
        verify,
    )
    from ipu_jax.run import cli
    from ipu_jax.schedules import make_schedule
    from ipu_jax.steps import fit, make_train_step

__all__ = ["schedules", "options", "pipelines", "steps", "io", "nn", "observe", "costs", "chips", "popdist", "cli"]  # noqa: RUF022
_MODULES = (*__all__,)  # the first two do not import jax
__all__ += [
    "ALL_IPUS",
    "Checkpoints",
    "Feed",
    "Outputs",
    "Pipeline",
    "Stage",
    "TrainOptions",
    "configure",
    "everywhere",
    "fit",
    "make_mesh",
    "make_schedule",
    "make_train_step",
    "stage_end",
    "verify",
]

# what this process says of itself goes into its beacon and its record; without a fact, nothing of this is imported
_is_profiled = os.environ.get("IPU_JAX_TRACE") or os.environ.get("IPU_JAX_REPORT")
for _listener in ("distributed.processes.listener", *["run.observe.profiled"] * bool(_is_profiled)):
    facts.listen_from(f"{__name__}.{_listener}")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = importlib.import_module(f"{__name__}.{name}")
    else:
        home = _home_of(name)
        if home is None or name not in __all__:
            where = f": it is {home}.{name}" if home else gone(name)
            text = f"module {__name__!r} has no attribute {name!r}{where}"
            raise AttributeError(text, name=name, obj=sys.modules[__name__])
        found = getattr(sys.modules[home], name)
    globals()[name] = found  # so that this is called only once per name
    return found


def _home_of(name: str) -> str | None:
    """Return the module that has a public name, imported."""
    homes = (f"{__name__}.{module}" for module in _MODULES if not name.startswith("_"))
    return next((home for home in homes if name in importlib.import_module(home).__all__), None)


class _Hints:
    """The last finder of modules, which is asked for `from ipu_jax import DynamicScale`, too: it says where that is."""

    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        package, _, last = name.rpartition(".")
        where = "" if package != __name__ else f": it is {home}.{last}" if (home := _home_of(last)) else gone(last)
        if where:
            raise ImportError(f"cannot import name {last!r} from {package!r}{where}", name=last)


sys.meta_path.append(_Hints)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
