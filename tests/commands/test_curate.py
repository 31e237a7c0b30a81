"""`dino-ds find` and `curate`: exact, by seed, whole or not at all, and refused for other features and images."""

from __future__ import annotations

import csv
import itertools
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
import torch
from PIL import Image, ImageEnhance
from pyarrow import parquet
from sklearn.cluster import KMeans

import dino_ds
from dino_ds.commands import embed
from dino_ds.commands.curate import _train, check
from dino_ds.config.loading import dump_recipe, load_recipe
from dino_ds.data import sources
from dino_ds.errors import ConfigError, UserError
from dino_ds.evals import curation
from dino_ds.evals.curation import Vectors, cluster_levels, draw, groups, nearest_rows, pairs_of_cosine
from dino_ds.options import commands, definition, flags
from dino_ds.report.folder import read_run
from dino_ds.report.single_run import reproduction
from dino_ds.weights.export import FORMATS
from tests.weights.test_weights import _backbone

CPU, PARTS = torch.device("cpu"), "tests.run.own_parts"
SMALL, LARGE = 1e-5, 1.0
"""GiB: blocks of 16 rows, and one block."""


@pytest.fixture(scope="module")
def features():
    """(700, 24) with equal rows, one of NaN and one of zeros."""
    rows = np.random.default_rng(0).normal(size=(700, 24)).astype(np.float32)
    rows[[5, 40]], rows[300:330], rows[77], rows[78] = rows[600], rows[7], np.nan, 0
    return rows


@pytest.mark.parametrize("memory_gib", [SMALL, LARGE])
def test_neighbors_and_groups_are_those_of_brute_force(features, memory_gib):
    """In FP64; of equal neighbors the first row comes first."""
    vectors = Vectors.of(features, memory_gib, CPU)
    assert len(vectors) == 698 and {77, 78}.isdisjoint(vectors.chosen)
    unit = features[vectors.chosen].astype(np.float64)
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    cosines = np.stack([(unit * query).sum(axis=1) for query in unit])
    found, places = nearest_rows(vectors.take(slice(0, 60)), vectors, 10)
    wanted = np.argsort(-cosines[:60].round(12), axis=1, kind="stable")[:, :10]
    assert (places == wanted).all()
    np.testing.assert_allclose(found, np.take_along_axis(cosines[:60], wanted, axis=1), rtol=1e-12)
    for threshold in (0.62, float(cosines[0, 1:].max()) - 1e-12):  # the second is a pair's own: FP32 can't tell
        group = np.arange(len(unit))
        for _ in group:  # the smallest number spreads along pairs
            new = np.where(cosines >= threshold, group, len(group)).min(axis=1)
            if (new == group).all():
                break
            group = new
        assert (groups(len(unit), pairs_of_cosine(vectors, threshold)) == group).all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("images", "clusters", "draws", "most"), [(1500, 25, 10, 2048), (20000, 25, 1, 2048), (3000, 150, 1, 0)]
)
def test_clusters_are_as_good_as_the_median_of_scikit_learn(monkeypatch, images, clusters, draws, most):
    """The loss is at most 2 % above that of the median of single starts, of a sample of the images too; 5 % with the
    first centers of more than `most` clusters, which are a single start."""
    monkeypatch.setattr(curation, "_MOST_CLUSTERS", most)
    for seed in range(835000, 835000 + draws):
        random = np.random.default_rng(seed)
        middles = random.normal(size=(clusters, 64))[random.integers(clusters, size=images)]
        rows = (middles + random.uniform(0.2, 0.8) * random.normal(size=(images, 64))).astype(np.float32)
        vectors = Vectors.of(rows, LARGE, CPU)
        unit = vectors.take(slice(None)).numpy()
        theirs = [KMeans(clusters, n_init=1, random_state=start).fit(unit).inertia_ for start in range(9)]
        assert cluster_levels(vectors, [clusters], seed)[1].sum() <= (1.02 if most else 1.05) * np.median(theirs), seed


