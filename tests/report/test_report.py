"""`dino-ds report`: what is on the page, with parts missing, with hostile names; of trained runs, and in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import pytest

from dino_ds.cli import main as cli
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.health.beat import Event
from dino_ds.health.processes import RunLock
from dino_ds.options.commands import ReportOptions
from dino_ds.report import html
from dino_ds.report.folder import read_events, read_run
from dino_ds.report.html import summarize_knn
from dino_ds.report.single_run import draw_run, judge_run, run, summarize
from tests.ranks import run_on_ranks
from tests.report.runs import DONE, EVALUATIONS, assert_inside, knn, make_run, record, save_picture, write_events
from tests.run.harness import image_folder, train_tiny


class _Page(HTMLParser):
    """Text, tags, every address that a browser would fetch, and every number that it would draw."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags, self.addresses, self.drawn = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action", "poster")]
        self.drawn += [v for k, v in attrs if k in ("d", "transform", "x", "y", "style")]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _report(folder):
    run(ReportOptions(run=str(folder))).show(as_json=False)
    return _Page((folder / "report.html").read_text(encoding="utf-8"))


@pytest.fixture
def no_charts(monkeypatch):
    def stand_in(chart):
        return "<svg></svg>" if any(len(line.curve.finite) for line in chart.lines) else ""

    monkeypatch.setattr(html, "chart_svg", stand_in)


def _write_metrics(folder, *records):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))


