"""Fetch files of other projects at pinned commits, and import them. Nothing of them is in this repository.

github.com/google/flax @ 18f8f31: examples/lm1b/models.py  -->  .strangers/google/flax/18f8f31/examples/lm1b/models.py
"""

import contextlib
import dataclasses
import importlib
import os
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

FOLDER: Final = Path(__file__).parents[2] / ".strangers"
"""Where fetched files stay; git ignores it."""
_FROM: Final = os.environ.get("STRANGERS_FROM", "https://raw.githubusercontent.com")


@dataclasses.dataclass(frozen=True)
class Files:
    """Hold where some files of a project are.

    Attributes:
        repository: such as "google/flax".
        commit: 40 hex digits, so that the files never change.
        folder: in which the imports of these files begin, "" for the top.
        paths: of the files, in the folder.
    """

    repository: str
    commit: str
    folder: str
    paths: tuple[str, ...]

    def fetch(self) -> Path:
        """Fetch the files that are not there yet, and return the folder.

        Raises:
            OSError: there is no network, or no such file.
        """
        at = f"{self.repository}/{self.commit}"
        for path in self.paths:
            inside = f"{self.folder}/{path}" if self.folder else path
            target = FOLDER / at / inside
            if not target.exists():
                with urllib.request.urlopen(f"{_FROM}/{at}/{inside}", timeout=60) as answer:
                    text = answer.read()
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(text)
        return FOLDER / at / self.folder

    @contextlib.contextmanager
    def imported(self, name: str) -> Iterator[ModuleType]:
        """Import a module of these files; names such as `models` and `layers` are taken back afterwards."""
        before = {*sys.modules}
        sys.path.insert(0, str(self.fetch()))
        try:
            yield importlib.import_module(name)
        finally:
            sys.path.pop(0)
            for added in {*sys.modules} - before:
                if str(FOLDER) in str(getattr(sys.modules[added], "__file__", None) or ""):
                    del sys.modules[added]
