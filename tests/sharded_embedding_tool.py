"""Run `sharded-embedding-tool` from where users of the original look for it, `tests/sharded_embedding_tool.py`."""

import sys

from ipu_jax.tools.sharded_embedding_tool import main

if __name__ == "__main__":
    sys.exit(main())
