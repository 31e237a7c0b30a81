"""DAVIS, Oxford and Paris: metrics and propagation against slow references, the readers, and benchmarks of colors."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
import torch
from PIL import Image

from dino_ds.errors import ConfigError, DataError
from dino_ds.evals import benchmarks
from dino_ds.evals.benchmarks import LabelPropagation, QueryAnswers, davis, hard_labels, judge_masks, oxford
from dino_ds.evals.suite import find_evaluation
from tests.evals.tiny import clips, context_of, label_map, landmarks
from tests.ranks import run_on_ranks


def _masks(count=6, height=30, width=41, seed=0):
    """Blobs; the last two empty and full."""
    rough = torch.rand(count, 1, 5, 6, generator=torch.Generator().manual_seed(seed))
    masks = torch.nn.functional.interpolate(rough, (height, width), mode="bilinear")[:, 0] > 0.5
    masks[-2], masks[-1] = False, True
    return masks


def _slow_boundary(mask):
    height, width = mask.shape
    found = set()
    for y in range(height):
        for x in range(width):
            inside = [(a, b) for a, b in ((y, x + 1), (y + 1, x), (y + 1, x + 1)) if a < height and b < width]
            if y == height - 1 or x == width - 1:  # along the border only the next pixel of the border
                inside = [(a, b) for a, b in inside if a == y or b == x]
            if any(mask[a, b] != mask[y, x] for a, b in inside):
                found.add((y, x))
    return found


def _slow_f(found, wanted):
    radius = math.ceil(0.008 * math.hypot(*found.shape))
    a, b = _slow_boundary(found), _slow_boundary(wanted)

    def share(points, others):
        near = [any((y - v) ** 2 + (x - u) ** 2 <= radius**2 for v, u in others) for y, x in points]
        return sum(near) / len(near) if near else 1.0

    precision, recall = share(a, b), share(b, a)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


@pytest.mark.slow
def test_region_and_boundary_equal_slow_references():
    found, wanted = _masks(seed=0), _masks(seed=1)
    pairs = list(itertools.product(found, wanted))  # both empty and both full among them
    scores = [judge_masks(one[None].byte(), other[None].byte(), 1)[0] for one, other in pairs]
    for (one, other), (j, f) in zip(pairs, scores, strict=True):
        union = int((one | other).sum())
        assert j == (pytest.approx(int((one & other).sum()) / union, abs=1e-12) if union else 1.0)
        assert f == pytest.approx(_slow_f(one.numpy(), other.numpy()), abs=1e-12)
    first, second = (torch.stack(masks).byte() for masks in zip(*pairs, strict=True))
    assert judge_masks(first, second, 1)[0] == pytest.approx(np.mean(scores, axis=0), abs=1e-12)


def test_judging_is_the_mean_over_frames_of_each_object():
    wanted = torch.zeros(4, 20, 20, dtype=torch.uint8)
    wanted[:, 2:10, 2:10], wanted[:, 12:18, 12:18] = 1, 2
    found = wanted.clone()
    found[0][found[0] == 2] = 0
    first, second = judge_masks(found, wanted, 2)
    assert first == [1, 1] and second == [0.75, 0.75]


def _slow_propagation(frames, labels):
    """As the reference says it, patch by patch; frames (t, rows, columns, d), labels (classes, rows, columns)."""
    unit = (frames / frames.norm(dim=-1, keepdim=True)).double().numpy()
    known, patches = [(unit[0], labels.double().numpy())], np.argwhere(np.ones(labels.shape[1:])).tolist()
    for frame in unit[1:]:
        found = np.zeros(labels.shape)
        for y, x in patches:
            near = [(v, u) for v, u in patches if abs(v - y) <= 12 and abs(u - x) <= 12]
            context = [(seen[v, u], seg[:, v, u]) for seen, seg in (known[0], *known[1:][-7:]) for v, u in near]
            votes = [(math.exp(frame[y, x] @ features / 0.1), label) for features, label in context]
            best = sorted(votes, key=lambda vote: -vote[0])[:5]
            found[:, y, x] = sum(w * label for w, label in best) / sum(w for w, _ in best)
        known.append((frame, found))
    return [found for _, found in known[1:]]


@pytest.mark.parametrize("grid", [(2, 27), (26, 2)])
def test_propagation_equals_a_slow_reference(grid):
    """Ten frames, so that the oldest are forgotten; long sides, so that not all patches are near."""
    generator = torch.Generator().manual_seed(0)
    frames = torch.randn(10, *grid, 4, generator=generator)
    labels = torch.rand(3, *grid, generator=generator).softmax(dim=0)
    propagation = LabelPropagation(frames[0], labels)
    for frame, wanted in zip(frames[1:], _slow_propagation(frames, labels), strict=True):
        np.testing.assert_allclose(propagation(frame).numpy(), wanted, atol=1e-5)


def test_sides_are_the_reference_s():
    """480p of DAVIS is 854 x 480: 480 x 832 for patches of 16 and 8."""
    assert benchmarks.frame_sides(854, 480, 480, 16) == benchmarks.frame_sides(854, 480, 480, 8) == (480, 832)
    assert benchmarks.frame_sides(480, 854, 480, 14) == (840, 476)


def test_pixels_take_the_class_that_wins_when_each_is_stretched():
    """A class that peaks at 0.4 over this frame wins there over one at 0.6 that reaches 1 elsewhere."""
    soft = torch.tensor([[[1.0, 0.6, 1.0, 1.0]], [[0.0, 0.4, 0.0, 0.0]], [[0.0, 0.0, 0.0, 0.0]]])
    assert hard_labels(soft, 1, 2, 8)[0].tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    full = torch.stack((torch.zeros(2, 3), torch.ones(2, 3)))
    assert hard_labels(full, 4, 8, 12).min() == 1  # an object that fills the frame
    ramp = torch.linspace(0, 0.9, 6).view(2, 3)
    assert hard_labels(torch.stack((ramp, torch.full((2, 3), 0.3))), 4, 8, 12).mean() > 0.8  # faintly, but everywhere


def test_moving_squares_are_followed(tmp_path):
    clips(tmp_path / "DAVIS")
    results = davis(context_of(tmp_path, size=192))
    assert results["davis_jf_mean"] > 90, results
    assert results["davis_jf_mean"] == pytest.approx((results["davis_j_mean"] + results["davis_f_mean"]) / 2)


def test_what_is_wrong_is_said_in_one_line(tmp_path):
    mask = tmp_path / "Annotations/480p/walk/00003.png"
    for damage, words in (
        (lambda: None, r"no DAVIS in .*val.txt or .* is not there; wanted is JPEGImages/480p/"),
        (lambda: clips(tmp_path, names=("walk",)) and mask.unlink(), r"00003.png is not .*No such file"),
        (lambda: label_map(mask, np.zeros((96, 100))), r"mode P and size \(100, 96\): wanted .*, \(160, 96\)"),
        (lambda: Image.new("RGB", (160, 96)).save(mask), "mode RGB"),
        (lambda: label_map(mask.with_name("00000.png"), np.zeros((96, 160))), "has no object"),
        (lambda: clips(tmp_path, names=("short",), frames=2), "has 2 frames, 3 are needed"),
        (lambda: (tmp_path / "ImageSets/2017/val.txt").write_text(""), "names no clips"),
    ):
        damage()
        with pytest.raises(DataError, match=words):
            davis(context_of(tmp_path))
        if words == "mode RGB":
            label_map(mask, np.zeros((96, 160)))


def test_two_ranks_give_what_one_gives(tmp_path):
    """Of every benchmark; three clips on two ranks are unequal shares."""
    landmarks(tmp_path, "rparis6k")
    clips(tmp_path)
    one = _evaluate(tmp_path)
    for two in run_on_ranks(_evaluate, tmp_path):
        assert two == pytest.approx(one, abs=1e-9)


def _evaluate(root):
    return {
        name: value
        for benchmark in ("paris", "davis")
        for name, value in find_evaluation(benchmark)(context_of(root, size=64)).items()
    }


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
        answers.append(QueryAnswers(bbx=(0, 0, 1, 1), easy=easy, hard=hard, junk=junk))
    rules = {"easy": ("easy", "junk hard"), "medium": ("easy hard", "junk"), "hard": ("hard", "junk easy")}
    for setup, (found, passed) in rules.items():
        rows = []
        for row, answer in zip(ranking, answers, strict=True):
            positives = [i for key in found.split() for i in getattr(answer, key)]
            others = [i for key in passed.split() for i in getattr(answer, key)]
            if positives:  # revisitop leaves the others out of all means
                rows.append(_slow_precision(row, positives, others))
        assert len(rows) == 19
        assert benchmarks.landmark_map(ranking, answers, setup) == pytest.approx(100 * np.mean(rows), abs=1e-10)


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
        total = total + context.backbone.features(scaled[..., : height // 8 * 8, : width // 8 * 8])
    for scales, odd in (((0.1,), images), ((1.0, 0.5), images[..., :1])):  # smaller than a patch; one pixel wide
        assert benchmarks.describe_at_scales(context.backbone, scales, odd).isfinite().all()
    ours = benchmarks.describe_at_scales(context.backbone, (1.0, 2**-0.5, 0.5), images)
    torch.testing.assert_close(ours, total / total.norm(), rtol=0, atol=1e-5)


def test_what_is_missing_is_said_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"--benchmark_root DIR.*gnd_roxford5k.pkl"):
        oxford(context_of(None))
    with pytest.raises(DataError, match=r"no roxford5k in .*gnd_roxford5k.json or jpg is not there; wanted is"):
        oxford(context_of(tmp_path))
    folder = landmarks(tmp_path)
    (folder / "jpg/place_1_000001.jpg").unlink()
    (folder / "jpg/place_1_000002.jpg").write_bytes(b"no image")
    file = folder / "gnd_roxford5k.json"
    truth = json.loads(file.read_text())
    no_boxes = [{"easy": [], "hard": [], "junk": []}] * 2
    for content, words in (
        (json.dumps(truth), r"2 images can't be read, such as .*place_1_000001.jpg"),
        (json.dumps({**truth, "imlist": []}), "do not fit together"),
        (json.dumps({**truth, "gnd": no_boxes}), "bbx"),
        ("pickle", "not a ground truth"),
    ):
        file.write_text(content)
        with pytest.raises(DataError, match=words) as error:
            oxford(context_of(folder))
        assert "\n" not in str(error.value)
