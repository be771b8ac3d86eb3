"""Run cases for `run`: read `[kind, seed, case]` from each line, run that case, and write its error, or ""."""

import importlib
import json
import os
import sys
import traceback

CASES_BETWEEN_CLEARINGS = 10


def failure_of(kind: str, seed: int, case: int) -> str:
    """Return the description and the error of this case, or "" if it succeeds."""
    from random_programs.dice import Dice

    described = "(it could not be drawn)"
    try:
        module = importlib.import_module(kind if "." in kind else f"random_programs.{kind}")
        drawn = module.Case(Dice(kind, seed, case))
        described = str(drawn)
        drawn.check()
    except Exception as error:
        return f"{described}\n{''.join(traceback.format_exception(error)[-4:])}"
    return ""


def main() -> None:
    # the output of a case must not be mixed with the answers
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import jax

    for number, line in enumerate(sys.stdin, 1):
        error = failure_of(*json.loads(line))
        if number % CASES_BETWEEN_CLEARINGS == 0:
            jax.clear_caches()
        answers.write(json.dumps(error) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
