"""Revisited Oxford and Paris: the metrics against a slow reference, the reader, and a benchmark of colors."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

import dino_ds.evals.landmarks as module
from dino_ds.errors import ConfigError, DataError
from dino_ds.evals.landmarks import QueryAnswers, describe_at_scales, landmark_map, oxford, paris, read_ground_truth
from tests.evals.tiny import context_of, landmarks


def _answer(**kinds):
    return QueryAnswers(**{"bbx": (0, 0, 1, 1), "easy": [], "hard": [], "junk": [], **kinds})


def _slow_precision(ranking, positives, junk):
    """AP by trapezia of one query: the list without junk, walked from its start."""
    kept = [image for image in ranking if image not in junk]
    area, found = 0.0, 0
    for place, image in enumerate(kept, start=1):
        if image in positives:
            before = found / (place - 1) if place > 1 else 1.0
            found += 1
            area += (1 / len(positives)) * (before + found / place) / 2
    return area


def test_scores_equal_a_slow_reference():
    generator = np.random.default_rng(0)
    ranking, answers = [], []
    for query in range(20):
        ranking.append(generator.permutation(40).tolist())
        drawn = generator.permutation(40)[:12].tolist()
        sizes = (0, 0, 4) if query == 3 else (3, 5, 4)
        easy, hard, junk = drawn[: sizes[0]], drawn[3 : 3 + sizes[1]], drawn[8 : 8 + sizes[2]]
        answers.append(_answer(easy=easy, hard=hard, junk=junk))
    rules = {"easy": ("easy", "junk hard"), "medium": ("easy hard", "junk"), "hard": ("hard", "junk easy")}
    for setup, (found, passed) in rules.items():
        rows = []
        for row, answer in zip(ranking, answers, strict=True):
            positives = [i for key in found.split() for i in getattr(answer, key)]
            if positives:  # revisitop leaves the others out of all means
                rows.append(
                    _slow_precision(row, positives, [i for key in passed.split() for i in getattr(answer, key)])
                )
        assert len(rows) == 19
        assert landmark_map(ranking, answers, setup) == pytest.approx(100 * np.mean(rows), abs=1e-10)


def test_paris_is_seen_at_three_scales_and_oxford_at_one(monkeypatch):
    monkeypatch.setattr(module, "_evaluate", lambda *_, size, scales: (size, scales))
    assert oxford(None) == (224, (1.0,)) and paris(None) == (512, (1.0, 2**-0.5, 0.5))


def test_nothing_to_find_is_no_number():
    assert math.isnan(landmark_map([[0, 1]], [_answer(junk=[0])], "medium"))


def test_colors_find_their_landmarks_once_the_query_is_cut_out(tmp_path):
    """Whole, the photo is mostly another landmark's; in its box it is its own."""
    landmarks(tmp_path)
    assert oxford(context_of(tmp_path)) == dict.fromkeys([f"oxford_{s}_map" for s in ("easy", "medium", "hard")], 100.0)


def test_scales_are_summed_and_odd_sides_lose_their_rest():
    images = torch.randn(1, 3, 35, 44, generator=torch.Generator().manual_seed(0))
    context = context_of(None)
    total = 0
    for scale in (1.0, 2**-0.5, 0.5):
        height, width = int(35 * scale), int(44 * scale)
        scaled = images
        if scale < 1:
            scaled = torch.nn.functional.interpolate(images, scale_factor=scale, mode="bilinear", align_corners=False)
        assert scaled.shape[-2:] == (height, width)
        total = total + context.backbone.features(scaled[..., : height // 8 * 8, : width // 8 * 8])
    backbone = context.backbone
    assert describe_at_scales(backbone, (0.1,), images).isfinite().all()  # smaller than a patch
    assert describe_at_scales(backbone, (1.0, 0.5), images[..., :1]).isfinite().all()  # a query one pixel wide
    ours = describe_at_scales(backbone, (1.0, 2**-0.5, 0.5), images)
    torch.testing.assert_close(ours, total / total.norm(), rtol=0, atol=1e-5)


def test_what_is_missing_is_said_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"--benchmark_root DIR.*gnd_roxford5k.pkl"):
        oxford(context_of(None))
    with pytest.raises(DataError, match=r"no roxford5k in .*gnd_roxford5k.json or jpg is not there; wanted is"):
        oxford(context_of(tmp_path))
    folder = landmarks(tmp_path)
    (folder / "jpg/place_1_000001.jpg").unlink()
    (folder / "jpg/place_1_000002.jpg").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"2 images can't be read, such as .*place_1_000001.jpg"):
        oxford(context_of(folder))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"imlist": []}, "do not fit together"),
        ({"qimlist": ["a"]}, "do not fit together"),
        ({"gnd": 5}, "gnd"),
        ({"gnd": [{"easy": [], "hard": [], "junk": []}] * 2}, "bbx"),
        (None, "not a ground truth"),
    ],
)
def test_a_wrong_ground_truth_is_refused(tmp_path, change, words):
    path = landmarks(tmp_path) / "gnd_roxford5k.json"
    path.write_text("pickle" if change is None else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(DataError, match=words) as error:
        read_ground_truth(path)
    assert "\n" not in str(error.value)
