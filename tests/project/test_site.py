"""Test that the documentation builds without a warning or a network, and that all links lead somewhere."""

import functools
import html.parser
import inspect
import pkgutil
import posixpath
import re
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest
import yaml

import ipu_jax
import sharded_ops
from docs.website.hooks import home_of
from support import documents, public_api
from support.built_site import ADDRESS, built_site

ROOT = documents.ROOT
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("*/README.md")])
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


class Links(html.parser.HTMLParser):
    """Collects what a built page links to, what it loads, its anchors in order, and the signatures that it shows."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: dict[str, None] = {}
        self.signatures: list[str] = []
        self._depth = 0  # of the div that is open inside a signature
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name]: None for name in ("id", "name") if given.get(name)}
        if tag == "div" and (self._depth or "doc-signature" in given.get("class", "")):
            self.signatures += [] if self._depth else [""]
            self._depth += 1
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "iframe", "source"):
            self.loaded += [given[name] for name in ("href", "src") if given.get(name)]

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag == "div" and self._depth > 0

    def handle_data(self, data: str) -> None:
        if self._depth:
            self.signatures[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Links]:
    """Return the pages of the site by their paths."""
    folder = built_site(tmp_path_factory)
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: Links(path.read_text() if path.suffix == ".html" else "") for name, path in files.items()}


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: dict[str, Links]):
    assert {link for page in site.values() for link in page.loaded if re.match(r"([a-z]+:)?//", link)} == set()


@pytest.mark.parametrize(
    ("remote", "home"),
    [
        (f"{ADDRESS}.git", ADDRESS),
        (f"{ADDRESS}/", ADDRESS),
        ("git@gitlab.com:group/part/name.git", "https://gitlab.com/group/part/name"),
        ("", None),
        ("/srv/git/name", None),
        ("file:///srv/git/name", None),
        ("http://github.com/owner/name", None),
        ("https://localhost/owner/name", None),
        ("https://git.lan/owner/name", None),
        ("https://10.0.0.1/owner/name", None),
        ("https://github.com:8443/owner/name", None),
        ("https://user@github.com/owner/name", None),
        ("https://user:secret@github.com/owner/name", None),
        ("https://github.com/owner/name?token=secret", None),
        ("root@github.com:owner/name", None),
    ],
)
def test_the_site_leads_to_a_public_address_and_shows_no_other(remote: str, home: str | None):
    assert home_of(remote) == (home and (home, home.split("/", 3)[3]))


def public_names() -> set[str]:
    names = {f"ipu_jax.{name}" for name in ipu_jax.__all__ if not isinstance(getattr(ipu_jax, name), ModuleType)}
    for module in public_api.SUBJECTS:
        own = {*getattr(ipu_jax, module).__all__} - {*ipu_jax.__all__}
        names |= {f"ipu_jax.{module}.{name}" for name in own}
    names |= {f"sharded_ops.{name}" for name in sharded_ops.__all__}
    names |= {f"ipu_jax.popdist.{name}" for name in ipu_jax.popdist.__all__}
    return names | {f"ipu_jax.cli.{name}" for name in ipu_jax.cli.__all__}


@pytest.mark.slow
def test_the_reference_shows_every_public_name(site: dict[str, Links]):
    anchors = set().union(*(page.anchors for name, page in site.items() if name.startswith("reference/")))
    assert public_names() - anchors == set()


def test_the_reference_has_a_block_for_every_public_name():
    blocks = documented()
    assert {name for name in public_names() - blocks.keys() if not name.startswith("ipu_jax.popdist.")} == set()
    assert "ipu_jax.popdist" in blocks  # whose names are all shown


@pytest.mark.slow
def test_every_page_can_search_without_a_server(site: dict[str, Links]):
    assert "search/search_index.js" in site
    for name, page in site.items():
        assert not name.endswith(".html") or any("iframe-worker" in script for script in page.loaded), name


def documented() -> dict[str, tuple[str, Any]]:
    """Return the page and the option `members` of each name that the reference's pages document."""
    found: dict[str, tuple[str, Any]] = {}
    for path in sorted((ROOT / "docs/reference").glob("*.md")):
        for name, options in re.findall(r"^::: (\S+)\n((?: {4}.*\n)*)", path.read_text(), re.MULTILINE):
            given = yaml.safe_load(options) if options else {"options": {}}
            found[name] = f"reference/{path.stem}.html", given["options"].get("members")
    return found


def public_members(cls: type) -> set[str]:
    """Return the names of methods and properties, inherited ones of this project included."""
    kinds = (classmethod, staticmethod, property, functools.cached_property)
    packages = ("ipu_jax", "sharded_ops")
    own = [vars(base) for base in cls.__mro__ if base.__module__.split(".")[0] in packages]
    found = {name: value for members in reversed(own) for name, value in members.items()}
    is_public = lambda name: not name.startswith("_") or name == "__call__"
    return {
        name
        for name, value in found.items()
        if is_public(name) and (isinstance(value, kinds) or inspect.isfunction(value))
    }


# Members that other parts of the library call, and users do not.
INTERNAL = {
    "Evaluation": {"check"},
    "Forward": {"check"},
    "Pipeline": {"lowered"},
    "Recording": {"devices", "dispatched", "dispatching", "during", "mesh", "planned", "stepping", "ticks", "waited"},
    "Replicas": {"check", "check_params"},
    "Sharded": {"keys"},
    "Stage": {"checkpointed", "function", "groups", "needs_key", "place"},
    "TrainOptions": {"every"},
    "TrainStep": {"check_state", "lowered", "offloading"},
}


@pytest.mark.slow
def test_the_reference_shows_the_members_that_it_lists_in_their_order_and_every_public_one(site: dict[str, Links]):
    excused = dict(INTERNAL)
    for name, (page, listed) in documented().items():
        cls = pkgutil.resolve_name(name)
        if not inspect.isclass(cls):
            assert not listed, f"{name} is not a class: give each of its members a block"
            continue
        own = [anchor.removeprefix(f"{name}.") for anchor in site[page].anchors if anchor.startswith(f"{name}.")]
        if listed is not None:
            assert own == (listed or []), name
        hidden = public_members(cls) - set(own)
        assert hidden == excused.pop(cls.__name__, set()), f"{name}: list them, or excuse them in INTERNAL"
    assert not excused


def test_pages_and_programs_call_no_member_that_the_reference_leaves_out():
    paths = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*"), *ROOT.glob("mnist_example/*.py")]
    text = "".join(path.read_text() for path in paths if path.suffix in (".md", ".py") and path.stem != "CHANGELOG")
    for variable, hidden in (("pipeline", {"placement"}), ("step", {"placement", *INTERNAL["TrainStep"]})):
        assert re.findall(rf"\b{variable}\.[a-z]\w*\(", text)
        assert re.findall(rf"\b{variable}\.(?:{'|'.join(hidden)})\b", text) == []


@pytest.mark.slow
def test_signatures_show_values_that_a_reader_can_write(site: dict[str, Links]):
    shown = [text for name, page in site.items() if name.startswith("reference/") for text in page.signatures]
    assert len(shown) > 200
    assert [text for text in shown if re.search(r"\b_[a-z]|lambda|object at", text, re.IGNORECASE)] == []


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
