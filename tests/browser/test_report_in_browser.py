"""Test the page of a run in a browser, as people see it: wide and narrow, in light and dark, and on paper.

Each program runs once, in the one test that looks at its page. Pictures of the pages are left for whoever changes them.
"""

import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from ipu_jax import Feed, Pipeline, fit, make_train_step
from ipu_jax.observe import RunLog, write_report
from support import browsing, launched, looks, mnist_instance


def gpt(params, tokens):
    """Return the loss of a cut GPT: attention of one head and an MLP, twice."""
    x = params["tokens"][tokens[:, :-1]]
    for p in params["blocks"]:
        query, key, value = jnp.split(jax.nn.standardize(x) @ p["qkv"], 3, -1)
        scores = query @ key.swapaxes(1, 2) / 4
        x += jax.nn.softmax(jnp.where(np.tri(scores.shape[-1]), scores, -1e9)) @ value
        x += jax.nn.relu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:]).mean()


def of_a_cut_gpt(folder, monkeypatch):
    drawn = np.random.default_rng(0)
    w = lambda *shape: drawn.normal(0, 0.1, shape).astype(np.float32)
    blocks = [{"qkv": w(16, 48), "up": w(16, 32), "down": w(32, 16)} for _ in range(2)]
    params = {"tokens": w(32, 16), "blocks": blocks, "head": w(16, 32)}
    texts = ((drawn.integers(0, 4, (64, 1)) + np.arange(9)) % 8).astype(np.int32)
    options: Any = {"ipus": 4, "gradient_accumulation": 8, "schedule": "1f1b"}
    step = make_train_step(Pipeline.from_function(gpt, params, texts[:2], **options), optax.adam(0.01))
    with Feed(texts, step=step, micro_batch=2) as feed:
        files: Any = {"report": folder / "run.html", "trace": folder / "traced"}
        fit(step, step.init(params), feed, epochs=3, title="A cut GPT", say=[].append, **files)


MNIST = "--synthetic-data --batch-size 4 --gradient-accumulation-count 4 --epochs 1 --no-progress --report run.html"
MNIST += " --trace traced --pipeline-mode "


def of_mnist(*flags):
    def train(folder, monkeypatch):
        monkeypatch.chdir(folder)
        words = (str(folder), "170", "run_sharded_mnist", *MNIST.split(), *flags)
        assert mnist_instance.main(*words, patch=monkeypatch.setattr) == 0

    return train


def of_two_instances(folder, monkeypatch):
    words = f"{mnist_instance.__file__} {folder} 170 run_sharded_mnist {MNIST} concurrent".split()
    counts = ["--num-replicas", "2", "--num-instances", "2", "--ipus-per-replica", "2"]
    path = f"{launched.ROOT}:{launched.ROOT / 'tests'}"
    ran = launched.poprun(*counts, sys.executable, *words, cwd=folder, PYTHONPATH=path, MNIST_DIR="")
    assert ran.status == 0, ran.err


def write_log(log, updates):
    """Write the events of a run with this number of updates, without an end."""
    data, command = f"/data/{'digits' * 30}", ["train.py", "--rate", "0.1"]  # a word longer than a line
    flags: Any = {"flags": {"rate": 0.1, "seed": 0, "data": data}, "defaults": {"rate": 0.2, "seed": 0}}
    log.event("start", command=command, model="mlp", data=data, versions={"jax": "0.10.2"}, ipus=4, **flags)
    log.event("compiled", compile_seconds=12.5)
    noise = np.random.default_rng(0)
    for last in range(100, updates + 1, 100):
        losses = [2 * math.exp(-at / updates * 4) + noise.normal(0, 0.05) for at in range(last - 100, last)]
        log.event("losses", updates=last, losses=losses, samples_per_second=noise.normal(12e3, 300))
        if last % 500 == 0:
            log.event("evaluated", updates=last, accuracy=1 - math.exp(-last / updates * 4) / 2, loss=losses[-1] + 0.1)
            log.event("saved", updates=last, folder="runs/mlp")


