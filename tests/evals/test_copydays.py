"""Copy detection: features, whitening and metric against slow references, and a benchmark of colors."""

from __future__ import annotations

import math
import shutil

import pytest
import torch

from dino_ds.errors import DataError
from dino_ds.evals.copydays import copy_map, copydays, originals_of, pool
from tests.evals.tiny import context_of, copies, photo


def test_pooling_is_the_fourth_power_mean_beside_cls():
    generator = torch.Generator().manual_seed(0)
    cls, patches = torch.randn(2, 5, generator=generator), torch.randn(2, 3, 4, 5, generator=generator)
    ours = pool(cls, patches)
    for b in range(2):
        assert ours[b, :5].tolist() == cls[b].tolist()
        for channel in range(5):
            values = [max(float(x), 1e-6) ** 4 for x in patches[b, :, :, channel].flatten()]
            assert float(ours[b, 5 + channel]) == pytest.approx((sum(values) / 12) ** 0.25, rel=1e-5)


def test_map_counts_the_twenty_nearest_alone():
    """Against loops over similarities in FP64."""
    generator = torch.Generator().manual_seed(2)
    queries, database = torch.randn(7, 4, generator=generator), torch.randn(60, 4, generator=generator)
    wanted = [[3 * q, 3 * q + 1] for q in range(7)]
    total = 0.0
    for query, positives in zip(queries.double().numpy(), wanted, strict=True):
        cosines = [float(query @ x) / math.hypot(*x) for x in database.double().numpy()]
        order = sorted(range(60), key=lambda i, c=cosines: -c[i])[:20]
        ranks = [rank for rank, i in enumerate(order) if i in positives]
        for seen, rank in enumerate(ranks):
            total += ((seen / rank if rank else 1.0) + (seen + 1) / (rank + 1)) / 2 / 2
    assert copy_map(queries, database, wanted) == pytest.approx(100 * total / 7, abs=1e-10)


def test_names_tell_the_original():
    assert originals_of(["200101.jpg", "200002.jpg"], ["200000.jpg", "200100.jpg"]) == [[1], [0]]
    with pytest.raises(DataError, match=r"200701.jpg has no original: none of 1 names begins with 2007"):
        originals_of(["200701.jpg"], ["200000.jpg"])


def test_colors_find_their_originals(tmp_path):
    copies(tmp_path / "copydays")
    results = copydays(context_of(tmp_path, size=64))
    names = {"copydays_strong_map", "copydays_jpegqual_3_map", "copydays_jpegqual_map"}
    assert results == dict.fromkeys(names, 100.0)
    photo(tmp_path / "copydays/jpegqual/15/200000.jpg", [[2, 3]])
    several = copydays(context_of(tmp_path, size=64))
    assert several["copydays_jpegqual_15_map"] < 90
    assert several["copydays_jpegqual_map"] == pytest.approx(50 + several["copydays_jpegqual_15_map"] / 2)
    shutil.rmtree(tmp_path / "copydays/jpegqual/15")
    shutil.copy(tmp_path / "copydays/strong/200202.jpg", tmp_path / "copydays/distractors/nearer.jpg")
    assert copydays(context_of(tmp_path, size=64))["copydays_strong_map"] == 62.5  # AP at rank 2 is 1/4


def test_what_is_missing_is_said_in_one_line(tmp_path):
    (tmp_path / "original").mkdir()
    with pytest.raises(DataError, match=r"no Copydays in .*strong is not there; wanted is .*jegou/data.php"):
        copydays(context_of(tmp_path))
    (tmp_path / "strong").mkdir()
    with pytest.raises(DataError, match="original has no images"):
        copydays(context_of(tmp_path))
    (tmp_path / "original").rmdir()
    (tmp_path / "original").write_text("a file")
    with pytest.raises(DataError, match="original has no images"):
        copydays(context_of(tmp_path))
