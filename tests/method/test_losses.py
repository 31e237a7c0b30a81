"""DINO against the paper's double loop; it, iBOT, KoLeo, Gram and centering against facebookresearch's; the coding rate
and the regression of features against their formulas.

FP32 on both sides, sums in another order: probabilities and losses to 1e-6 of the largest, gradients to 2e-6.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from dino_ds.config.crops import EMA
from dino_ds.config.fields import Ramp
from dino_ds.engine import distributed
from dino_ds.method import gram
from dino_ds.method.dino import DINO, DinoTerm, IbotTerm, RunningCenter, SinkhornKnopp, dino_loss, ibot_loss
from dino_ds.method.frozen import FeatureTerm
from dino_ds.method.gram import GramTerm, gram_loss, tiled_gram_loss
from dino_ds.method.objective import RunningMean
from dino_ds.method.specs.ours import IBOT, CodingRateSpec
from dino_ds.method.spread import CodingRateTerm, KoLeoTerm
from dino_ds.models import prototypes
from dino_ds.models.prototypes import Comparison, DinoHead, Logits, Prototypes
from tests.ranks import run_on_ranks
from tests.reference import as_logits, compare, golden_v2, golden_v2_meta

pytestmark = pytest.mark.numerical


def _close(ours, theirs, part=4e-6):
    theirs = theirs.detach().view_as(ours)
    torch.testing.assert_close(ours.detach(), theirs, rtol=0, atol=part * float(theirs.abs().max()) + 1e-9)


def _targets(logits, temperature, iterations=3):
    """What a comparison takes the targets to be."""
    shift = SinkhornKnopp(iterations).shift([as_logits(part) for part in logits], temperature)
    return (torch.cat(logits) / temperature + shift).softmax(dim=-1)


class TestSinkhorn:
    @pytest.mark.parametrize(
        ("rows", "name", "temperature", "iterations"),
        [
            ("cls", "cls.targets.temp0.04", 0.04, 3),
            ("cls", "cls.targets.temp0.07", 0.07, 3),
            ("cls", "cls.targets.temp0.07.iterations1", 0.07, 1),
            ("cls", "cls.targets.temp0.07.iterations10", 0.07, 10),
            ("patch", "patch.targets.temp0.07", 0.07, 3),
        ],
    )
    @pytest.mark.parametrize("parts", [(), (1, 5)])
    def test_equals_the_reference_s(self, monkeypatch, rows, name, temperature, iterations, parts):
        """Also of a window of unequal micro-batches, and in tiles of five rows."""
        monkeypatch.setitem(prototypes._TILE, "cpu", 5 * 96 * 4)
        recorded = golden_v2("sinkhorn")
        logits = list(recorded[f"{rows}.logits"].tensor_split(parts))
        _close(_targets(logits, temperature, iterations), recorded[name])

    def test_one_row_is_uniform(self):
        recorded = golden_v2("sinkhorn")
        _close(_targets([recorded["cls.logits"][:1]], 0.07), recorded["one_row.targets"])

    def test_large_logits_do_not_overflow(self):
        """Up to 500, where the reference's exp is infinite; in double precision as they are, FP32 rounds by 3e-5."""
        torch.manual_seed(0)
        logits = 20 * torch.rand(12, 96)
        q = (logits.double() / 0.04).exp()
        for _ in range(3):
            q = q / q.sum(dim=0)
            q = q / q.sum(dim=1, keepdim=True)
        torch.testing.assert_close(_targets([logits], 0.04).double(), q, rtol=0, atol=2e-4)

    def test_on_two_ranks_equals_the_joint_batch(self):
        assert run_on_ranks(_sinkhorn_of_a_rank) == [True, True]


