"""Let links work on the site as they do among the files: pages link to files outside of docs/, and to notebooks.

Such a file, and a program in docs/, gets a page of its own below repository/: Markdown as it is, anything else as a
code block, and a folder by its README.md. So the site is complete without the address of a repository. A notebook
gets a page with its stored outputs, which `make pictures` writes. In `nav`, `folder/*.md` stands for all pages of a
folder. The front page has no sidebars. In a clone of a public repository, the site leads there, and each page to its
own file.
"""

import base64
import json
import posixpath
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
_OUTSIDE = "repository"
_LINK = re.compile(r"(!?\[[^\]]*\]\()(<?)([^)\s>#]+)(#[^)\s>]*)?(>?\))")
# Neither a user's name nor a password, and no address inside a house, such as localhost, 10.0.0.1 or git.lan.
_HOME = re.compile(r"https://(?:[\w-]+\.)+(?!(?:local|lan|internal|home|corp)/)[a-z]{2,}/([\w.~-]+(?:/[\w.-]+)+)")
_LANGUAGES = {".py": "python", ".toml": "toml", ".yml": "yaml", "": "text"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace `folder/*.md` and `../file` in `nav` by the site's pages of them, and give the address of the code."""
    config.nav = _expanded(config.nav)
    if (ROOT / ".git").exists() and shutil.which("git"):  # a folder around this one may be another repository
        words = ["git", "config", "--get", "remote.origin.url"]
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout
        config.repo_url, config.repo_name = home_of(said.strip()) or (None, None)
    return config


def home_of(remote: str) -> tuple[str, str] | None:
    """Return the address that a browser opens, and the repository's name, of a remote on a public host, or None.

    >>> home_of("git@github.com:owner/name.git")
    ('https://github.com/owner/name', 'owner/name')
    """
    found = _HOME.fullmatch(re.sub(r"^git@([^/:]+):", r"https://\1/", remote).rstrip("/").removesuffix(".git"))
    return (found[0], found[1]) if found else None


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, and for each linked program or file outside of docs/."""
    for file in list(files):
        if file.src_uri.endswith(".ipynb"):
            notebook = ROOT / "docs" / file.src_uri
            link = f'\n<a href="{notebook.name}" download>Download this notebook</a>\n\n```python'
            content = as_markdown(notebook).replace("\n```python", link, 1)
            files.append(File.generated(config, _uri(notebook), content=content))
    waiting = [Path(file.abs_src_path) for file in files.documentation_pages() if file.abs_src_path]
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        for target in filter(None, (_target(source, link[3]) for link in _LINK.finditer(source.read_text()))):
            if target in seen or _is_on_site(target):
                continue
            seen.add(target)
            files.append(
                File.generated(config, _uri(target), content=_content(target), inclusion=InclusionLevel.NOT_IN_NAV)
            )
            if target.suffix == ".md":
                waiting.append(target)
            elif target.suffix in (".png", ".svg"):
                raise ValueError(f"{source} shows {target}, which is outside of docs/: put it into docs/pictures/")
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace links that leave docs/, or a page of `repository/`, by links to the pages of the site."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    here = page.file.src_uri
    source = ROOT / here.removeprefix(f"{_OUTSIDE}/").removesuffix(".source.md")
    if not here.startswith(f"{_OUTSIDE}/"):
        source = ROOT / "docs" / here
    if config.repo_url:
        file = source if source.exists() else source.with_suffix(".ipynb")
        page.edit_url = f"{config.repo_url}/blob/HEAD/{file.relative_to(ROOT).as_posix()}"

    def replaced(link: re.Match[str]) -> str:
        target = _target(source, link[3])
        if target is None:
            return link[0]
        return f"{link[1]}{link[2]}{posixpath.relpath(_uri(target), posixpath.dirname(here))}{link[4] or ''}{link[5]}"

    return _LINK.sub(replaced, markdown) if source.suffix == ".md" else markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Keep the theme from asking the repository's host how many stars it has."""
    return output.replace(' data-md-component="source"', "")


def _expanded(nav: Any) -> Any:
    if isinstance(nav, dict):
        return {title: _expanded(entry) for title, entry in nav.items()}
    if isinstance(nav, str):
        return _uri((ROOT / "docs" / nav).resolve()) if nav.startswith("../") else nav
    entries: list[Any] = []
    for entry in nav:
        if isinstance(entry, str) and entry.endswith("*.md"):
            entries += sorted(path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").glob(entry))
        else:
            entries.append(_expanded(entry))
    return entries


def _target(source: Path, link: str) -> Path | None:
    """Return the file that a link of the file `source` leads to, or None if it leads to none of the repository."""
    if ":" in link or source.suffix != ".md":
        return None
    path = (source.parent / link).resolve()
    for found in (path, path / "README.md", path / "index.md"):
        if found.is_file() and found.is_relative_to(ROOT):
            return found
    return ROOT / "docs/index.md" if path.is_dir() and _is_on_site(path) else None


def _is_on_site(path: Path) -> bool:
    """Return whether a file has its place on the site already: it is in docs/, and is not a program."""
    return path.is_relative_to(ROOT / "docs") and path.suffix != ".py"


def _uri(path: Path) -> str:
    """Return the place on the site of a file of the repository."""
    if _is_on_site(path):
        return re.sub(r"\.ipynb$", ".md", path.relative_to(ROOT / "docs").as_posix())
    uri = f"{_OUTSIDE}/{path.relative_to(ROOT).as_posix()}"
    return uri if path.suffix == ".md" else f"{uri}.source.md"


def _content(path: Path) -> str:
    text = path.read_text()
    if path.suffix == ".md":
        return text
    return f"# {path.relative_to(ROOT).as_posix()}\n\n````{_LANGUAGES.get(path.suffix, 'text')}\n{text}\n````\n"


def as_markdown(notebook: Path) -> str:
    """Return a notebook as Markdown: code, what it prints in a block of text behind it, and pictures."""
    return "\n".join(_of_cell(cell) for cell in json.loads(notebook.read_text())["cells"])


def _of_cell(cell: dict[str, Any]) -> str:
    """Return a cell with its outputs, which are printed text, HTML or SVG.

    >>> printed = {"output_type": "stream", "name": "stdout", "text": ["1\\n", "2\\n"]}
    >>> _of_cell({"cell_type": "code", "source": ["print(1)\\n", "print(2)"], "outputs": [printed]})
    '```python\\nprint(1)\\nprint(2)\\n```\\n```text\\n1\\n2\\n```\\n'
    """
    source = "".join(cell["source"]).rstrip()
    if cell["cell_type"] == "markdown":
        return f"{source}\n"
    printed = "".join("".join(each["text"]) for each in cell["outputs"] if each.get("name") == "stdout")
    shown = [_as_html(each["data"]) for each in cell["outputs"] if each.get("name") != "stdout"]
    text = f"```text\n{printed.rstrip()}\n```\n" if printed else ""
    return "".join([f"```python\n{source}\n```\n", text, *shown])


def _as_html(data: dict[str, list[str]]) -> str:
    """Return the value of a cell as HTML, whose pictures are images, as on other pages."""
    html = "".join(data.get("text/html") or data["image/svg+xml"])
    shown = re.sub("<svg.*?</svg>", lambda svg: _image(svg[0]), html, flags=re.DOTALL)
    return f"\n<div>{shown}</div>\n"


def _image(svg: str) -> str:
    data = base64.b64encode(svg.encode()).decode()
    return f'<img alt="The picture that the cell draws" src="data:image/svg+xml;base64,{data}">'
