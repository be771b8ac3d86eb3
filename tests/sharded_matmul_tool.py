"""Run this checkout's `sharded-matmul-tool`, in the same way as `sharded_embedding_tool.py`.

What is installed does not count: the packages beside `tests` come first.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ipu_jax.tools.sharded_matmul_tool import command

if __name__ == "__main__":
    command()
