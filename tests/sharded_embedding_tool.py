"""Runs `sharded-embedding-tool` where the original's users look for it: `python tests/sharded_embedding_tool.py`."""

import sys

from ipu_jax.tools.sharded_embedding_tool import main

if __name__ == "__main__":
    sys.exit(main())
