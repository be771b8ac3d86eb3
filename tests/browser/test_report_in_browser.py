"""Test the page of a run in a browser: what people see of it."""

from support import browsing


def test_a_page_says_nothing_on_the_console_and_loads_nothing(browser, tmp_path):
    from ipu_jax.observe import RunLog, write_report

    log = RunLog()
    log.event("losses", updates=3, losses=[3.0, 2.0, 1.0])
    path = write_report(tmp_path / "run.html", log)
    with browsing.opened(browser, path) as seen:
        assert (seen.console, seen.requests) == ([], [])
        seen.shot("small-run")