def test_the_page_has_every_part(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    for name in ("map", "neighbors"):
        for step in (0, 50, 100):
            save_picture(folder / f"pictures/step_{step:08d}/{name}.png")
    page = _report(folder)
    for words in (
        "start: untrained 62.0 % best, step 50 78.2 % newest, step 100 76.2 % raw pixels 35.3 % chance",
        "peak memory 0.80 GiB predicted 0.70 GiB, without evaluations",
        *("data.global_batch 64 512", "knn_20 75", "rankme 15.9", "birds/test, 2,880 training, 936 test"),
        *("torchrun --nproc_per_node 2 dino_ds/train.py --config", "Waiting for data 20", "2,880 images of photos"),
        *("step 0, before training step 100 Nearest", "Those of other steps", "The log tells of none"),
    ):
        assert words in page.text, words
    assert page.tags.count("svg") >= 9 and "script" not in page.tags
    assert page.tags.count("img") == 2 * 3 + 1  # start and newest; one beside them
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert "step 100 of 100, loss" in (line := capsys.readouterr().out) and "k-NN 76.2 % at step 100" in line


@pytest.mark.parametrize(
    ("accuracies", "collapsed", "level", "says"),
    [
        ((62, 78.2, 76.2), 0, "good", "Learned: k-NN is 76.2 % at step 100, beside 62.0 % at the start."),
        ((20, 80.0, 50.0), 0, "odd", "Falls since step 50: k-NN was 80.0 %, and is 50.0 % at step 100; next time keep"),
        ((20, 25.0, 30.0), 0, "odd", "Not yet learned: k-NN is 30.0 % at step 100, beside 35.3 %"),
        ((100, 100, 99.5), 0, "odd", "Whether it has learned can't be told: k-NN is 99.5 % at step 100"),
        ((62, 78.2, 76.2), 1, "bad", "Collapsed: "),
        ((), 0, "odd", "Whether it has learned is not known: no labeled images"),
        ((62, 99, 99.9), 0.9, "odd", "Whether it has learned is not known: 90% of the test images looked at are train"),
    ],
)
def test_the_verdict(tmp_path, accuracies, collapsed, level, says):
    folder = make_run(tmp_path / "run", pictures=False)
    found = [knn(step, accuracy) for step, accuracy in zip((0, 50, 100), accuracies, strict=False)]
    if collapsed == 0.9:  # the part of the test images that is trained on
        results = {"knn": {**EVALUATIONS["knn"], "shared": collapsed}}
        (folder / "evaluations.json").write_text(json.dumps(results))
    _write_metrics(folder, *found, {**record(100), "collapsed": int(collapsed)})
    shown = read_run(folder)
    judged, sentence = judge_run(shown, summarize_knn(shown.metrics))
    assert judged == level and sentence.startswith(says)


@pytest.mark.usefixtures("no_charts")
@pytest.mark.parametrize(
    ("stage", "resumed"),
    [({}, True), ({"stage_start": "continue"}, True), ({"stage_start": "restart"}, False)],
    ids=str,
)
def test_the_figures_of_a_page_have_one_base(tmp_path, capsys, stage, resumed):
    """Images, time, speed and start are the run's own, also of a stage whose steps go on from the run before."""
    begin = 200 if stage == {"stage_start": "continue"} else 0
    events = [Event(f"resumed  at step {begin + 20}, epoch 4, image 0")] if resumed else []
    kind = "stopped" if begin else "done"  # a run that ends before its length is stopped
    folder = make_run(tmp_path / "run", *events, Event(f"{kind:<9}step {begin + 35}"), recipe=stage)
    best = {"step": begin + 20, "best": {"metric": "knn", "value": 55.0, "start": 43.7}}
    (folder / "best_teacher.json").write_text(json.dumps(best))
    if stage:
        origin = {"run": "runs/a", "run_id": "aa", "step": 200, **stage}
        (folder / "environment.json").write_text(json.dumps({"run_id": "ab", "from": origin}))
    steps = [begin + step for step in (10, 20, 30, 35)]
    _write_metrics(folder, knn(begin, 43.7), *map(record, steps), knn(begin + 20, 55.0))
    page, facts = _report(folder), summarize(read_run(folder))
    assert (facts["step"], facts["first_step"], facts["images"]) == (begin + 35, begin, 35 * 64)
    assert facts["training_seconds"] == pytest.approx(3.5) and facts["images_per_second"] == pytest.approx(640)
    starts = [value for key, value in facts["knn"].items() if key in ("start", "untrained")]
    assert starts == [facts["best"]["start"]] == [43.7]
    since = f" since step {begin}" if begin else ""
    assert f"2,240 images{since}, epoch" in page.text and "43.7 % at the start" in page.text and "4 s" in page.text
    assert f"newest, step {begin + 20} 55.0 %" in page.text and (begin or "stopped at 35 of 100" in page.text)
    line = capsys.readouterr().out
    assert line.startswith("stopped ") and f"k-NN 55.0 % at step {begin + 20}" in line


@pytest.mark.usefixtures("no_charts")
def test_a_run_its_stages_and_resumes_are_one_story(tmp_path):
    """Of a stage of a stage: curves of the runs before, each up to its checkpoint, in steps of the last; marks."""
    origin = tmp_path / "a", "ab", 60
    make_run(origin[0])
    for start, first, run_id in (("continue", 60, "ac"), ("restart", 0, "ad")):
        folder = make_run(tmp_path / start, Event("resumed  at", step=first + 20), recipe={"stage_start": start})
        came = {"run": str(origin[0]), "run_id": origin[1], "step": origin[2], "stage_start": start}
        (folder / "environment.json").write_text(json.dumps({"run_id": run_id, "from": came}))
        _write_metrics(folder, knn(first, 60.0), *map(record, (first + 10, first + 20)))
        origin = folder, run_id, 80
    before = read_run(tmp_path / "continue").metrics.before["loss"]
    metrics = read_run(tmp_path / "restart").metrics
    assert before.x.tolist() == [10, 20, 30, 40, 50, 60] and metrics.before["loss"].x.tolist() == [*range(-70, 1, 10)]
    assert metrics.before["knn_top1"].x.tolist() == [-80, -30, -20]
    assert [*metrics.marks.values()] == [[20], [0]]
    text = _report(tmp_path / "restart").text
    assert "dotted: resumed at step 20, stage begun at" in text and "before the stage" in text


@pytest.mark.usefixtures("no_charts")
def test_every_part_but_the_metrics_may_be_missing_or_broken(tmp_path):
    parts = ["config.yaml", "ds_config.json", "environment.json", "evaluations.json", "events.jsonl"]
    for i, content in enumerate((None, "[1]", "[" * 2000, "\x00\xff")):
        folder = make_run(tmp_path / str(i), pictures=i > 0)
        for part in parts if content is None else ():
            (folder / part).unlink()
        for part in (*parts, "pictures/attention.png") if content is not None else ():
            (folder / part).write_bytes(content.encode("latin-1"))
        page = _report(folder)
        assert page.tags.count("svg") >= 5 and "recipe" in page.text
        if content is None:
            assert "there is no config.yaml" in page.text and "dino-ds pictures RUN draws the map" in page.text


@pytest.mark.slow
def test_no_number_is_too_odd(tmp_path, capsys):
    odd = [0.0, 1e308, -1e308, 5e-324, 1e99, 1 + 2**-52, -1e16, float("nan"), float("inf")]
    folder = make_run(tmp_path / "run")
    names = {str(i): value for i, value in enumerate(odd)}
    about = {"step": float("nan"), "seconds": float("inf"), "train_images": 10**400, "test_images": -1e99}
    (folder / "evaluations.json").write_text(json.dumps({"knn": {**about, "results": {**names, "whole": 10**400}}}))
    for first in (0.0, 1e308):
        pairs = [{"step": 0, **dict.fromkeys(names, first)}, {"step": 1, **names}]
        lines = [*pairs, {**record(2), **dict.fromkeys(["knn_top1", *record(2)], first), "step": 2}, record(3)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        run(ReportOptions(run=str(folder))).show(as_json=True)
        page = _Page((folder / "report.html").read_text(encoding="utf-8"))
        assert not {"nan", "inf"} & set(re.findall(r"[a-z]+", " ".join(page.drawn)))
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.mark.usefixtures("no_charts")
def test_a_name_is_never_taken_for_html(tmp_path):
    evil = "<script>alert(1)<"
    folder = make_run(tmp_path / f"{evil}svg onload=alert(2)>", recipe={"data.source": "folder", "data.root": evil})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, f"'\"{evil}": 1.0}) + "\n" + json.dumps({"step": 4, f"'\"{evil}": 2.0}))
    write_events(folder, Event(f"unreadable image skipped: {evil}/img src=x onerror=alert(3)>", "unreadable image"))
    (folder / "evaluations.json").write_text(json.dumps({evil: {"results": {f"{evil}b": 1}, "date": evil}}))
    (folder / "environment.json").write_text(json.dumps({"versions": {evil: evil}, evil: evil}))
    save_picture(folder / f"pictures/{evil}.png".replace("/img", ""))
    page = _report(folder)
    assert not {"a", "iframe", "object", "script"} & set(page.tags)
    assert evil in page.text
    assert all(address.startswith(("data:", "#")) for address in page.addresses)