def test_a_draw_is_even_down_the_levels_and_follows_from_the_seed(features):
    vectors = Vectors.of(features, LARGE, CPU)
    levels, _ = cluster_levels(vectors, (60, 6), seed=0)
    rows = draw(levels, 200, seed=3)
    assert len(set(rows.tolist())) == 200 and (rows == draw(levels, 200, seed=3)).all()
    assert (rows != draw(levels, 200, seed=4)).any()
    for labels, above in ((levels[1], np.zeros_like(rows)), (levels[0], levels[1][rows])):
        for parent in np.unique(above):
            inside = np.unique(labels[rows[above == parent]])
            drawn, there = np.bincount(labels[rows[above == parent]])[inside], np.bincount(labels)[inside]
            assert drawn[drawn < there].min(initial=drawn.max()) >= drawn.max() - 1
    assert (draw(levels, 698, seed=0) == np.arange(698)).all()


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Weights, 60 smooth images in two folders of which one has a name that is not UTF-8, 6 planted near-duplicates
    (crop, light, JPEG) and a broken file; and their features in two forms."""
    path, draws = tmp_path_factory.mktemp("curate"), np.random.default_rng(0)
    FORMATS["safetensors"](_backbone(), path / "teacher.safetensors")
    folders = [os.fsencode(path) + b"/images/" + name for name in (b"caf\xe9", b"plain")]
    for folder in folders:
        os.makedirs(folder)
        for number in range(30):
            coarse = Image.fromarray(draws.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            coarse.resize((64, 64), Image.Resampling.BICUBIC).save(os.fsdecode(folder) + f"/{number:02d}.png")
    plain = Path(os.fsdecode(folders[1]))
    for number in range(6):
        image = Image.open(plain / f"{number:02d}.png")
        crop = image.crop((1, 1, 63, 63)).resize((70, 70) if number else (62, 62))
        other = [crop, ImageEnhance.Brightness(image).enhance(1.05), image][number % 3]
        other.save(plain / f"copy{number}.{['png', 'png', 'jpg'][number % 3]}", quality=85)
    (plain / "bad.png").write_bytes(b"broken")
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(embed, "describing", lambda *_: _gray_patches)
    for form in ("npy", "parquet"):
        with pytest.warns(UserWarning, match="1 images can.t be read"):
            dino_ds.embed(path / "teacher.safetensors", path / "images", path / f"{form}.{form}", workers=0)
    yield path
    monkeypatch.undo()


def _gray_patches(images):
    """(b, 64), in place of what random weights say, to whom all images are alike."""
    return torch.nn.functional.adaptive_avg_pool2d(images.mean(dim=1, keepdim=True), 8).flatten(1)


@pytest.mark.parametrize("duplicates", [0.95, "auto"])
def test_planted_near_duplicates_are_found_and_the_list_trains(place, tmp_path, duplicates):
    """Of each pair the image with the longer side stays, of equal ones the first name; names are bytes."""
    found = dino_ds.curate(place / "npy.npy", duplicates=duplicates, out=tmp_path / "out")
    rows = list(csv.DictReader((tmp_path / "out/duplicates.csv").open()))
    gone = {Path(row["name"]).name for row in rows if row["kept"] == "no"}
    assert gone == {"copy0.png", "copy1.png", "copy2.jpg", "03.png", "copy4.png", "copy5.jpg"}
    assert found.listed.sum() == 60 and (found.duplicate_of >= 0).sum() == 6
    assert (tmp_path / "out/images.txt").read_bytes().count(b"/caf\xe9/") == 30
    source = sources.training_images(load_recipe("vits16", {"data.root": str(tmp_path / "out/images.txt")}).data, 0.0)
    assert len(source) == 60 and len(source.classes) == 2
    assert Image.open(tmp_path / "out/duplicates.png").width > 200


def test_both_forms_give_the_same_clusters_which_balance_training(place, tmp_path):
    pytest.importorskip("pyarrow")
    one = dino_ds.curate(place / "npy.npy", clusters=[9, 3], out=tmp_path / "npy")
    other = dino_ds.curate(place / "parquet.parquet", clusters=[9, 3], draw=20, duplicates=1, out=tmp_path / "p")
    assert (one.clusters == other.clusters).all() and (one.clusters < 0).all(axis=1).sum() == 1
    assert len((tmp_path / "p/images.txt").read_bytes().splitlines()) == 20
    keys = {"data.root": str(place / "images"), "data.balance": f"clusters:{tmp_path}/npy/clusters.csv"}
    source = sources.training_images(load_recipe("vits16", keys).data, 0.0)
    assert source.notes == ["data.balance clusters: 1 images have none, and are never drawn"]


@pytest.mark.parametrize("key", [None, "data.source", "objective.terms", "teacher.others"])
def test_a_command_that_would_import_code_of_a_run_is_not_printed_unsaid(tmp_path, key):
    """--config allows the code that its file names: `curate` leaves the file out, and the report names the code."""
    values = {"data.source": f"{PARTS}:S", "objective.terms": f'{{"a": {{"spec": "{PARTS}:T", "weight": 1}}}}'}
    values["teacher.others"] = f'{{"a": {{"spec": "{PARTS}:E"}}}}'
    recipe = load_recipe("quickstart", {key: values[key]} if key else {})
    (tmp_path / "config.yaml").write_text(dump_recipe(recipe))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "images": 64, "loss": 2.5}\n')
    made = SimpleNamespace(about={"origin": {"model": str(tmp_path), "source": "folder", "root": "images"}})
    assert ("--config" in _train(made, "data.balance", tmp_path / "clusters.csv")) == (key is None)
    assert (f"imports {PARTS}:" in reproduction(read_run(tmp_path))) == (key is not None)


def test_the_printed_command_for_clusters_names_their_images_and_holds_none_out(tmp_path):
    """Of a run of other images that held a tenth out, which data.balance can't."""
    (tmp_path / "config.yaml").write_text(dump_recipe(load_recipe("small", {"data.root": "a", "eval.val_share": 0.1})))
    made = SimpleNamespace(about={"origin": {"model": str(tmp_path), "source": None, "root": "images"}})
    request = flags.parse_flags(commands.TRAIN, _train(made, "data.balance", tmp_path / "clusters.csv").split()[2:])
    recipe = load_recipe(request.config, request.recipe)
    assert (recipe.data.root, recipe.eval.val_share, recipe.model.width) == ("images", 0, 128)
    request = flags.parse_flags(commands.TRAIN, _train(made, "data.root", tmp_path / "images.txt").split()[2:])
    assert request.recipe == {"data.root": str(tmp_path / "images.txt")}