def _sinkhorn_of_a_rank():
    recorded, rank = golden_v2("two_ranks"), distributed.rank()
    for rows in ("cls", "patch"):
        _close(_targets([recorded[f"rank{rank}.{rows}.logits"]], 0.07), recorded[f"rank{rank}.{rows}.targets"])
    for all_ranks, group in ((True, "all"), (False, "4")):
        features = recorded[f"rank{rank}.koleo.features"].clone().requires_grad_()
        loss = KoLeoTerm(crops=1, all_ranks=all_ranks).loss({"cls/global": features}, None, None).loss
        loss.backward()
        _close(loss.view(1), recorded[f"rank{rank}.koleo.topk1.group{group}.loss"])
        _close(features.grad, recorded[f"rank{rank}.koleo.topk1.group{group}.grad"])
    empty = [recorded["rank0.patch.logits"][:0]] if rank else [recorded["rank0.patch.logits"]]
    alone = recorded["rank0.patch.logits"]
    expected = alone / 0.07
    for _ in range(3):  # a rank without masked patches takes part
        expected = expected - expected.logsumexp(0)
        expected = expected - expected.logsumexp(1, keepdim=True)
    _close(_targets(empty, 0.07), expected.exp()[: len(empty[0])]) if not rank else _targets(empty, 0.07)
    return True


@pytest.mark.parametrize("rows", ["cls", "patch"])
def test_the_running_center_equals_the_reference_s(rows):
    recorded, center = golden_v2("sinkhorn"), RunningCenter("center", 96, 0.9)
    for step in range(3):
        logits = recorded[f"centre.{rows}.step{step}.logits"].view(-1, 96)
        shift = center.shift([as_logits(logits)], 0.05)
        _close((logits / 0.05 + shift).softmax(-1), recorded[f"centre.{rows}.step{step}.targets"].view(-1, 96))
        center.center.commit(center.center.pending())
    _close(center.center.value, recorded[f"centre.{rows}.after"].flatten())


@pytest.mark.parametrize("weight", [None, 1.0, 0.5, 0.0])
@pytest.mark.parametrize("way", ["softmax", "sinkhorn"])
def test_dino_equals_the_reference_s(way, weight):
    """Loss = local and global terms as they enter its total; weight: of the local one, as in dinov3's Gram stage."""
    recorded, meta = golden_v2("dino_loss"), golden_v2_meta()["dino_loss"]
    centering = RunningCenter("center", 96, 0.9) if way == "softmax" else SinkhornKnopp()
    if way == "softmax":
        centering.center.load(recorded["centre"].flatten())
    term = DinoTerm(96, meta["student_temp"], centering, weighs_local=weight is not None)
    schedule = SimpleNamespace(teacher_temp=meta["teacher_temp"], weights={"dino_local": weight})
    (targets,) = term.targets([{"ema": {DINO: as_logits(recorded["teacher"])}}], [{}], schedule)
    student = torch.cat((recorded["student_global"], recorded["student_local"])).requires_grad_()
    loss, scalars = term.loss({DINO: compare(student, targets)}, targets, schedule)
    loss.backward()
    w = 1.0 if weight is None else weight
    _close(loss, w * recorded[f"{way}.local"] + recorded[f"{way}.global"])
    _close(student.grad, torch.cat((recorded[f"{way}.global.grad"], w * recorded[f"{way}.local.grad"])))
    probs = torch.softmax(recorded["teacher"] / meta["teacher_temp"] + targets.shift, dim=-1).unflatten(0, (2, -1))
    views = student.detach().unflatten(0, (-1, probs.shape[1])).requires_grad_()
    plain = dino_loss(views, probs, meta["student_temp"], w)
    plain.backward()
    _close(plain, loss)
    _close(views.grad.flatten(0, 1), student.grad)
    assert scalars.keys() == set(term.scalars)
    if weight is not None:  # of the 8 pairs 6 are local
        _close(scalars["dino_cross_entropy"], loss * 8 / (2 + 6 * w))
    if w == 1:
        assert torch.equal(loss, compare(student, targets._replace(others=1.0)).loss)


