"""Find the user's own line and module of an equation, for messages and names."""

import os
from pathlib import Path
from typing import Any, Final

from ipu_jax.core.cutting.program import Layer, Stack

_NOT_THE_USERS: Final = (
    f"{os.sep}site-packages{os.sep}",
    f"{os.sep}dist-packages{os.sep}",
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{os.sep}ipykernel_",  # a cell of a notebook: its file is called by a number
)


def line_of(operation: Any) -> str:
    """Return "file.py:12", the innermost line of the user's that computes an operation; "" if there is none."""
    traceback = _equation(operation).source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith("<") and not any(part in frame.file_name for part in _NOT_THE_USERS):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def at_line(operation: Any) -> str:
    """Return " (file.py:12)", or ""."""
    line = line_of(operation)
    return f" ({line})" if line else ""


def name_of(operation: Any) -> str:
    """Return the name of an operation's primitive, such as "dot_general"."""
    return _equation(operation).primitive.name


def scopes_of(operation: Any) -> list[str]:
    """Return the names of the modules, or `jax.named_scope`s, around an operation, the outermost first."""
    stack = _equation(operation).source_info.name_stack
    scopes = str(stack).split("/") if stack.stack else []
    return [scope for scope in scopes if scope and "(" not in scope]  # vmap() is no module


def _equation(operation: Any) -> Any:
    return operation.scan if isinstance(operation, Layer | Stack) else operation
