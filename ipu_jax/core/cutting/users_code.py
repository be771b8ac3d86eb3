"""Name an operation as its user knows it: the line of his file, the modules around it, the primitive."""

import functools
import os
import traceback
from pathlib import Path
from typing import Any, Final

from ipu_jax.base.annotations import Eqn
from ipu_jax.base.jaxprs import CHECKPOINTS
from ipu_jax.core.cutting.scan_layers import ScanLayer, ScanStack

_NOT_THE_USERS: Final = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{os.sep}ipykernel_",  # a cell of a notebook: its file is called by a number
)


def line_of(operation: Eqn) -> str:
    """Return "file.py:12", the innermost line of the user's that computes an operation; "" if there is none."""
    found = _equation(operation).source_info.traceback
    frames = found.frames if found is not None else ()
    return next((f"{os.path.basename(f.file_name)}:{f.line_num}" for f in frames if _is_users(f.file_name)), "")


def _is_users(file: str) -> bool:
    return not file.startswith("<") and not any(part in file for part in _NOT_THE_USERS)


def is_ours(error: BaseException) -> bool:
    """Return whether this package raised an error itself."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return frames[-1].startswith(_NOT_THE_USERS[2])


def users_line(error: BaseException) -> str:
    """Return " (file.py:12)", the innermost line of the user's in an error's traceback, or ""."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    users = [f" ({os.path.basename(file)}:{line})" for file, line in frames if _is_users(file)]
    return users[-1] if users else ""


def users_call() -> str:
    """Return " (file.py:12)", the innermost line of the user's that is being run, or ""."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(None)]
    return next((f" ({os.path.basename(file)}:{line})" for file, line in frames if _is_users(file)), "")


def at_line(operation: Eqn) -> str:
    """Return " (file.py:12)", or ""."""
    line = line_of(operation)
    return f" ({line})" if line else ""


def name_of(operation: Eqn) -> str:
    """Return the name of an operation's primitive, such as "dot_general", as its user knows it."""
    eqn = _equation(operation)
    if eqn.primitive.name in CHECKPOINTS:
        return "jax.checkpoint"
    return type(eqn.params["_prim"]).__name__ if "_prim" in eqn.params else eqn.primitive.name


def scopes_of(operation: Eqn) -> list[str]:
    """Return the names of the modules, or `jax.named_scope`s, around an operation, the outermost first."""
    return _scopes(_equation(operation).source_info.name_stack)


@functools.lru_cache(1024)
def _scopes(stack: Any) -> list[str]:
    scopes = str(stack).split("/") if stack.stack else []
    # vmap() is not a module, and neither are the subscripts of einsum
    return [scope for scope in scopes if scope and "(" not in scope and "->" not in scope and "," not in scope]


def _equation(operation: Eqn) -> Eqn:
    return operation.scan if isinstance(operation, ScanLayer | ScanStack) else operation