def test_ibot_equals_the_reference_s():
    recorded, meta = golden_v2("ibot_loss"), golden_v2_meta()["ibot_loss"]
    masks, temperature = recorded["masks"], 0.07
    term = IbotTerm(96, meta["student_temp"], RunningCenter("ibot_center", 96, 0.9))
    teacher = temperature * recorded["targets"].flatten(0, 1)[masks.flatten()].clamp_min(1e-30).log()
    given = {"global": {"mask": masks, "weights": recorded["masks_weight"]}}
    schedule = SimpleNamespace(teacher_temp=temperature)
    (targets,) = term.targets([{"ema": {IBOT: as_logits(teacher)}}], [given], schedule)
    student = recorded["student"].flatten(0, 1)[masks.flatten()].requires_grad_()
    loss, scalars = term.loss({IBOT: compare(student, targets)}, targets, schedule)
    loss.backward()
    _close(loss, recorded["dinov2.masked"])
    _close(student.grad, recorded["dinov2.masked.grad"])
    logits, probs = student.detach().requires_grad_(), (teacher / temperature).softmax(-1)
    plain = ibot_loss(logits, probs, meta["student_temp"], recorded["masks_weight"], len(masks))
    plain.backward()
    _close(plain, loss)
    _close(logits.grad, student.grad)
    entropy = (teacher / temperature).exp()
    weights = recorded["masks_weight"]
    _close(scalars["ibot_teacher_entropy"], (torch.special.entr(entropy).sum(-1) * weights).sum() / weights.sum())
    _close(scalars["ibot_cross_entropy"], loss.detach() * 6 / weights.sum())


def test_ibot_without_a_masked_patch_is_zero():
    term = IbotTerm(96, 0.1, SinkhornKnopp())
    given = {"global": {"mask": torch.zeros(6, 9, dtype=torch.bool), "weights": torch.zeros(0)}}
    teacher = {"ema": {IBOT: as_logits(torch.zeros(0, 96))}}
    (targets,) = term.targets([teacher], [given], SimpleNamespace(teacher_temp=1))
    student = torch.zeros(0, 96, requires_grad=True)
    loss, scalars = term.loss({IBOT: compare(student, targets)}, targets, None)
    loss.backward()
    assert loss == 0 and all(value == 0 for value in scalars.values())


def test_koleo_equals_the_reference_s():
    recorded = golden_v2("koleo")
    features = recorded["features"].flatten(0, 1).requires_grad_()
    loss = KoLeoTerm(crops=2).loss({"cls/global": features}, None, None).loss
    loss.backward()
    _close(0.1 * loss, recorded["total"])
    # Two features are all but equal: their distance, 1e-4, carries the rounding of features of size 1.
    _close(features.grad, torch.cat((recorded["crop0.grad"], recorded["crop1.grad"])), part=1e-4)


@pytest.mark.parametrize("tile", [1, 11, 1000])
@pytest.mark.parametrize(
    ("crops", "seen", "own", "weighted", "learned"),
    [
        (4, 2, True, False, False),
        (2, 2, True, False, True),
        (3, 2, False, True, False),
        (1, 1, False, True, True),
        (4, 2, True, True, "free"),
    ],
)
def test_tiles_of_a_head_s_loss(monkeypatch, tile, crops, seen, own, weighted, learned):
    """Against the plain form that holds all logits."""
    monkeypatch.setitem(prototypes._TILE, "cpu", tile * 33 * 4)
    monkeypatch.setitem(prototypes._BLOCK, "cpu", tile + 3)
    monkeypatch.setattr(prototypes, "_CPU_BLOCK", tile + 3)
    torch.manual_seed(0)
    head, images = Prototypes(8, 33, learned is True, free=learned == "free"), 7
    if learned is True:
        torch.nn.init.uniform_(head.lengths, 0.5, 2.0)
    z = torch.randn(crops * images, 8, requires_grad=True)
    teacher = Prototypes(8, 33)(torch.randn(seen * images, 8))
    weights = torch.rand(images) if weighted else None
    how = Comparison(Logits(*(t.detach() for t in teacher[:3])), torch.randn(33), 0.07, 0.1, seen, own, weights)
    compared = head(z, how)
    (3 * compared.loss).backward()
    ours = [z.grad, *(p.grad for p in head.parameters())]
    z.grad = None
    head.zero_grad()
    expected, entropy = _plain(z, head, how)
    (3 * expected).backward()
    _close(compared.loss, expected)
    _close(compared.entropy, entropy)
    for mine, theirs in zip(ours, [z.grad, *(p.grad for p in head.parameters())], strict=True):
        _close(mine, theirs)


