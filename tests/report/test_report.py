"""`dino-ds report`: what is on the page, with parts missing, with hostile names; side by side; input that can't be."""

from __future__ import annotations

import json
import os
import re
import sys
from html.parser import HTMLParser

import pytest

from dino_ds.cli import main as cli
from dino_ds.config.ds_config import load_ds_config, resolve_ds_config
from dino_ds.config.loading import load_recipe
from dino_ds.costs.memory import Memory
from dino_ds.options.commands import find_command
from dino_ds.options.flags import parse_flags
from dino_ds.options.run import ReportOptions
from dino_ds.report.command import run
from dino_ds.report.folder import read_run
from dino_ds.report.log import read_log
from dino_ds.report.origin import command_line
from dino_ds.run.environment import describe_start, read_starts
from tests.report.runs import DONE, LOG, knn, make_run, record, save_picture
from tests.run.harness import image_folder, train_tiny


class _Page(HTMLParser):
    """Text, tags, and every address that a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words, self.tags, self.addresses, self.drawn = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset", "data", "action", "poster")]

        self.drawn += [
            v for k, v in attrs if k in ("d", "transform", "points", "x1", "x2", "y1", "y2", "x", "y", "style")
        ]

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def _report(folder, *more, out=None, json=False):
    run(ReportOptions(run=str(folder), compare=tuple(str(path) for path in more) or None, out=out, json=json))
    page = folder / ("compare.html" if more else "report.html")
    return _Page(page.read_text(encoding="utf-8"))


def test_the_page_has_every_part(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    page = _report(folder)
    for words in (
        *("finished", "vit_small_patch16_224, patch 8, width 32", "2,880 images of photos", "epoch 2"),
        *("10 s", "640", "76.2 %", "62.0 %", "35.3 %", "5.6 %", "best 78.2 % at step 50"),
        *("libraries 0.50 GiB", "second copy of the student 0.20 GiB", "largest resident set of rank 0: on a CPU"),
        *("data.global_batch 64 512", "knn_20 75", "rankme 15.9", "2026-11-21", "birds/test, 2,880 training, 936 test"),
        *("torchrun --nproc_per_node 2 dino_ds/train.py --config quickstart --run_dir 'runs/a b'", "torch==2.15.0"),
        *("ln K: uniform 5.55", "Waiting for data each window 20", "raw pixels 35.3"),
        *("while it trained", "step 50", "step 100", "Seed 0", "The log tells of none"),
    ):
        assert words in page.text, words
    assert "dino_ds==" not in page.text  # it is not on PyPI under a number
    assert page.tags.count("svg") >= 9
    assert page.tags.count("img") == 3
    assert all(address.startswith("data:") for address in page.addresses)
    assert "k-NN top-1 of the teacher's features at step 100; best 78.2 % at step 50" in page.text
    assert "step 100 of 100, loss" in (line := capsys.readouterr().out) and "k-NN 76.2 % at step 100" in line


@pytest.mark.parametrize("end", [DONE.replace("100", "30"), "stopped  by SIGTERM at step 30; saved step 30\n"])
def test_a_run_that_was_cut_is_stopped_and_its_figures_have_their_steps(tmp_path, capsys, end):
    """By --max_steps, or on request: of the recipe's length, and what was measured before its last step."""
    folder = make_run(tmp_path / "run", log=LOG.replace("2.2 epochs", "2.2 epochs, stopping after step 30") + end)
    lines = [json.dumps(line) for line in (knn(0, 62.0), record(10), record(20), knn(20, 70.0), record(30))]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = _report(folder)
    assert "stopped at 30 of 100" in page.text and "features at step 20" in page.text
    line = capsys.readouterr().out
    assert line.startswith("stopped ") and "step 30 of 100, loss" in line and "k-NN 70.0 % at step 20" in line
    both = _report(folder, make_run(tmp_path / "whole")).text
    assert "state stopped at 30 of 100 finished" in both and "k-NN at step 20 100" in both