def test_a_file_finds_itself_and_a_row_its_neighbors(place, tmp_path):
    asked = place / "images/plain/07.png"
    first, second, *_ = dino_ds.find(place / "npy.npy", [asked], top=3, out=tmp_path / "a")
    assert first.name == str(asked) and first.cosine == pytest.approx(1, abs=1e-6) and second.cosine < 0.9999
    by_name, by_row = (
        dino_ds.find(place / "npy.npy", [one], 2, out=tmp_path / str(one)[-1]) for one in (asked, first.row)
    )
    named = dino_ds.find(place / "npy.npy", [first.name.replace("07", "copy0"), 31], top=1, out=tmp_path / "c")
    assert len(named) == 2 and by_name[1][1:] == by_row[0][1:]
    assert Image.open(tmp_path / "c.png").height > 200
    assert str(asked).encode() in (tmp_path / "a.txt").read_bytes()


@pytest.mark.parametrize("number", [1, 5])
def test_a_kill_leaves_nothing_and_the_same_command_begins_anew(place, tmp_path, monkeypatch, number):
    """Before the first of the files is written, and before the folder gets its name."""
    calls = itertools.count(1)

    def killing(plain):
        def call(*given):
            if next(calls) == number:
                raise KeyboardInterrupt
            return plain(*given)

        return call

    options = {"duplicates": 0.95, "clusters": [5], "draw": 10, "out": tmp_path / "out"}
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", killing(Path.write_bytes))
        patch.setattr(os, "replace", killing(os.replace))
        with pytest.raises(KeyboardInterrupt):
            dino_ds.curate(place / "npy.npy", **options)
    assert not list(tmp_path.glob("out*"))
    dino_ds.curate(place / "npy.npy", **options)
    names = ["clusters.csv", "clusters.png", "duplicates.csv", "duplicates.png", "images.txt"]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def _described(place, **values):
    about = json.loads((place / "npy.npy.json").read_text())
    (place / "npy.npy.json").write_text(json.dumps(about | values))


