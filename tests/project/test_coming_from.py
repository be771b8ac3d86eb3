"""Test that what docs/coming-from/ names as ours exists: arguments, methods and functions."""

import inspect
import re

import optax
import pytest

import ipu_jax
import sharded_ops
from support import documents

DOCS = documents.ROOT / "docs"
PAGES = sorted((DOCS / "coming-from").glob("*.md"))
PUBLIC = {name: getattr(package, name) for package in (ipu_jax, sharded_ops) for name in package.__all__}
CODE = re.compile(r"`([^`]+)`")
CALL = re.compile(r"(?<![.\w])([A-Za-z_]\w*)\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)")
KEYWORD = re.compile(r"(?:^|[,(]\s*)(\w+)=(?!=)")
METHOD = re.compile(r"(?<![.\w])([A-Za-z_]\w*)\.([a-z]\w*)")
OBJECTS = {
    "pipeline": ipu_jax.Pipeline,
    "step": ipu_jax.make_train_step(lambda w, microbatch: w, optax.sgd(0.1)),
    "schedule": ipu_jax.Schedule,
    "outputs": ipu_jax.StepOutputs(None, None, None),
    "checkpoints": ipu_jax.Checkpoints,
}


def ours(page):
    """Return the code of the second cells of tables, which is ours; the first cells are theirs."""
    rows = [re.split(r"(?<!\\)\|", line) for line in page.read_text().splitlines() if line.startswith("|")]
    return [code for row in rows for code in CODE.findall(row[2])]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_arguments_and_methods_that_are_named_exist(page):
    seen = 0
    for code in ours(page):
        for name, arguments in CALL.findall(code):
            if name in PUBLIC and arguments:
                outer = re.sub(r"\([^()]*\)", "", arguments)  # without the arguments of inner calls
                assert set(KEYWORD.findall(outer)) <= {*inspect.signature(PUBLIC[name]).parameters}, code
                seen += 1
        for name, attribute in METHOD.findall(code):
            owner = OBJECTS.get(name, PUBLIC.get(name))
            if owner is not None:
                assert hasattr(owner, attribute), code
                seen += 1
    assert seen > 10
