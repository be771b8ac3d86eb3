"""Runs `sharded-matmul-tool` as `sharded-embedding-tool` can be run, `python tests/sharded_matmul_tool.py`."""

import sys

from ipu_jax.tools.sharded_matmul_tool import main

if __name__ == "__main__":
    sys.exit(main())
