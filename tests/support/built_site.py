"""Build the documentation once for all tests of a run, whichever worker asks first."""

import fcntl
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from support import documents

ADDRESS: Final = "https://github.com/owner/name"
"""Where the code of the built site is at home."""


def built_site(temporary: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built as `make docs` builds it in a clone of `ADDRESS`.

    Raises:
        AssertionError: mkdocs fails, or warns of something.
    """
    of_run = temporary.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        of_run = of_run.parent
    folder = of_run / "site"
    with (of_run / "site.lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not lock.seek(0, os.SEEK_END):  # nobody has built it yet
            remote = {"KEY_0": "remote.origin.url", "VALUE_0": f"{ADDRESS}.git", "COUNT": "1"}
            environment = os.environ | {f"GIT_CONFIG_{name}": value for name, value in remote.items()}
            done = subprocess.run(
                [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
                cwd=documents.ROOT,
                env=environment | {"NO_MKDOCS_2_WARNING": "1"},
                capture_output=True,
                text=True,
                timeout=240,
            )
            assert done.returncode == 0, done.stderr
            assert "WARNING" not in done.stderr, done.stderr
            lock.write("built")
    return folder
