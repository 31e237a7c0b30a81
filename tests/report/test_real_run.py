"""The report of a run that was trained, and the page in a real browser; hand-written runs are in test_report.py."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess

import pytest

from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.health.beat import Event
from dino_ds.options.commands import ReportOptions
from dino_ds.report.folder import read_run
from dino_ds.report.single_run import run as report
from tests.ranks import run_on_ranks
from tests.report.runs import DONE, assert_inside, make_run
from tests.run.harness import TINY, image_folder, log_of, train_tiny
from tests.run.test_stages import flags, run, words_of


@pytest.mark.slow
def test_a_real_run_is_understood(tmp_path):
    images, folder = image_folder(tmp_path / "images", classes=2), tmp_path / "dino"
    changes = {"model.drop_path": "0", "eval.every": "2 steps", "eval.root": str(images), "eval.k": "3"}
    assert run_on_ranks(train_tiny, images, folder, max_steps=4, changes=changes, predicts=True, world=1) == [None]
    found = report(ReportOptions(run=str(folder))).data
    assert_inside((folder / "report.html").read_text())
    assert found["notes"] == []
    assert (found["state"], found["step"], found["planned_steps"]) == ("stopped", 4, 12)
    assert not {key for key, value in found.items() if value is None}
    assert found["knn"].keys() == {"teacher", "step", "best", "best_step", "untrained", "raw_pixels", "chance"}
    events = read_run(folder).events
    assert events.fact("memory", "parts", dict) and events.fact("images", "images", int) == 20
    lines = [line.split(" ", 1)[1] for line in (folder / "log.txt").read_text().splitlines()]
    assert lines == [json.loads(line)["line"] for line in (folder / "events.jsonl").read_text().splitlines()]
    files = [str(folder / name) for name in ("config.yaml", "ds_config.json")]  # "from its own files"
    batch = load_recipe(files[0], {}).data.global_batch
    assert resolve_ds_config(load_ds_config(files[1], {}), files[1], batch, 1).micro_batch == batch


@pytest.mark.slow
def test_a_stage_has_figures_of_its_own(tmp_path):
    """What it begins with is measured, log and page state the same start; test images that it trains on are said."""
    images, stage = image_folder(tmp_path / "images", classes=2), tmp_path / "stage"
    changes = {**TINY, "data.root": str(images), "eval.every": "2 steps", "eval.root": str(images), "eval.k": "3"}
    changes |= {"model.drop_path": "0", "log_every": "10"}
    assert run(words_of(tmp_path / "run", "--max_steps", "4", *flags(changes))) is None
    begin = ["--from", str(tmp_path / "run"), "--stage_start", "continue", "--length", "5 steps"]
    assert run(words_of(stage, *begin, "--max_steps", "3")) is None
    found, log = report(ReportOptions(run=str(stage))).data, log_of(stage)
    assert (found["first_step"], found["step"], found["planned_steps"]) == (4, 7, 9)
    assert found["images"] == 24 == pytest.approx(found["images_per_second"] * found["training_seconds"])
    assert "24 images from step 4, each" in log
    assert found["best"]["start"] == found["knn"]["start"]
    starts = re.findall(r" start ([\d.]+)", log[log.rindex("done     step") :])
    assert [float(text) for text in starts] == pytest.approx([found["knn"]["start"]] * 2, abs=0.06)
    assert "Whether it has learned is not known: 100% of the test images" in (stage / "report.html").read_text()
    assert "warning  test images are training images too" in log


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
    report(ReportOptions(run=str(folder)))
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
        assert paths
        for x, y, x_end, y_end in paths:
            assert left - 1 <= x and x_end <= right + 1 and top - 1 <= y and y_end <= bottom + 1
    assert found["pictures"] == [60, 60, 60] and found["wide"] <= width
    assert found["requests"] == 0 and found["safe"]
