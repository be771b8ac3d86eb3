"""Test that every message of ours that docs/troubleshooting.md explains is still in the code."""

import ast
import re

from support import documents

PAGE = documents.ROOT / "docs/troubleshooting.md"
PACKAGES = ("ipu_jax", "sharded_ops", "mnist_example")


def rendered(node: ast.expr) -> str | None:
    """Return the text of a string in the code, with "…" for each value, or None if it is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def messages_of(text: str) -> list[str]:
    own = " ".join(text[: text.index("## Messages of jax")].split())
    return [first or second for first, second in re.findall(r"- \*\*(?:`` (.+?) ``|`([^`]+)`)\*\*", own)]


def test_each_message_is_in_the_code():
    messages = messages_of(PAGE.read_text())
    assert len(set(messages)) == len(messages) >= 45
    files = [path for package in PACKAGES for path in (documents.ROOT / package).rglob("*.py")]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.expr))
    strings = {text for text in map(rendered, nodes) if text is not None and " " in text}
    assert [message for message in messages if not any(message in text for text in strings)] == []
