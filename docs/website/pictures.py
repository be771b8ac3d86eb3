"""Draw every picture of the documentation, and run its notebook. `make pictures` does it in about three minutes.

schedules, bytes   by the code of the pages that show them, or by `SCHEDULES`
plots              from the record of the benchmarks, benchmarks/results.json
gallery            from the programs of the gallery, some of which train
screens            by a browser, of pages that real runs wrote: timeline.png, report.png

python -m docs.website.pictures [NAME ...]    only these, such as pipelined-step.svg
"""

import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from docs.website import cells, gallery, plots
from ipu_jax import configure
from ipu_jax.core.schedules import Schedule, make_schedule
from ipu_jax.core.schedules.figures import written
from support import browsing

DOCS: Final = Path(__file__).parents[1]
FOLDER: Final = DOCS / "pictures"
NOTEBOOK: Final = DOCS / "tutorials/notebook.ipynb"
_ON_ALL: Final = (None, None, 0, 1, None, None)  # the stages of tutorials/gpt.md
SCHEDULES: Final[dict[str, Callable[[], Schedule]]] = {
    "gpt-stages.svg": lambda: make_schedule("grouped", placement=_ON_ALL, gradient_accumulation=4),
}
_DRAWN: Final = re.compile(r"\.plot\(\"([\w-]+\.svg)\"")

TRACED: Final = """
import jax.numpy as jnp, numpy as np, optax
from ipu_jax import Pipeline, configure, make_train_step
from ipu_jax.observe import RunLog, trace, write_report

configure(2)
weights, x = [np.eye(512, dtype=np.float32)] * 12, np.ones((6, 512, 512), np.float32)

def loss(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)

pipeline = Pipeline.from_function(loss, weights, x[0], ipus=2, schedule="1f1b", gradient_accumulation=6)
step = make_train_step(pipeline, optax.sgd(0.1))
state = step.init(weights)
with trace("traced", steps=1) as recording:
    for _ in range(5):
        state, _ = step(state, x)
write_report("run.html", RunLog(), timeline=recording.timeline)
"""


def programs() -> dict[str, str]:
    """Return, for each picture that a page's code draws, the code of the page up to there."""
    found: dict[str, str] = {}
    for page in sorted(DOCS.glob("*.md")):
        blocks = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
        drawing = [block for block in blocks if _DRAWN.search(block)]
        found |= {name: "\n".join(drawing) for block in drawing for name in _DRAWN.findall(block)}
    return found


def draw_by(program: str, folder: Path) -> None:
    """Run a program in a folder, into which it draws."""
    path = os.pathsep.join([str(DOCS.parent), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True, env={**os.environ, "PYTHONPATH": path})


def screen(page: Path, name: str, first: str, last: str) -> None:
    """Take a picture of a page from one part to another, sharp enough for a screen with small pixels."""
    from PIL import Image  # with matplotlib

    chromium = browsing.chromium()
    if chromium is None:
        raise SystemExit(f"{name} needs Chromium or Chrome: install one, or name it in CHROMIUM")
    with (
        browsing.started(chromium) as browser,
        browsing.opened(browser, page, width=800, device_scale_factor=2) as seen,
    ):
        top, end = (seen.page.locator(part).first.bounding_box() for part in (first, last))
        clip = {"x": 0, "y": top["y"] - 12, "width": 800, "height": end["y"] + end["height"] - top["y"] + 24}
        shot = seen.page.screenshot(clip=clip, full_page=True)
    with Image.open(io.BytesIO(shot)) as image:
        image.quantize(64, dither=Image.Dither.NONE).save(FOLDER / name, optimize=True)  # a third of the bytes


def timeline(folder: Path) -> None:
    draw_by(TRACED, folder)
    screen(folder / "run.html", "timeline.png", "#canvas", "#legend")


def notebook(folder: Path) -> None:
    cells.execute(NOTEBOOK, folder)
    screen(folder / "spirals.html", "report.png", "h1", "#curves")


SCREENS: Final[dict[str, Callable[[Path], Any]]] = {"timeline.png": timeline, "report.png": notebook}


def main(names: list[str]) -> None:
    """Draw the pictures of these names, or all."""
    of_pages = programs()
    chosen = names or [*of_pages, *SCHEDULES, *plots.PLOTS, *gallery.GALLERY, *SCREENS]
    for program in dict.fromkeys(of_pages[name] for name in chosen if name in of_pages):
        draw_by(program, FOLDER)
    for name in chosen:
        print(name, flush=True)
        if name in SCHEDULES:
            SCHEDULES[name]().plot(FOLDER / name)
        elif name in plots.PLOTS:
            written(FOLDER / name, plots.PLOTS[name])
        elif name in gallery.GALLERY:
            written(FOLDER / name, gallery.GALLERY[name])
        elif name in SCREENS:
            with tempfile.TemporaryDirectory() as folder:
                SCREENS[name](Path(folder))


if __name__ == "__main__":
    configure(8)
    main(sys.argv[1:])
