"""Test that one command makes every picture of the documentation, and that those it can make here are up to date."""

import dataclasses
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import results
from docs.website import gallery, pictures, plots
from docs.website.cells import outputs_of
from support import documents

pytest.importorskip("matplotlib")


def drawing(svg: str) -> tuple[list[str], list[float]]:
    """Return what a picture says, and where it draws, in points: another matplotlib may write other bytes."""
    nodes = list(ET.fromstring(svg).iter())
    numbers = re.findall(r"-?\d+\.?\d*", " ".join(node.get("d", "") for node in nodes))
    return [node.text or "" for node in nodes if node.tag.endswith("}text")], [float(number) for number in numbers]


def assert_same(name: str, drawn: str, within: float = 0.01) -> None:
    (words, places), (old_words, old_places) = drawing(drawn), drawing((pictures.FOLDER / name).read_text())
    assert words == old_words, f"{name}: make pictures"
    assert places == pytest.approx(old_places, abs=within), f"{name}: make pictures"


def test_each_picture_is_made_by_the_command_and_shown_somewhere():
    made = [*pictures.programs(), *pictures.SCHEDULES, *plots.PLOTS, *gallery.GALLERY, *pictures.SCREENS]
    assert sorted(made) == sorted(path.name for path in pictures.FOLDER.iterdir())
    pages = [documents.ROOT / "README.md", *pictures.DOCS.rglob("*.md"), pictures.NOTEBOOK]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w-]+\.\w+)", page.read_text())}
    assert shown <= {*made}


@pytest.mark.parametrize("program", sorted(set(pictures.programs().values())), ids=lambda program: program[-30:-2])
def test_what_pages_draw_is_what_they_show(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(program, {})
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {name for name, of in pictures.programs().items() if of == program}
    for name in drawn:
        assert_same(name, (tmp_path / name).read_text())


@pytest.mark.parametrize("name", [*pictures.SCHEDULES, *plots.PLOTS])
def test_the_other_drawings_are_up_to_date(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main([name])
    monkeypatch.undo()
    assert_same(name, (tmp_path / name).read_text())


@pytest.mark.fast("gallery-unet.svg", "gallery-experts.svg")
@pytest.mark.parametrize("name", gallery.GALLERY)
def test_a_picture_of_the_gallery_is_up_to_date(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    pictures.main([name])
    monkeypatch.undo()
    if name in gallery.TRAINED:  # on another machine, points lie elsewhere
        drawn, shown = (" ".join(drawing((folder / name).read_text())[0]) for folder in (tmp_path, pictures.FOLDER))
        assert documents.where_shown(shown, drawn) is not None, drawn
    else:  # jax 0.12 counts other FLOPs
        assert_same(name, (tmp_path / name).read_text(), within=4.0 if name in gallery.BY_FLOPS else 0.01)


def test_the_gallery_has_an_entry_with_the_message_of_each_small_picture():
    entries = re.findall(r"^!\[(.*)\]\(pictures/(.*)\)$", (pictures.DOCS / "gallery.md").read_text(), re.MULTILINE)
    assert [name for _, name in entries] == [*gallery.GALLERY]
    for said, name in entries:
        assert said in drawing((pictures.FOLDER / name).read_text())[0]
        assert (pictures.FOLDER / name).stat().st_size < 60_000


def test_plots_say_what_the_record_says_and_pages_say_it_too(monkeypatch: pytest.MonkeyPatch):
    titles = {name: draw().get_suptitle() for name, draw in plots.PLOTS.items()}
    assert titles["rivals-memory.svg"].startswith("64 micro-batches take 119.8 MB")
    for page in pictures.DOCS.rglob("*.md"):
        for said, name in re.findall(r"!\[(.*?)\]\([./]*pictures/(\S+)\)", page.read_text()):
            assert said == titles.get(name, said), page
    runs = results.read()
    figures = [dataclasses.replace(one, value=77.7) for one in runs["rivals"].figures]
    monkeypatch.setattr(results, "read", lambda: {"rivals": dataclasses.replace(runs["rivals"], figures=figures)})
    assert plots.memory().get_suptitle().startswith("64 micro-batches take 77.7 MB of memory")


def test_the_lesson_has_the_ratios_of_its_picture():
    found = {one.name: one.value for one in results.read()["distributed_lesson"].figures}
    of = lambda kind, step: found[f"examples/s / one replica's, {kind}, 8 replicas{step}"]
    page = " ".join((pictures.DOCS / "tutorials/distributed.md").read_text().split())
    for shown in (
        f"the ratio is {of('decoding', ''):.2f}.",
        f"the ratio is {of('decoding', ', only reading') / of('decoding', ''):.2f}.",
        f"gains nothing, {of('decoding', ', 4 workers') / of('decoding', ''):.2f} times the speed",
        f"train {of('waiting', ', 4 workers') / of('waiting', ''):.1f} times as fast with four workers",
    ):
        assert shown in page


def test_a_cell_shows_what_jupyter_would(monkeypatch: pytest.MonkeyPatch):
    names: dict[str, object] = {}
    assert outputs_of("class A:\n    def _repr_html_(self): return '<b>a</b>'\n", names) == []
    printed, shown = outputs_of("print('b')\nA()", names, 3)
    assert (printed["text"], shown["execution_count"]) == (["b\n"], 3)
    assert shown["data"]["text/html"] == ["<b>a</b>"]
    monkeypatch.setenv("MPLBACKEND", "Agg")
    [drawn] = outputs_of("import matplotlib.pyplot as plt\nplt.figure().suptitle('c');", names)
    assert ">c</text>" in "".join(drawn["data"]["image/svg+xml"])
    assert outputs_of("plt.get_fignums()", names)[0]["data"]["text/plain"] == ["[]"]
    json.dumps(drawn)