def test_input_that_is_no_run(tmp_path, capsys):
    run_dir, file = make_run(tmp_path / "run"), tmp_path / "file"
    empty, started = tmp_path / "empty", tmp_path / "started"
    file.touch()
    empty.mkdir()
    started.mkdir()
    (started / "config.yaml").write_text("seed: 0\n")
    for words, says in (
        ([], "no run is given"),
        ([tmp_path / "none"], "does not exist"),
        ([empty], "neither config.yaml nor metrics.jsonl"),
        ([started], "holds no metrics yet"),
        ([run_dir, "--out", tmp_path / "x.txt"], "must end in .html"),
        ([run_dir, "--out", file / "x.html"], "can't be written"),
    ):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["report", *map(str, words)])
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and says in lines[0], (words, lines)
    assert not list(tmp_path.rglob("*.html"))


@pytest.mark.usefixtures("no_charts")
def test_huge_files_in_a_run_are_named_and_not_read(tmp_path, capsys):
    run_dir = make_run(tmp_path / "run")
    for name in ("events.jsonl", "ds_config.json", "environment.json", "evaluations.json", "config.yaml"):
        os.truncate(run_dir / name, 30 << 30)
    cli.main(["report", str(run_dir)])
    capsys.readouterr()
    assert len([note for note in read_run(run_dir).notes if "can" in note and "be read" in note]) >= 5
    os.truncate(run_dir / "metrics.jsonl", 30 << 30)
    with pytest.raises(SystemExit, match="2"):
        cli.main(["report", str(run_dir)])
    [line] = capsys.readouterr().err.splitlines()
    assert "metrics.jsonl cannot be read: " in line and "30.0 GiB" in line


def test_how_a_run_ended_and_what_went_wrong(tmp_path):
    folder = make_run(
        tmp_path / "run",
        Event("collapse after step 50: the teacher gives every image the same target"),
        Event("speed    after step 60: throughput has fallen", "slow"),
        *(Event(f"unreadable image skipped: {i}", "unreadable image") for i in range(60)),
        Event("the gradient is NaN or infinite, after step 7: nothing moved", "not finite"),
        Event("warning  after a save: no"),
        Event("a line of its own"),
    )
    with (folder / "events.jsonl").open("a") as file:
        file.write('{"time": 1}\n[]\n{"kind": "no')
    events = read_events(folder / "events.jsonl")
    assert events.ended == "" and len(events.incidents) == 54
    assert events.counts == {"collapse": 1, "slow": 1, "unreadable image": 60, "not finite": 1, "warning": 1}
    for line, kind, ended in (
        ("done     step 100", "", "finished"),
        ("stopped  by SIGTERM at step 50; saved step 50", "", "stopped"),
        ("error    the disk is full", "", "failed"),
        ("error    no progress on rank 1", "hang", "failed"),
        ("images   again", "", ""),
    ):
        (folder / "events.jsonl").unlink()
        write_events(folder, DONE, Event(line, kind))
        assert read_events(folder / "events.jsonl").ended == ended