def test_measured_memory_is_a_share_of_the_plan_on_a_gpu_alone(tmp_path):
    """A resident set holds more than any plan of a step: a share of it would say nothing."""
    folder = make_run(tmp_path / "run")
    assert "% of the plan" not in _report(folder).text
    path = folder / "environment.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "devices": "NVIDIA H200"}))
    assert "Measured is 114 % of the plan" in _report(folder).text


def test_json_is_one_object(tmp_path, capsys):
    folder = make_run(tmp_path / "run")
    run(ReportOptions(run=str(folder), json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["report"] == str(folder / "report.html")
    assert found["state"] == "finished"
    assert found["step"] == found["planned_steps"] == 100
    assert found["training_seconds"] == pytest.approx(10.0)
    assert found["loss"] == pytest.approx(found["teacher_entropy"] + found["kl"])
    assert found["knn"] == {
        "teacher": 76.2, "step": 100, "best": 78.2, "best_step": 50, "untrained": 62.0, "raw_pixels": 35.3,
        "chance": 5.6,
    }  # fmt: skip
    assert found["evaluations"]["knn"]["results"]["knn_10"] == 76.2
    assert found["memory_gib"] == 0.8


@pytest.mark.slow
def test_every_part_but_the_metrics_may_be_missing_or_broken(tmp_path):
    parts = ["config.yaml", "ds_config.json", "environment.json", "evaluations.json", "log.txt"]
    for i, content in enumerate((None, "", "{", '"text"', "[1]", "[" * 5000, "\x00\xff")):
        folder = make_run(tmp_path / str(i), pictures=i > 0)
        for part in parts:
            if content is None:
                (folder / part).unlink()
            else:
                (folder / part).write_bytes(content.encode("latin-1"))
        if content is not None:
            (folder / "pictures/attention.png").write_bytes(content.encode("latin-1"))
        page = _report(folder)
        assert page.tags.count("svg") >= 5
        assert "recipe" in page.text
    assert "there is no config.yaml" in _report(tmp_path / "0").text
    assert "There are no pictures yet" in _report(tmp_path / "0").text


def test_only_an_evaluation_at_step_0_is_enough(tmp_path):
    folder = make_run(tmp_path / "run", log=LOG)
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().splitlines()[0])
    assert "not finished" in _report(folder).text
    (folder / "metrics.jsonl").write_text(json.dumps({**record(10), "loss": "nan", "grad_norm": "inf"}))
    assert "No k-NN accuracy yet" in _report(folder).text


def test_what_training_leaves_of_a_hang_is_named(tmp_path):
    folder = make_run(tmp_path / "run", log=LOG + "error    rank 1 hangs\n")
    (folder / "hang-50.txt").touch()
    page = _report(folder)
    assert (
        "ended by an error" in page.text
        and "error rank 1 hangs" in page.text
        and "More of them in hang-50.txt" in page.text
    )


@pytest.mark.slow
def test_no_number_is_too_odd(tmp_path, capsys):
    """Each pair of extremes as a curve of two points, each as every figure of training and of an evaluation."""
    odd = [0.0, -0.0, 1e308, -1e308, 5e-324, 1e-99, 1e99, 1.0, 1 + 2**-52, -1e16, float("nan"), float("inf")]
    folder = make_run(tmp_path / "run")
    names = {str(i): value for i, value in enumerate(odd)}
    about = {"step": float("nan"), "seconds": float("inf"), "train_images": 10**400, "test_images": -1e99}
    (folder / "evaluations.json").write_text(json.dumps({"knn": {**about, "results": {**names, "whole": 10**400}}}))
    for first in odd:
        pairs = [{"step": 0, **dict.fromkeys(names, first)}, {"step": 1, **names}]
        lines = [*pairs, {**record(2), **dict.fromkeys(["knn_top1", *record(2)], first), "step": 2}, record(3)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        page = _report(folder, json=True)
        assert not {"nan", "inf"} & set(re.findall(r"[a-z]+", " ".join(page.drawn)))
        json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_a_name_is_never_taken_for_html(tmp_path):
    """In the folder's name, the log, a key of the metrics, an evaluation, a picture, the environment and the recipe."""
    evil = "<script>alert(1)<"
    folder = make_run(tmp_path / f"{evil}svg onload=alert(2)>", recipe={"data.source": "folder", "data.root": evil})
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 3, f"'\"{evil}": 1.0}) + "\n" + json.dumps({"step": 4, f"'\"{evil}": 2.0}))
    with (folder / "log.txt").open("a") as file:
        file.write(f"unreadable image skipped: {evil}/img src=x onerror=alert(3)>\n")
    (folder / "evaluations.json").write_text(json.dumps({evil: {"results": {f"{evil}b": 1}, "date": evil}}))
    (folder / "environment.json").write_text(json.dumps({"versions": {evil: evil}, "command": [evil], evil: evil}))
    save_picture(folder / f"pictures/{evil}.png".replace("/img", ""))
    other = make_run(tmp_path / f"other {evil}b")
    for page in (_report(folder), _report(folder, other)):
        assert page.tags.count("script") == 1
        assert not {"a", "iframe", "object"} & set(page.tags)
        assert evil in page.text
        assert all(address.startswith("data:") for address in page.addresses)


