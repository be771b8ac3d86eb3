"""Run a command that needs the packages of the extra `mnist`; without them it says what to install."""

import sys
from collections.abc import Callable
from typing import Final, NoReturn

from ipu_jax.tools.process import run

_EXTRA: Final = {"flax", "pooch", "requests", "rich", "sklearn"}


def run_with_extra(prog: str, main: Callable[[], int]) -> NoReturn:
    """Run a command as the process's own, as `ipu_jax.tools.process.run` does.

    Args:
        prog: the name of the command.
        main: the command. If it imports a package of the extra that is missing, the process ends with status 2.
    """

    def with_extra() -> int:
        try:
            return main()
        except ModuleNotFoundError as missing:
            package = (missing.name or "").split(".")[0]
            if package not in _EXTRA:
                raise
            print(f"{prog} needs {package}, which is not installed: pip install 'ipu-jax[mnist]'", file=sys.stderr)
            return 2

    run(prog, with_extra)