def _plain(z, head, how):
    directions = head.weight if head.free else F.normalize(head.weight, dim=-1)
    directions = directions if head.lengths is None else directions * head.lengths
    student = (F.normalize(z, dim=-1) @ directions.t() / how.student_temp).log_softmax(-1)
    teacher = how.teacher.rows @ how.teacher.weight.t() * how.teacher.scale
    targets = (teacher / how.temperature + how.shift).softmax(-1).view(how.crops, -1, len(head.weight))
    student = student.view(-1, *targets.shape[1:])
    weights = torch.ones(targets.shape[1]) if how.weights is None else how.weights
    pairs = [(t, s) for t in range(how.crops) for s in range(len(student)) if not (how.exclude_own and s == t)]
    total = sum((-(targets[t] * student[s]).sum(-1) * weights).sum() for t, s in pairs)
    entropy = (torch.special.entr(targets).sum(-1) * weights).sum() / (weights.sum() * how.crops)
    return total / (len(pairs) * targets.shape[1]), entropy


def test_fp32_under_autocast():
    """Logits, loss and the products in them; but the head knows that they come of a low precision."""
    head, how = DinoHead(12, 20, 8, 15, 3), Comparison(as_logits(torch.randn(6, 15)), torch.randn(15), 0.5, 0.1)
    assert not head(torch.randn(6, 12)).low
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = head(torch.randn(6, 12))
        assert logits.low and {t.dtype for t in logits[:3]} == {torch.float32}
        assert logits.multiply(logits.rows, torch.empty(6, 15)).dtype == logits.sum().dtype == torch.float32
        compared = head(torch.randn(6, 12), how)
        assert compared.loss.dtype == compared.entropy.dtype == torch.float32


def test_a_step_without_rows_leaves_the_center():
    center = RunningMean(7, momentum=0.9)
    center.load(torch.ones(7))
    center.commit(center.pending())
    assert torch.equal(center.value, torch.ones(7))


@pytest.mark.parametrize("piece", [1, 5 * 16 * 4, 20 * 16 * 4, 2**20])
def test_gram_equals_the_reference_s(monkeypatch, piece):
    """piece: bytes of the similarities made at a time: of 1, 5 and 20 patches (an image has 16), and all."""
    monkeypatch.setitem(gram._PIECE, "cpu", piece)
    recorded, term, schedule = golden_v2("gram"), GramTerm("gram", "gram"), SimpleNamespace(weights={"gram": 1.0})
    (targets,) = term.targets([{"gram": {"patches/gram": recorded["teacher_high"]}}], [{}], schedule)
    student = recorded["student"].clone().requires_grad_()
    loss, scalars = term.loss({"patches/global": student}, targets, schedule)
    assert not scalars
    (3 * loss).backward()
    _close(loss, recorded["recipe.loss"], part=2e-6)
    _close(student.grad / 3, recorded["recipe.grad"], part=2e-6)


def test_gram_of_another_width_and_many_images_in_pieces(monkeypatch):
    """Against the plain form, differentiated by torch; patches of bf16 are compared in FP32."""
    monkeypatch.setitem(gram._PIECE, "cpu", 3 * 25 * 25 * 4)
    torch.manual_seed(0)
    student, teacher = torch.randn(7, 25, 12).bfloat16().requires_grad_(), torch.randn(7, 25, 20).bfloat16()
    loss = tiled_gram_loss(student, teacher)
    loss.backward()
    plain = student.detach().float().requires_grad_()
    expected = gram_loss(plain, teacher)
    expected.backward()
    _close(loss, expected, part=2e-6)
    _close(student.grad.float(), plain.grad, part=4e-3)  # rounded to bf16


IMAGES, WIDTH, CROPS = 12, 8, 4


