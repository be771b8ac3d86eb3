"""Look at an open page for what nobody should see: parts that are cut, texts over texts or too pale, losses in print.

Each function returns a line per fault, with the beginning of the text concerned. `looks.js` measures in the page.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
from axe_playwright_python.sync_playwright import Axe
from PIL import Image

PAPER: Final = 718  # CSS pixels of A4 between margins of 1 cm
_SCRIPT: Final = Path(__file__).with_suffix(".js").read_text()


def cut_in(page: Any) -> list[str]:
    """Return what is cut, or wider than the window and not in a frame that scrolls, or written over another text."""
    return page.evaluate(f"() => {{ {_SCRIPT} return cut(); }}")


def pale_in(page: Any) -> list[str]:
    """Return the texts whose contrast is below WCAG's AA, as axe-core judges."""
    found = Axe().run(page, options={"runOnly": ["color-contrast"], "resultTypes": ["violations"]}).response
    return [f"pale: {node['html'][:80]}" for rule in found["violations"] for node in rule["nodes"]]


def lost_in_print(page: Any) -> list[str]:
    """Return what paper would not show as it should, for a reader with a dark screen. The page stays as printed."""
    page.set_viewport_size({"width": PAPER, "height": 1000})
    page.emulate_media(media="print", color_scheme="dark")
    return page.evaluate(f"() => {{ {_SCRIPT} return [...lost(), ...cut()]; }}")


def glaring_in(shot: Path) -> list[str]:
    """Return whether more of a dark page than its texts is white."""
    share = (np.asarray(Image.open(shot).convert("RGB")) > 240).all(-1).mean()
    return [f"{share:.0%} of the page is white"] if share > 0.03 else []
