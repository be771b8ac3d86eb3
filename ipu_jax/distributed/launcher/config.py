"""Write a command line of poprun to a file, and read it back.

    {"num-replicas": 8, "num-instances": 4, "env": ["A=1"], "program": ["python", "train.py"]}

A file is read as command-line words before the typed ones. So the same rules hold for both, and typed words win.

Nothing here imports jax.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

PROGRAM: Final = "program"
NOT_KEPT: Final = ("export_config", "import_config", "overwrite_config", "dry_run", "offline_mode", "help")
"""Options that belong to one command line only."""


def exported(values: Mapping[str, Any], program: Sequence[str]) -> str:
    """Return the text of a file for these options, by name.

    >>> print(exported({"num_replicas": 8, "stall_timeout": float("inf")}, ["python", "train.py"]), end="")
    {
      "num-replicas": 8,
      "stall-timeout": "off",
      "program": ["python", "train.py"]
    }
    """
    kept = {
        name.replace("_", "-"): "off" if value == float("inf") else value
        for name, value in values.items()
        if name not in NOT_KEPT
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in {**kept, PROGRAM: list(program)}.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def imported(path: Path) -> tuple[list[str], list[str]]:
    """Return the words in a file: the options, and the program with its arguments.

    Raises:
        ValueError: the file cannot be read, or does not have the format of `exported`.
    """
    try:
        values = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({getattr(error, 'strerror', None) or 'not text'})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON (line {error.lineno}): write it with --export-config") from error
    program = values.pop(PROGRAM, []) if isinstance(values, dict) else None
    if not isinstance(program, list) or not all(isinstance(word, str) for word in program):
        raise ValueError(f"{path} is no configuration of poprun: write it with --export-config")
    words: list[str] = []
    for name, value in values.items():
        if name.replace("-", "_") in NOT_KEPT:
            raise ValueError(f"{path}: {name!r} belongs on the command line: remove it from the file")
        if name == "verbose" and isinstance(value, int):
            words += ["-v"] * value
        elif isinstance(value, bool):
            words.append(f"--{name}={'yes' if value else 'no'}")
        elif isinstance(value, list):
            words += [f"--{name}={one}" for one in value]
        else:
            words.append(f"--{name}={value}")
    return words, program