def _coding_rate(images: slice):
    """The loss of some of the images, and its gradient at the student's outputs (crops, images, width)."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(CROPS, IMAGES, WIDTH, generator=generator)[:, images].clone().requires_grad_()
    teacher = torch.randn(2, IMAGES, WIDTH, generator=generator)[:, images]
    term = CodingRateTerm(CodingRateSpec("rate", Ramp(1.0), WIDTH, EMA), 2)
    (targets,) = term.targets([{EMA: {"rate": teacher.flatten(0, 1)}}], [{}], None)
    loss = term.loss({"rate": student.flatten(0, 1)}, targets, None).loss
    loss.backward()
    return loss.detach(), student.grad, student.detach(), teacher


def test_the_coding_rate_is_the_formula_of_the_paper():
    """Pairs one by one, and the determinant by eigenvalues in FP64; FP32 rounds at 1e-7."""
    loss, _, student, teacher = _coding_rate(slice(None))
    s, t = F.normalize(student.double(), dim=-1), F.normalize(teacher.double(), dim=-1)
    cosines = [(s[v] * t[g]).sum(dim=1).mean() for v in range(CROPS) for g in range(2) if v != g]
    rates = []
    for rows in s[:2]:
        matrix = torch.eye(WIDTH) + WIDTH / (IMAGES * 0.5) * rows.T @ rows
        rates.append(torch.linalg.eigvalsh(matrix).log().sum() / 2 * (IMAGES + WIDTH) / (IMAGES * WIDTH))
    expected = 1 - sum(cosines) / len(cosines) - sum(rates) / 2
    torch.testing.assert_close(loss.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("images", [5, WIDTH, 24])
def test_the_spread_is_0_for_equal_images_and_1_for_those_as_far_apart_as_can_be(images):
    """Orthogonal rows, as many of each, whatever the number of images."""
    term = CodingRateTerm(CodingRateSpec("rate", Ramp(1.0), WIDTH, EMA), 2)
    directions = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))).Q
    for rows, spread in ((directions[:1].expand(images, -1), 0), (directions.repeat(3, 1)[:images], 1)):
        outputs = {"rate": rows.repeat(2, 1)}
        (targets,) = term.targets([{EMA: outputs}], [{}], None)
        assert term.loss(outputs, targets, None).scalars[term.spread].item() == pytest.approx(spread, abs=1e-5)


def _on_a_rank():
    share = IMAGES // distributed.world_size()
    first = distributed.rank() * share
    loss, gradient, _, _ = _coding_rate(slice(first, first + share))
    return loss, gradient


def test_the_coding_rate_of_two_ranks_is_that_of_one_process():
    """Losses and gradients, meaned over ranks as the engine does; sums in another order round at 1e-7."""
    loss, gradient, _, _ = _coding_rate(slice(None))
    found = run_on_ranks(_on_a_rank)
    torch.testing.assert_close(sum(loss for loss, _ in found) / 2, loss, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([rows for _, rows in found], dim=1) / 2, gradient, rtol=0, atol=1e-5)


def _regression(student, teacher, feature):
    term = FeatureTerm("out", feature, "regression", teacher.shape[-1])
    (targets,) = term.targets([{"frozen": {feature: teacher}}], [{}], None)
    return term.loss({"out": student}, targets, None).loss


@pytest.mark.parametrize("shape", [(6, 16), (6, 9, 16)])
def test_features_regress_by_the_mean_of_one_less_the_cosine(shape):
    """1e-6: FP32 sums in another order."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(shape, generator=generator) for _ in range(2))
    rows = zip(student.view(-1, 16), teacher.view(-1, 16), strict=True)
    slow = torch.stack([1 - (a @ b) / (a.norm() * b.norm()) for a, b in rows]).mean()
    feature = "cls/global" if len(shape) == 2 else "patches/global"
    torch.testing.assert_close(_regression(student, teacher, feature), slow, rtol=0, atol=1e-6)
    assert float(_regression(teacher * 3, teacher, feature)) == pytest.approx(0, abs=1e-6)
    half = _regression(student.bfloat16(), teacher.bfloat16(), feature)
    assert half.dtype == torch.float32 and float(half) == pytest.approx(float(slow), abs=1e-2)


def test_a_teacher_s_map_of_another_grid_is_resized():
    student, teacher = torch.randn(2, 36, 5), torch.randn(2, 16, 5)
    maps = teacher.transpose(1, 2).unflatten(2, (4, 4))
    wanted = F.interpolate(maps, (6, 6), mode="bicubic", align_corners=False).flatten(2).transpose(1, 2)
    found, expected = (_regression(student, one, "patches/global") for one in (teacher, wanted.contiguous()))
    torch.testing.assert_close(found, expected)