def _reordered(place):
    """The first two rows change places, as after sorting an array."""
    rows = np.load(place / "npy.npy", mmap_mode="r+")
    rows[[0, 1]] = rows[[1, 0]]
    rows.flush()


def _described_by_another(place):
    """Features of the same images by another array of this shape, beside the first one's description."""
    table = parquet.read_table(place / "parquet.parquet")
    turned = table["features"].combine_chunks().take(pyarrow.array(range(len(table))[::-1]))
    parquet.write_table(table.set_column(3, "features", turned), place / "parquet.parquet")


REFUSED = {
    "order": ("npy", _reordered, r"npy\.npy has other rows than npy\.npy\.json describes, or in another order"),
    "order in parquet": ("parquet", _described_by_another, r"parquet\.parquet has other rows than"),
    "cut": ("npy", lambda place: os.truncate(place / "npy.npy", 500), "not as embed writes"),
    "gone": ("npy", lambda place: (place / "npy.npy.json").unlink(), r"npy\.npy\.json can't be read: No such file"),
    "parquet": ("parquet", lambda place: (place / "parquet.parquet").write_bytes(b"PAR1"), "not as embed writes"),
    "empty": ("npy", lambda place: (place / "npy.npy.json").write_text("{}"), "json has no format number"),
    "patches": ("npy", lambda place: _described(place, what="patches"), "maps of patches: embed with --what cls"),
    "more": (
        "npy",
        lambda place: shutil.copy(place / "images/plain/07.png", place / "images/plain/99.png"),
        "changed since .* 1 added",
    ),
    "touched": ("npy", lambda place: os.utime(place / "images/plain/07.png", (1, 1)), "other sizes or times"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_other_files_and_images_are_refused_in_one_line(place, tmp_path, what):
    form, change, said = REFUSED[what]
    copy = shutil.copytree(place, tmp_path / "place", symlinks=True)
    change(copy)
    with pytest.raises(UserError, match=said) as told:
        dino_ds.curate(copy / f"{form}.{form}", duplicates=0.95, root=copy / "images", out=tmp_path / "out")
    assert "\n" not in str(told.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "--duplicates auto, --clusters 1000, or both"),
        ({"duplicates": 0.9, "draw": 3}, "--draw 3 is balanced over clusters"),
        ({"clusters": (10, 100)}, "each level has fewer"),
        ({"clusters": (3,), "out": "/dev/null/x"}, "/dev/null/x can't be written"),
    ],
)
def test_options_that_say_nothing_are_refused_before_torch_is_loaded(options, said):
    with pytest.raises(ConfigError, match=said):
        check(definition.CurateOptions(features="x.npy", **options))


def test_other_weights_more_clusters_than_images_and_unknown_images_are_refused(place, tmp_path):
    other = _backbone()
    next(other.network.parameters()).data.add_(1)
    FORMATS["safetensors"](other, tmp_path / "other.safetensors")
    find, rows, plain = dino_ds.find, place / "npy.npy", place / "images/plain"
    cases = [
        (lambda: find(rows, [plain / "07.png"], model=tmp_path / "other.safetensors"), r"weights differ.*give"),
        (lambda: dino_ds.curate(rows, clusters=[67], out=tmp_path / "o"), "67 are more than the 66"),
        (lambda: find(rows, ["nope.png"]), "nope.png is no file, nor the name or the number"),
        (lambda: find(rows, [plain / "bad.png"]), r"bad\.png \("),
        (lambda: find(place / "x.pt", [0]), r"x\.pt is not \.npy or \.parquet: give a file of dino-ds embed"),
    ]
    for call, said in cases:
        with pytest.raises(UserError, match=said):
            call()