def test_a_long_run_stays_small(tmp_path):
    folder = make_run(tmp_path / "run")
    _write_metrics(folder, *({"step": s, "loss": s * 7919 % 1000 / 7} for s in range(10_000)))
    _report(folder)
    assert (folder / "report.html").stat().st_size < 150_000


@pytest.mark.usefixtures("no_charts")
def test_a_term_that_no_code_here_names_has_all_its_curves(tmp_path):
    folder = make_run(tmp_path / "run")
    own = {"toy_teacher_entropy": 1.5, "spread": 0.25, "toy_cross_entropy": 2.0, "toy_loss": 2.5, "flat_loss": 3.25}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for i, line in enumerate(lines):
        if "loss" in line:
            parts = {key: value * (1 + i / 100) for key, value in {**own, "toy_kl": 0.5}.items()}
            lines[i] = {"step": line["step"], "loss": line["loss"], **parts, "lr": line["lr"], "val_loss": 3.0 + i}
    _write_metrics(folder, *lines)
    write_events(folder, Event("warning  something"))
    run = read_run(folder)
    page = draw_run(run)
    assert "warning</span></td><td>something" in page  # the kind once
    titles = "Loss, the weighted sum of all terms", "Loss of toy", "Loss of toy: KL of teacher and student", "Spread"
    for title in (*titles, "Loss, held-out images"):
        assert page.count(f"<figcaption><b>{title}</b>") == 1, title
    assert {key for key in summarize(run) if key.startswith(("toy", "flat", "spread"))} == {*own, "toy_kl"}


def test_what_a_folder_says(tmp_path):
    folder = make_run(tmp_path / "run", Event("note     nothing has ended"))
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"memory_gib": 0.8', '"memory_gib": 0.9', 1) + '{"step": 110, ')
    run = read_run(folder)
    assert run.state == "unfinished"
    assert "metrics.jsonl: 1 broken lines were left out" in run.notes
    assert summarize(run)["memory_gib"] == 0.9
    (lock := RunLock(folder)).acquire()
    assert read_run(folder).state == "running"
    lock.release()


@pytest.mark.slow
def test_a_real_run_is_understood(tmp_path):
    images, folder = image_folder(tmp_path / "images", classes=2), tmp_path / "dino"
    changes = {"model.drop_path": "0", "eval.every": "2 steps", "eval.root": str(images), "eval.k": "3"}
    assert run_on_ranks(train_tiny, images, folder, max_steps=4, changes=changes, predicts=True, world=1) == [None]
    found = run(ReportOptions(run=str(folder))).data
    assert_inside((folder / "report.html").read_text())
    assert found["notes"] == []
    assert (found["state"], found["step"], found["planned_steps"]) == ("stopped", 4, 12)
    assert not {key for key, value in found.items() if value is None}
    events = read_run(folder).events
    assert events.fact("memory", "parts", dict) and events.fact("images", "images", int) == 20
    lines = [line.split(" ", 1)[1] for line in (folder / "log.txt").read_text().splitlines()]
    assert lines == [json.loads(line)["line"] for line in (folder / "events.jsonl").read_text().splitlines()]
    files = [str(folder / name) for name in ("config.yaml", "ds_config.json")]  # "from its own files"
    batch = load_recipe(files[0], {}).data.global_batch
    assert resolve_ds_config(load_ds_config(files[1], {}), files[1], batch, 1).micro_batch == batch


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
    found = json.loads(unescape(re.search(r"<pre>(.+?)</pre>", done.stdout)[1]))
    assert len(found["charts"]) >= 9
    for (left, top, right, bottom), paths in zip(found["charts"], found["paths"], strict=True):
        assert right - left > 250 and bottom - top > 120 and left >= 0 and right <= width
        assert paths
        for x, y, x_end, y_end in paths:
            assert left - 1 <= x and x_end <= right + 1 and top - 1 <= y and y_end <= bottom + 1
    assert found["pictures"] == [60, 60, 60] and found["wide"] <= width
    assert found["requests"] == 0 and found["safe"]
