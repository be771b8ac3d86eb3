"""Run this checkout's `sharded-embedding-tool` from where users of the original look for it.

What is installed does not count: the packages beside `tests` come first.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_jax.tools.sharded_embedding_tool import command

if __name__ == "__main__":
    command()