def _write_results(folder, results):
    content = {name: {"results": figures} for name, figures in results.items()}
    (folder / "evaluations.json").write_text(json.dumps(content))


def test_runs_side_by_side(tmp_path, capsys):
    one = make_run(tmp_path / "a/run")
    two = make_run(tmp_path / "b/run", recipe={"optimizer.lr": "0.002"})
    _write_results(two, {"knn": {"knn_10": 80.0}, "linear": {"linear_train": 99}, "statistics": {"rankme": 17}})
    (two / "metrics.jsonl").write_text(
        (two / "metrics.jsonl").read_text().replace('"weight_decay": 0.04', '"weight_decay": 0.1')
    )
    page = _report(one, two)
    assert "a/run" in page.text and "b/run" in page.text
    assert "optimizer.lr 0.0005 0.002" in page.text
    assert "waiting for data 20.0 % 20.0 %" in page.text and "raw pixels 35.3" in page.text
    # Flat curves are drawn where they differ.
    assert "Weight decay" in page.text and "Teacher temperature" not in page.text
    assert "data.global_batch" not in page.text
    best = re.findall(r'class="best">([^<]+)', (one / "compare.html").read_text())
    assert best == ["80"]  # equal accuracies of the curves have no best
    other = make_run(tmp_path / "c/run", recipe={"eval.k": "5"})
    _write_results(other, {"knn": {"knn_10": 70.0}})
    _report(one, other)
    assert 'class="best"' not in (one / "compare.html").read_text()  # of other settings: nothing to compare
    capsys.readouterr()
    run(ReportOptions(compare=(str(one), str(two)), out=str(tmp_path / "c.html"), json=True))
    found = json.loads(capsys.readouterr().out)
    assert [facts["run"] for facts in found["runs"]] == [str(one), str(two)]


def test_other_batches_are_compared_by_images_and_other_data_is_said(tmp_path):
    one = make_run(tmp_path / "a")
    two = make_run(tmp_path / "b", recipe={"data.global_batch": "128", "eval.k": "5"})
    page = _report(one, two)
    assert "different images or settings (eval.k)" in page.text
    written = (one / "compare.html").read_text()
    assert 'data-x="images"' in written and "M640 " in written and "M1280 " in written
    (two / "config.yaml").unlink()
    (two / "metrics.jsonl").write_text((two / "metrics.jsonl").read_text().replace("35.3", "40.1"))
    page = _report(one, two)
    assert 'data-x="images"' not in (one / "compare.html").read_text()
    assert not {"raw pixels 35.3", "raw pixels 40.1"} & set(page.words)


@pytest.mark.parametrize("words", ["a --compare b c", "--compare b c --run a", "a --compare b --compare c"])
def test_a_list_of_runs_is_what_one_types(words):
    command, rest = find_command(["report", *words.split()])
    assert parse_flags(command, rest).fixed == {"run": "a", "compare": ("b", "c")}


