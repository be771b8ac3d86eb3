"""Make programs for another platform than the one on which they run: a TPU's or a GPU's program runs on CPUs, too."""

import contextlib
from collections.abc import Iterator
from unittest import mock

from ipu_jax.core.analysis import schedule_choice


@contextlib.contextmanager
def programs_for(platform: str) -> Iterator[None]:
    """Let pipelines that are traced meanwhile have the programs of a platform, such as "tpu"."""
    make_plan = schedule_choice.make_plan
    other = lambda *args, **options: make_plan(*args, **{**options, "platform": platform})  # noqa: E731
    with mock.patch.object(schedule_choice, "make_plan", other):
        yield
