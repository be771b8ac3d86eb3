"""Run `sharded-matmul-tool` in the same way as `sharded_embedding_tool.py`: `python tests/sharded_matmul_tool.py`."""

import sys

from ipu_jax.tools.sharded_matmul_tool import main

if __name__ == "__main__":
    sys.exit(main())