def test_input_that_is_no_run(tmp_path, capsys):
    run_dir, file = make_run(tmp_path / "run"), tmp_path / "file"
    empty, started = tmp_path / "empty", tmp_path / "started"
    file.touch()
    empty.mkdir()
    started.mkdir()
    (started / "config.yaml").write_text("seed: 0\n")
    for words, says in (
        ([], "give a run folder"),
        ([tmp_path / "none"], "does not exist"),
        ([file], "it is a file"),
        ([empty], "neither config.yaml nor metrics.jsonl"),
        ([started], "holds no metrics yet"),
        ([run_dir, "--out", tmp_path / "x.txt"], "must end in .html"),
        ([run_dir, "--out", tmp_path / "no/x.html"], "can't be written"),
        ([run_dir, "--out", file / "x.html"], "can't be written"),
        ([run_dir, "--compare", run_dir], "named twice"),
        (["--compare", run_dir], "others with --compare"),
        ([run_dir, "--compare", empty], "neither config.yaml"),
        ([run_dir, "--compare"], "--compare has no value"),
    ):
        with pytest.raises(SystemExit) as stop:
            cli.main(["report", *map(str, words)])
        assert stop.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and says in lines[0], (words, lines)
    assert not list(tmp_path.rglob("*.html"))


def _pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def _sparse(path):
    with path.open("wb") as file:
        file.truncate(30 << 30)


def test_pipes_and_huge_files_in_a_run_are_named_and_not_waited_for(tmp_path, capsys):
    for i, make in enumerate((_pipe, _sparse)):
        run_dir = make_run(tmp_path / f"run{i}")
        for name in ("log.txt", "ds_config.json", "environment.json", "evaluations.json", "config.yaml"):
            make(run_dir / name)
        cli.main(["report", str(run_dir)])
        capsys.readouterr()
        assert len([note for note in read_run(run_dir).notes if "can" in note and "be read" in note]) >= 5
        make(run_dir / "metrics.jsonl")
        with pytest.raises(SystemExit) as stop:
            cli.main(["report", str(run_dir)])
        assert stop.value.code == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "metrics.jsonl cannot be read: " in line and ("not a regular file" in line or "30.0 GiB" in line)


def test_how_a_run_ended_and_what_went_wrong():
    lines = [
        "collapse after step 50: the teacher gives every image the same target",
        "speed    after step 60: throughput has fallen",
        *(f"unreadable image skipped: {i}" for i in range(60)),
        "the gradient is NaN or infinite, after step 7: nothing moved (1 in a row; 3 stop the run)",
        "cannot save step 80: No space left on device: x",
        "warning  after a save: no",
    ]
    log = read_log([*LOG.splitlines(), *lines])
    assert log.ended == ""
    assert log.planned_steps == 100
    assert log.counts == {
        "collapse": 1, "slow": 1, "unreadable image": 60, "not finite": 1, "save failed": 1, "warning": 1,
    }  # fmt: skip
    assert len(log.incidents) == 55
    for text, ended in (
        (DONE, "finished"),
        ("stopped  by SIGTERM at step 50; saved step 50. To continue: the same command with --resume", "stopped"),
        ("error    the disk is full", "failed"),
        (f"{DONE}{LOG}", ""),
    ):
        assert read_log([*LOG.splitlines(), *text.splitlines()]).ended == ended
    assert read_log([LOG.splitlines()[1] + ", stopping after step 30"]).planned_steps == 100


def test_incidents_have_the_times_of_the_log(tmp_path):
    hang = "no progress on rank 1 for 600 s (step 40, step); stacks in runs/a/hang-40.txt"
    lines = [f"2026-11-21T16:47:54Z error    {hang}", "2026-11-21T16:50:00Z resumed  at step 30, epoch 0, image 1920"]
    folder = make_run(tmp_path / "run", log=f"{LOG}note     old\n" + "".join(f"{line}\n" for line in [*lines, DONE]))
    log = read_log((folder / "log.txt").read_text().splitlines())
    assert log.ended == "finished" and log.planned_steps == 100
    assert [(found.kind.name, found.time) for found in log.incidents] == [
        ("note", ""), ("hang", "2026-11-21 16:47:54"), ("resumed", "2026-11-21 16:50:00"),
    ]  # fmt: skip
    page = _report(folder)
    assert f"UTC note note old 2026-11-21 16:47:54 hang error {hang} 2026-11-21 16:50:00 resumed" in page.text


