"""Entry points of the installed commands. Without the packages of the extra `mnist`, each exits with status 2."""

import importlib
import sys

_EXTRA = {"flax", "pooch", "requests", "rich", "sklearn"}


def run_sharded_mnist() -> int:
    """Run `run-sharded-mnist`, and return its exit status."""
    return _run("run-sharded-mnist", "mnist_example.run_sharded_mnist")


def benchmark_dataset() -> int:
    """Run `benchmark-dataset`, and return its exit status."""
    return _run("benchmark-dataset", "mnist_example.benchmark_dataset")


def _run(command: str, module: str) -> int:
    try:
        program = importlib.import_module(module)
    except ModuleNotFoundError as missing:
        package = (missing.name or "").split(".")[0]
        if package not in _EXTRA:
            raise
        print(f"{command} needs {package}, which is not installed: pip install 'ipu-jax[mnist]'", file=sys.stderr)
        return 2
    return program.main()
