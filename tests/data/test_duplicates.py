"""Near-duplicates: the search equals comparing all pairs, and copies of a photograph are recognised."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from dino_ds.data.photos import _load_photos
from dino_ds.planning.data_statistics import MAX_DISTANCE, difference_hash, find_groups

PHOTOS = [photo for _, photo in _load_photos()]


def distance(a: int, b: int) -> int:
    return (a ^ b).bit_count()


def groups_by_comparing_all(hashes: list[int]) -> set[frozenset[int]]:
    group = {place: {place} for place in range(len(hashes))}
    for i, a in enumerate(hashes):
        for j, b in enumerate(hashes[:i]):
            if distance(a, b) <= MAX_DISTANCE and group[i] is not group[j]:
                group[i] |= group[j]
                for place in group[i]:
                    group[place] = group[i]
    return {frozenset(places) for places in group.values() if len(places) > 1}


@pytest.mark.parametrize("seed", range(5))
def test_search_equals_comparing_all_pairs(seed):
    """Random hashes and copies of them with 0 to 5 flipped bits anywhere, in any order."""
    rng = np.random.default_rng(seed)
    hashes = [int(value) for value in rng.integers(0, 2**64, 150, dtype=np.uint64)]
    for original in hashes[:100]:
        flipped = rng.choice(64, rng.integers(0, 6), replace=False)
        hashes.append(original ^ sum(1 << int(bit) for bit in flipped))
    rng.shuffle(hashes)
    found = find_groups(np.array(hashes, dtype=np.uint64))
    assert {frozenset(group) for group in found} == groups_by_comparing_all(hashes)
    assert [len(group) for group in found] == sorted((len(group) for group in found), reverse=True)


def test_many_equal_hashes_are_one_group():
    """Blank images must not cost a comparison of each with each."""
    hashes = np.zeros(200_000, dtype=np.uint64)
    hashes[7] = 0b111
    hashes[8] = 0xFFFF_FFFF
    (group,) = find_groups(hashes)
    assert len(group) == 199_999 and 8 not in group


def test_nothing_alike():
    assert find_groups(np.array([], dtype=np.uint64)) == []
    assert find_groups(np.array([1], dtype=np.uint64)) == []
    assert find_groups(np.array([0, 2**64 - 1], dtype=np.uint64)) == []


def _again_as_jpeg(photo: Image.Image) -> Image.Image:
    stream = io.BytesIO()
    photo.save(stream, "JPEG", quality=40)
    return Image.open(stream)


@pytest.mark.parametrize(
    "change",
    [
        _again_as_jpeg,
        lambda photo: photo.resize((photo.width // 2, photo.height // 2)),
        lambda photo: photo.convert("L"),
        lambda photo: ImageEnhance.Brightness(photo).enhance(0.8),
    ],
    ids=["jpeg", "half", "grey", "darker"],
)
def test_copies_of_a_photograph_are_recognised(change):
    """Most: in black sky and on blank walls a hash is made of noise."""
    close = [distance(difference_hash(photo), difference_hash(change(photo))) <= MAX_DISTANCE for photo in PHOTOS]
    assert np.mean(close) >= 0.85


def test_different_photographs_are_told_apart():
    hashes = [difference_hash(photo) for photo in PHOTOS]
    assert find_groups(np.array(hashes, dtype=np.uint64)) == []


def test_hash_says_which_pixel_is_brighter_than_its_left_neighbour():
    ramp = np.tile(np.arange(9, dtype=np.uint8) * 20, (8, 1))
    assert difference_hash(Image.fromarray(ramp)) == 2**64 - 1
    assert difference_hash(Image.fromarray(ramp[:, ::-1].copy())) == 0
    one = np.zeros((8, 9), dtype=np.uint8)
    one[0, 1] = 255
    assert difference_hash(Image.fromarray(one)) == 1 << 63
