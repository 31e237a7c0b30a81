"""The page in a real browser: a silent console, nothing fetched, charts to be seen, values to point at, and paper.

A page beside the report holds it in a frame and measures it there: the report's own policy lets no foreign script in.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from dino_ds.options.run import ReportOptions
from dino_ds.report.command import run
from tests.report.runs import make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
_FLAGS = ("--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage")
_MEASURE = """
const page = document.querySelector("iframe");
page.onload = () => {
  const inside = page.contentWindow;
  const box = part => (r => [r.left, r.top, r.width, r.height])(part.getBoundingClientRect());
  const all = query => [...inside.document.querySelectorAll(query)];
  const chart = all("svg")[0], [left, top, width, height] = box(chart);
  chart.dispatchEvent(new inside.PointerEvent("pointermove", {clientX: left + width * .99, clientY: top + height / 2}));
  document.querySelector("pre").textContent = JSON.stringify({
    charts: all("svg").map(box), paths: all("svg path[data-name]:not(.hidden)").map(box), bars: all(".bars i").map(box),
    pictures: all("img").map(image => image.naturalWidth), tip: inside.document.querySelector(".tip").innerText,
    wide: inside.document.documentElement.scrollWidth, requests: inside.performance.getEntriesByType("resource").length,
    safe: inside.alerted === undefined
  });
};
"""


def _browse(folder: Path, *flags: str) -> tuple[str, list[str]]:
    """What the browser prints, and its console."""
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [str(BROWSER), *_FLAGS, *root, f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, errors="replace")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def _measured(page: Path) -> dict:
    frame = f'<iframe src="{page.name}" width="1280" height="900"></iframe><pre></pre><script>{_MEASURE}</script>'
    outer = page.with_name("outer.html")
    outer.write_text(f"<!doctype html><body>{frame}")
    flags = ("--allow-file-access-from-files", "--virtual-time-budget=20000", "--dump-dom", outer.as_uri())
    text, console = _browse(page.parent, *flags)
    assert console == []
    return json.loads(html.unescape(re.search(r"<pre>(.+?)</pre>", text)[1]))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("runs") / "run")
    with (folder / "log.txt").open("a") as file:
        file.write("note     <script>window.alerted = 1</script><img src=x onerror='window.alerted = 1'>\n")
    run(ReportOptions(run=str(folder)))
    return folder / "report.html"


@pytest.fixture(scope="module")
def found(page):
    return _measured(page)


@pytest.mark.slow
def test_a_laptop_shows_everything(found):
    assert len(found["charts"]) >= 9
    for left, _, width, height in found["charts"]:
        assert width > 250 and height > 120
        assert left >= 0 and left + width <= 1280
    assert all(width > 100 and height >= 0 for _, _, width, height in found["paths"])
    assert sum(height > 20 for *_, height in found["paths"]) >= 8
    assert all(width > 10 and height > 10 for _, _, width, height in found["bars"])
    assert found["pictures"] == [60, 60, 60]
    assert found["wide"] <= 1280
    assert found["requests"] == 0
    assert found["safe"]


def test_pointing_at_a_chart_shows_its_values(page, found):
    """The last step's, exactly."""
    last = json.loads((page.parent / "metrics.jsonl").read_text().splitlines()[10])
    assert found["tip"].startswith("100 steps"), found
    for key in ("loss", "teacher_entropy", "kl"):
        assert f"{last[key]:.4g}" in found["tip"]


@pytest.mark.slow
def test_runs_side_by_side_are_seen(page):
    other = make_run(page.parent.parent / "other", recipe={"optimizer.lr": "0.002"})
    run(ReportOptions(run=str(page.parent), compare=(str(other),)))
    found = _measured(page.with_name("compare.html"))
    assert len(found["charts"]) >= 9
    assert found["wide"] <= 1280
    assert "run" in found["tip"] and "other" in found["tip"]


@pytest.mark.slow
def test_it_prints(page):
    paper = page.with_suffix(".pdf")
    _browse(page.parent, f"--print-to-pdf={paper}", page.as_uri())
    assert paper.read_bytes().startswith(b"%PDF")
    assert len(re.findall(rb"/Type /Page\b", paper.read_bytes())) >= 3