def test_the_planner_s_line_is_understood():
    memory = Memory("the loss", {"student": 2**30, "masters and moments": 2**31, "crops": 2**20})
    log = read_log([f"memory   predicted peak {memory}"])
    assert log.memory_parts == {"masters and moments": 2.0, "student": 1.0}
    assert log.memory_moment == "the loss"


@pytest.mark.slow
def test_a_real_run_is_understood(tmp_path, capsys):
    """Whatever training writes today: no note, a state, every figure."""
    root = image_folder(tmp_path / "images", classes=2)
    changes = {"eval.every": "2 steps", "eval.root": str(root), "eval.k": "3"}
    assert train_tiny(root, tmp_path / "run", max_steps=4, changes=changes) is None
    run(ReportOptions(run=str(tmp_path / "run"), json=True))
    found = json.loads(capsys.readouterr().out)
    assert found["notes"] == []
    assert (found["state"], found["step"], found["planned_steps"]) == ("stopped", 4, 12)
    assert not {key for key, value in found.items() if value is None}
    assert found["knn"].keys() == {"teacher", "step", "best", "best_step", "untrained", "raw_pixels", "chance"}
    assert read_run(tmp_path / "run").log.memory_parts
    files = [str(tmp_path / "run" / name) for name in ("config.yaml", "ds_config.json")]  # "from its own files"
    batch = load_recipe(files[0], {}).data.global_batch
    assert resolve_ds_config(load_ds_config(files[1], {}), files[1], batch, 1).micro_batch == batch


@pytest.mark.slow
def test_a_long_run_stays_small(tmp_path):
    folder = make_run(tmp_path / "run")
    keys = [f"key{i}" for i in range(20)]
    lines = [json.dumps({"step": s, **dict.fromkeys(keys, s * 7919 % 1000 / 7)}) for s in range(10_000)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    _report(folder)
    assert (folder / "report.html").stat().st_size < 1_500_000


def test_commands_are_those_of_the_launchers():
    for words, launcher, ranks, line in (
        (["train.py", "--seed", "1"], "", 1, "dino-ds train --seed 1"),
        (["dino-ds", "train", "--seed", "1"], "", 1, "dino-ds train --seed 1"),
        (["dino-ds", "train"], "", 4, "torchrun --nproc_per_node 4 -m dino_ds train"),
        (["train.py", "--local_rank=1"], "deepspeed", 2, "deepspeed --num_gpus 2 dino_ds/train.py"),
        (["train.py"], "torchrun", 1, "torchrun --nproc_per_node 1 dino_ds/train.py"),
    ):
        assert command_line({"command": words, "launcher": launcher, "ranks": ranks}) == line


def test_the_commands_of_all_starts_are_kept(tmp_path, monkeypatch):
    """Of this version, and the one of an older version, which knew no starts."""
    folder = make_run(tmp_path / "run")
    path = folder / "environment.json"
    about = json.loads(path.read_text())
    for mark, word in (("CROSS_RANK", "one"), ("TORCHELASTIC_RUN_ID", "two")):
        with monkeypatch.context() as patch:
            patch.setenv(mark, "0")
            patch.setattr(sys, "argv", ["/x/train.py", word])
            path.write_text(json.dumps(about | {"starts": [*read_starts(folder), describe_start()]}))
    assert [start["launcher"] for start in read_starts(folder)] == ["", "deepspeed", "torchrun"]
    _report(folder)
    page = (folder / "report.html").read_text()
    first, second, third = (
        page.index(word) for word in ("--config quickstart", "dino_ds/train.py one", "train.py two")
    )
    assert first < second < third and "deepspeed --num_gpus 1 dino_ds/train.py one" in page
