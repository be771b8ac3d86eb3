"""Test that the documentation builds without a warning or a network, and that all links lead somewhere."""

import functools
import html.parser
import os
import posixpath
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote

import pytest

import ipu_jax
import sharded_ops
from support import documents, public_api

ROOT = documents.ROOT
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


class Links(html.parser.HTMLParser):
    """Collects what a built page links to, what it loads, and the anchors that it has."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loaded += [given[name] for name in ("href", "src") if given.get(name)]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Links]:
    """Return the pages of the site, built as `make docs` builds it, by their paths."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: Links(path.read_text() if path.suffix == ".html" else "") for name, path in files.items()}


def test_all_links_of_the_site_lead_to_a_page_and_an_anchor(site: dict[str, Links]):
    wrong: list[str] = []
    for name, page in site.items():
        if name == "404.html":  # its links are those of the root of a server
            continue
        for link in [*page.links, *page.loaded]:
            if re.match(r"[a-z]+:", link):
                continue
            path, _, anchor = link.partition("#")
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), unquote(path))) if path else name
            target = target if target in site else f"{target}/index.html".removeprefix("./")
            if target not in site or (anchor and unquote(anchor) not in site[target].anchors):
                wrong.append(f"{name}: {link}")
    assert not wrong


def test_the_site_loads_nothing_from_elsewhere(site: dict[str, Links]):
    assert {link for page in site.values() for link in page.loaded if re.match(r"([a-z]+:)?//", link)} == set()


def test_the_reference_has_every_public_name(site: dict[str, Links]):
    anchors = set().union(*(page.anchors for name, page in site.items() if name.startswith("reference/")))
    names = {f"ipu_jax.{name}" for name in ipu_jax.__all__ if not isinstance(getattr(ipu_jax, name), ModuleType)}
    for module in public_api.SUBJECTS:
        own = {*getattr(ipu_jax, module).__all__} - {*ipu_jax.__all__}
        names |= {f"ipu_jax.{module}.{name}" for name in own}
    names |= {f"sharded_ops.{name}" for name in sharded_ops.__all__}
    names |= {f"ipu_jax.distributed.popdist.{name}" for name in ipu_jax.popdist.__all__}
    names |= {f"ipu_jax.run.cli.{name}" for name in ipu_jax.cli.__all__}
    assert names - anchors == set()


@functools.cache
def anchors_of(path: Path) -> set[str]:
    """Return the anchors that a repository's viewer makes of a Markdown file's headings."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", path.read_text()), re.MULTILINE)
    texts = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_all_links_lead_somewhere_among_the_files_too(page: Path):
    for link in _LINK.findall(_FENCED.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor and target.suffix == ".md":
            assert anchor in anchors_of(target), link
