"""Test the words of our messages: those that docs/troubleshooting.md explains are in the code, and all are English."""

import ast
import re

from support import documents

PAGE = documents.ROOT / "docs/troubleshooting.md"
PACKAGES = ("ipu_jax", "sharded_ops", "mnist_example")
NOT_ENGLISH = re.compile(
    r"(?<!there )\b(?:is|are) no (?!longer\b|more\b)\S+|\ba training\b(?! (?:run|state|step|script|loop))",
    re.IGNORECASE,
)
"""Words for which English has others: "is not a path", "a training run"."""


def rendered(node: ast.expr) -> str | None:
    """Return the text of a string in the code, with "…" for each value, or None if it is not a string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def strings_of_the_code() -> set[str]:
    """Return the strings with several words in the code of the packages, docstrings included."""
    files = [path for package in PACKAGES for path in (documents.ROOT / package).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.expr))
    return {text for text in map(rendered, nodes) if text is not None and " " in text}


def messages_of(text: str) -> list[str]:
    own = " ".join(text[: text.index("## Messages of jax")].split())
    return [first or second for first, second in re.findall(r"- \*\*(?:`` (.+?) ``|`([^`]+)`)\*\*", own)]


def test_each_message_is_in_the_code():
    messages = messages_of(PAGE.read_text())
    assert len(set(messages)) == len(messages) >= 45
    strings = strings_of_the_code()
    assert [message for message in messages if not any(message in text for text in strings)] == []


def test_no_text_says_that_something_is_no_path():
    samples = "x is no path", "… are no …", "a training that", "there is no path", "is no longer", "not a training step"
    assert [bool(NOT_ENGLISH.search(text)) for text in samples] == [True, True, True, False, False, False]
    strings = [" ".join(text.split()) for text in strings_of_the_code()]
    assert [text for text in strings if NOT_ENGLISH.search(text)] == []
