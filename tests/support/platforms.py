"""Make programs for another platform than the one on which they run: a TPU's or a GPU's program runs on CPUs, too."""

import contextlib
import warnings
from collections.abc import Iterator
from unittest import mock

from ipu_jax.core.pipeline.placed_stages import PlacedStages


@contextlib.contextmanager
def programs_for(platform: str) -> Iterator[None]:
    """Let pipelines that are made or traced in this context be for a platform, such as "tpu"."""
    with mock.patch.object(PlacedStages, "platform", platform), warnings.catch_warnings():
        warnings.filterwarnings("ignore", f"schedule '.*' on {platform}: ", UserWarning)
        yield
