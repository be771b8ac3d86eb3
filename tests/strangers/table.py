"""Cut each stranger's model over four IPUs, verify it, and write the table of docs/gallery.md.

make strangers                                     fetches files that are not there, and writes the table
python tests/strangers/table.py qwen3 lm1b         prints some rows
"""

import contextlib
import importlib
import inspect
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax
import numpy as np

from ipu_jax import Pipeline, configure, verify
from ipu_jax.core.programs.cost import in_units
from strangers.files import FOLDER
from strangers.models import FILES, PACKAGES, Stranger

IPUS: Final = 4
MICRO_BATCHES: Final = 4
PACKAGES_OF_FILES: Final = FOLDER / "packages"
"""What fetched files import, and nothing else here does."""
PAGE: Final = Path(__file__).parents[2] / "docs/gallery.md"
_TABLE: Final = re.compile(r"(<!-- strangers: begin -->\n).*?(<!-- strangers: end -->)", re.DOTALL)
HEAD: Final = ("model", "unusual in it", "work of each IPU", "weights of each IPU", "largest error")


def row_of(one: Stranger) -> list[str]:
    """Return a row: the shares of work and the weights of the IPUs, and the largest error that `verify` found.

    Raises:
        ipu_jax.VerificationError: the pipeline is not the function.
    """
    imported = (
        one.files.imported(one.module) if one.files else contextlib.nullcontext(importlib.import_module(one.module))
    )
    with imported as module:
        loss, params, micro_batch, *frozen = one.problem(module)
        options: dict[str, Any] = {"ipus": IPUS, "gradient_accumulation": MICRO_BATCHES}
        pipeline = Pipeline.from_function(loss, params, micro_batch, frozen=frozen[0] if frozen else None, **options)
        # shifted along the last dim: other tokens, and other images
        batch = jax.tree.map(lambda x: np.stack([np.roll(x, k, -1) for k in range(MICRO_BATCHES)]), micro_batch)
        key = jax.random.key(1) if len(inspect.signature(loss).parameters) > 2 else None
        placed = pipeline.shard(params)
        proof = verify(pipeline, placed, batch, key=key)
        report = pipeline.report(placed, batch, None, key, compile=False)
    work = sum(ipu.flops for ipu in report.ipus)
    shares = " / ".join(f"{ipu.flops / work:.0%}" for ipu in report.ipus)
    weights = ", ".join(in_units(ipu.weights, "B") for ipu in report.ipus)
    return [f"`{one.name}`", one.unusual, shares, weights, f"{proof.worst[1]:.1e}"]


def main(*names: str) -> int:
    configure(IPUS)
    known = {one.problem.__name__: one for one in [*FILES, *PACKAGES]}
    if unknown := [name for name in names if name not in known]:
        print(f"{unknown[0]!r} is not a stranger: choose from {', '.join(known)}", file=sys.stderr)
        return 2
    sys.path.append(str(PACKAGES_OF_FILES))
    rows: list[list[str]] = [[*HEAD]]
    failed = 0
    for name in names or known:
        try:
            rows.append(row_of(known[name]))
            print(" | ".join(rows[-1]), flush=True)
        except Exception as error:  # the others are tried all the same
            failed = 1
            print(f"{known[name].name}: {type(error).__name__}: {error}", file=sys.stderr)
    if not names and not failed:
        PAGE.write_text(_TABLE.sub(lambda found: f"{found[1]}{_in_markdown(rows)}{found[2]}", PAGE.read_text()))
    return failed


def _in_markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
