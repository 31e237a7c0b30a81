"""Run folders as training leaves them, written by hand in milliseconds."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.health.beat import Event

SMALL = {"data.source": "photos", "data.global_batch": "64", "crops.global_size": "32", "crops.local_size": "16"}
SMALL |= {"model.patch_size": "8", "model.width": "32", "model.depth": "2", "model.heads": "2"}
SMALL["head.prototypes"] = "256"
STAMP = "2026-11-21T16:47:54Z"
EVENTS = [
    Event("images   2880 in photos; global batch 64 = micro-batch 32 x accumulation 1 x ranks 2; 45 steps an epoch",
          images=2880, place="photos"),
    Event("length   100 steps = 6400 images = 2.2 epochs", steps=100, last_step=100),
    Event("engine   ZeRO 0, fp32, cpu; run folder runs/a"),
    Event("memory   predicted peak 0.70 GiB at the end of the backward pass: libraries 0.50, second copy ... 0.20",
          gib=0.7, moment="the end of the backward pass", parts={"libraries": 0.5, "second copy of the student": 0.2}),
    Event("k-NN     at step 0: raw pixels 35.3 %, untrained network 62.0 %, teacher 62.0 % (chance 5.6 %)"),
    Event("step 10/100  loss 3.990 = entropy 2.635 + KL 1.355, 1071 img/s", "step", step=10),
]  # fmt: skip
DONE = Event("done     step 100; the run is in runs/a")
EVALUATIONS = {
    "knn": {"step": 100, "images": 6400, "date": "2026-11-21", "data": "birds/test", "train_images": 2880,
            "test_images": 936, "seconds": 3.1, "results": {"knn_10": 76.2, "knn_20": 75.0}},
    "statistics": {"step": 100, "images": None, "date": "2026-11-21", "train_images": None, "test_images": 936,
                   "seconds": 0.1, "results": {"rankme": 15.9}},
}  # fmt: skip


def record(step: int) -> dict[str, Any]:
    entropy, kl = 2 + math.exp(-step / 40), 0.6 + 1 / step
    return {
        "step": step, "images": step * 64, "epoch": step // 45, "loss": entropy + kl, "teacher_entropy": entropy,
        "kl": kl, "lr": 1e-3 * step, "weight_decay": 0.04, "teacher_momentum": 0.99 + step / 1e4, "teacher_temp": 0.04,
        "grad_norm": 1 + 1 / step, "loss_scale": 1.0, "skipped_steps": 0, "bad_images": 0, "images_per_second": 640.0,
        "data_wait_fraction": 0.2, "memory_gib": 0.8, "memory_predicted_gib": 0.7, "collapsed": 0,
    }  # fmt: skip


def knn(step: int, accuracy: float) -> dict[str, Any]:
    return {"step": step, "knn_top1": accuracy, "knn_raw_pixels": 35.3, "knn_chance": 5.6}


def make_run(path: Path, *events: Event, recipe: dict[str, str] | None = None, pictures: bool = True) -> Path:
    """A finished run of 100 steps with all its parts, or one with `events` at its end; tests take parts away."""
    path.mkdir(parents=True)
    (path / "config.yaml").write_text(dump_recipe(load_recipe(None, {**SMALL, **(recipe or {})})))
    (path / "ds_config.json").write_text(json.dumps({"train_batch_size": 64, "zero_optimization": {"stage": 0}}))
    about = {"run_id": "ab", "versions": {"python": "3.11", "dino_ds": "0.1.0", "torch": "2.15.0"}, "ranks": 2}
    (path / "environment.json").write_text(json.dumps({**about, "devices": "cpu", "cuda": None}))
    (path / "evaluations.json").write_text(json.dumps(EVALUATIONS))
    write_events(path, *EVENTS, *(events or [DONE]))
    records = [knn(0, 62.0), *(record(step) for step in range(10, 101, 10)), knn(50, 78.2), knn(100, 76.2)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    if pictures:
        for name in ("attention", "step_00000050/attention", "step_00000100/attention"):
            save_picture(path / f"pictures/{name}.png")
    return path


def write_events(path: Path, *events: Event) -> None:
    with (path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps({**json.loads(event.record), "time": STAMP}) + "\n" for event in events)


def save_picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8)).save(path)


def assert_inside(page: str) -> None:
    """No path of a chart leaves the chart's box."""
    charts = re.findall(r"<svg .*?</svg>", page, flags=re.DOTALL)
    assert charts
    for svg in charts:
        width, height = map(int, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
        paths = re.findall(r' d="([^"]+)"', re.sub(r"<defs>.*?</defs>", "", svg, flags=re.DOTALL))
        assert paths
        for path in paths:
            numbers = [float(text) for text in re.findall(r"-?[\d.]+", path)]
            assert all(0 <= x <= width for x in numbers[::2]) and all(0 <= y <= height for y in numbers[1::2]), path