def of_a_killed_run(folder, monkeypatch):
    with RunLog(folder / "run.jsonl") as log:
        write_log(log, 500)
    whole = (folder / "run.jsonl").read_bytes()
    (folder / "run.jsonl").write_bytes(whole[:-40])
    with RunLog(folder / "run.jsonl") as log:
        write_report(folder / "run.html", log)


def of_many_updates(folder, monkeypatch):
    log = RunLog()
    write_log(log, 20_000)
    log.event("end", reason="all updates were made")
    write_report(folder / "run.html", log, title="20,000 updates")


PAGES = {
    "cut-gpt": (of_a_cut_gpt, "Finished"),
    "mnist-basic": (of_mnist("basic"), "Finished"),
    "mnist-concurrent": (of_mnist("concurrent", "--replicas", "2"), "Finished"),
    "two-instances": (of_two_instances, "Finished"),
    "killed": (of_a_killed_run, "The log has no end"),
    "many-updates": (of_many_updates, "Finished"),
}


@pytest.mark.fast(*(PAGES.keys() - {"two-instances"}))  # whose processes take 8 s of CPU time
@pytest.mark.parametrize("name", PAGES)
def test_all_of_a_page_is_seen_and_read(name, browser, tmp_path, monkeypatch):
    make, verdict = PAGES[name]
    make(tmp_path, monkeypatch)
    faults: list[str] = []
    for width in browsing.WIDTHS:
        with browsing.opened(browser, tmp_path / "run.html", width=width) as seen:
            assert verdict in seen.page.inner_text(".verdict")
            assert seen.page.locator("#curves svg, #curves canvas").count() >= 1
            for scheme in browsing.SCHEMES:
                seen.page.emulate_media(color_scheme=scheme)
                faults += [f"{width}, {scheme}: {each}" for each in looks.cut_in(seen.page) + looks.pale_in(seen.page)]
                if (width, scheme) != (500, "dark"):
                    shot = seen.shot(f"{name}-{width}-{scheme}")
                    faults += looks.glaring_in(shot) if scheme == "dark" else []
            if width == browsing.WIDTHS[0]:
                print(name, seen.page.evaluate("performance.getEntriesByType('paint').map(e => [e.name, e.startTime])"))
                seen.page.pdf(path=browsing.SHOTS / f"{name}.pdf", format="A4")
                faults += [f"print: {each}" for each in looks.lost_in_print(seen.page)]
            faults += [*seen.console, *seen.requests]
    assert faults == []


def test_a_page_of_a_thousand_updates_without_pictures_is_small(tmp_path):
    log = RunLog()
    write_log(log, 1000)
    assert write_report(tmp_path / "run.html", log).stat().st_size <= 250_000


def test_what_is_wrong_with_a_page_is_noticed(browser, tmp_path):
    path = tmp_path / "wrong.html"
    path.write_text(
        "<style>@media print { body { background: #222 } }</style><script src='https://example.invalid/x.js'></script>"
        "<main style='font: 16px sans-serif'><p style='width: 1400px'>wide</p><p style='color: #bbb'>pale</p>"
        "<p style='width: 40px; overflow: hidden'>unbreakable</p><button>press</button>"
        "<div style='max-height: 9px; overflow: auto'>a frame</div><svg style='width: 90px'>"
        "<text x='70' y='15'>beyond</text><text x='0' y='40'>below</text><text x='3' y='42'>above</text></svg>"
    )
    with browsing.opened(browser, path) as seen:
        assert seen.requests == ["https://example.invalid/x.js"]
        assert any("ERR_" in line for line in seen.console)
        said = lambda faults, *words: [word for word in words if not any(word in each for each in faults)]
        cut = ("'wide'", "fit: p 'unbreakable'", "picture: text 'beyond'", "over one another: text 'below'")
        assert said(looks.cut_in(seen.page), *cut) == []
        assert said(looks.pale_in(seen.page), "pale</p>") == []
        lost = ("paper is rgb(34", "a button", "no higher than 9px", "scrolls", "torn: svg")
        assert said(looks.lost_in_print(seen.page), *lost) == []
