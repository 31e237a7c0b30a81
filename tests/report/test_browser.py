"""The page in a real browser: a silent console, nothing fetched, charts to be seen, on a laptop and on a phone.

A page beside the report holds it in a frame and measures it there: the report's own policy lets no script in.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from dino_ds.health.beat import Event
from dino_ds.options.commands import ReportOptions
from dino_ds.report.single_run import run
from tests.report.runs import DONE, make_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
_FLAGS = ("--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-dev-shm-usage")
_FLAGS += ("--allow-file-access-from-files", "--virtual-time-budget=20000", "--enable-logging=stderr", "--dump-dom")
_MEASURE = """
const page = document.querySelector("iframe");
page.onload = () => {
  const inside = page.contentWindow;
  for (const folded of inside.document.querySelectorAll("details")) folded.open = true;
  const all = query => [...inside.document.querySelectorAll(query)];
  const box = part => (r => [r.left, r.top, r.right, r.bottom])(part.getBoundingClientRect());
  document.querySelector("pre").textContent = JSON.stringify({
    charts: all("svg").map(box),
    paths: all("svg").map(svg => [...svg.querySelectorAll("path:not(defs path)")].map(box)),
    pictures: all("img").map(image => image.naturalWidth), wide: inside.document.documentElement.scrollWidth,
    requests: inside.performance.getEntriesByType("resource").length, safe: inside.alerted === undefined
  });
};
"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="needs chromium or chrome")
@pytest.mark.parametrize("width", [1280, 390])
def test_everything_is_seen(tmp_path, width):
    evil = Event("note     <script>window.alerted = 1</script><img src=x onerror='window.alerted = 1'>")
    folder = make_run(tmp_path / "run", evil, DONE)
    run(ReportOptions(run=str(folder)))
    frame = f'<iframe src="report.html" width="{width}" height="900"></iframe><pre></pre><script>{_MEASURE}</script>'
    outer = folder / "outer.html"
    outer.write_text(f"<!doctype html><body>{frame}")
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    command = [str(BROWSER), *_FLAGS, *root, f"--user-data-dir={tmp_path / 'profile'}", outer.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, errors="replace")
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    found = json.loads(html.unescape(re.search(r"<pre>(.+?)</pre>", done.stdout)[1]))
    assert len(found["charts"]) >= 9
    for (left, top, right, bottom), paths in zip(found["charts"], found["paths"], strict=True):
        assert right - left > 250 and bottom - top > 120 and left >= 0 and right <= width
        assert paths and all(
            left - 1 <= path[0] and path[2] <= right + 1 and top - 1 <= path[1] and path[3] <= bottom + 1
            for path in paths
        )
    assert found["pictures"] == [60, 60, 60] and found["wide"] <= width
    assert found["requests"] == 0 and found["safe"]
