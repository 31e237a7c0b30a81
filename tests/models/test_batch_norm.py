"""BatchNorm: torch's numbers, the same over ranks as on one process, and a batch counted once."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from timm.layers import BatchNormAct2d
from torch import nn
from torch.utils.checkpoint import checkpoint

from dino_ds.engine import distributed
from dino_ds.errors import ConfigError
from dino_ds.models import batch_norm
from dino_ds.models.batch_norm import BatchNorm, again, batch_norms, use_own_batch_norm
from dino_ds.models.foreign import ForeignBackbone
from dino_ds.models.prototypes import DinoHead
from dino_ds.models.specs.base import BackboneOptions
from dino_ds.models.specs.foreign import ForeignSpec
from tests.ranks import run_on_ranks
from tests.reference import copied

KINDS = {
    "rows": (lambda: nn.BatchNorm1d(5), (8, 5)),
    "sequences": (lambda: nn.BatchNorm1d(5, eps=1e-3), (8, 5, 3)),
    "images": (lambda: nn.BatchNorm2d(5, momentum=0.3), (8, 5, 4, 3)),
    "volumes": (lambda: nn.BatchNorm3d(5), (8, 5, 2, 3, 2)),
    "no affine": (lambda: nn.BatchNorm2d(5, affine=False), (8, 5, 4, 3)),
    "no averages": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (8, 5, 4, 3)),
    "timm": (lambda: BatchNormAct2d(5, act_layer=nn.SiLU), (8, 5, 4, 3)),
}


def _pair(kind):
    """torch's or timm's, and the same one made ours, with weights that are not 1 and 0."""
    torch.manual_seed(0)
    theirs = nn.Sequential(KINDS[kind][0]())
    for parameter in theirs.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    ours = nn.Sequential(KINDS[kind][0]())
    ours.load_state_dict(theirs.state_dict())
    use_own_batch_norm(ours, synced=True)
    return theirs, ours


def _inputs(shape, count=2):
    """Batches whose channels have means and deviations of their own."""
    generator = torch.Generator().manual_seed(1)
    of_channel = [1, -1, *[1] * (len(shape) - 2)]
    slope = torch.linspace(0.5, 3.0, shape[1]).view(of_channel)
    return [torch.randn(shape, generator=generator) * slope + 2 * slope for _ in range(count)]


def _pass(network, x):
    """Output and the gradients of input and parameters, of a loss that is not the same for all elements."""
    x = x.clone().requires_grad_()
    network.zero_grad()
    out = network(x)
    (out.float() * torch.linspace(-1, 1, out.numel()).view(out.shape)).sum().backward()
    return [out.detach(), x.grad, *(parameter.grad.clone() for parameter in network.parameters())]


@pytest.mark.parametrize("kind", KINDS)
def test_equals_torch_and_timm(kind):
    """The same kernel: to the bit, in training and in evaluation."""
    theirs, ours = _pair(kind)
    for mode in (True, False):
        for x in _inputs(KINDS[kind][1]):
            for expected, found in zip(_pass(theirs.train(mode), x), _pass(ours.train(mode), x), strict=True):
                assert torch.equal(expected, found)
    state = theirs.state_dict()
    assert state.keys() == ours.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_a_low_precision_network_are_fp32(dtype):
    """Against torch in FP32 on the same rounded numbers: averages to FP32's rounding (1e-6), output to its own."""
    theirs, ours = _pair("images")
    for parameter in (*theirs.parameters(), *ours.parameters()):
        parameter.data = parameter.data.to(dtype)
    theirs.float()
    resolution = torch.finfo(dtype).eps
    for x in _inputs(KINDS["images"][1], 20):
        x = x.to(dtype)
        expected, found = theirs(x.float()), ours(x)
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), expected, rtol=resolution, atol=resolution)
    assert ours[0].running_mean.dtype == ours[0].running_var.dtype == torch.float32
    torch.testing.assert_close(ours[0].running_mean, theirs[0].running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours[0].running_var, theirs[0].running_var, rtol=1e-6, atol=1e-6)


def _one_rank(kind):
    """Two training passes and one in evaluation of this rank's part of the joint batches."""
    _, ours = _pair(kind)
    rank, ranks = distributed.rank(), distributed.world_size()
    found = []
    for mode in (True, True, False):
        weights = torch.linspace(-1, 1, _inputs(KINDS[kind][1])[0].numel()).view(KINDS[kind][1])
        x = _inputs(KINDS[kind][1])[0].chunk(ranks)[rank].clone().requires_grad_()
        out = ours.train(mode)(x)
        ours.zero_grad()
        (out * weights.chunk(ranks)[rank]).sum().backward()
        found.append([out.detach(), x.grad, *(p.grad.clone() for p in ours.parameters())])
    return found, copied(ours.state_dict())


@pytest.mark.parametrize("kind", ["sequences", "no averages", "timm"])
def test_two_ranks_equal_one_process_on_the_joint_batch(kind):
    """1e-5: sums in another order, over deviations that are not small beside the means."""
    (whole, whole_state), *_ = [_one_rank(kind)]
    ranks = run_on_ranks(_one_rank, kind)
    close = {"rtol": 1e-5, "atol": 1e-5}
    for i, (out, grad, *of_parameters) in enumerate(whole):
        if kind == "no averages" and i == 2:
            continue  # in evaluation each rank has its own batch's statistics
        parts = [found[i] for found, _ in ranks]
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), out, **close)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad, **close)
        for j, of_parameter in enumerate(of_parameters):
            torch.testing.assert_close(sum(part[2 + j] for part in parts), of_parameter, rtol=1e-5, atol=1e-4)
    for _, state in ranks:
        for name, tensor in whole_state.items():
            torch.testing.assert_close(state[name], tensor, **close)


def _stats(x, eps):
    dims = [0, *range(2, x.ndim)]
    return x.float().mean(dims), (x.float().var(dims, correction=0) + eps).rsqrt()


def _gather(x, means, scales, running_mean, running_var, momentum, eps, counts):
    counts, total = counts[:, None], counts.sum()
    mean = (means * counts).sum(0) / total
    var = ((scales**-2 - eps + (means - mean) ** 2) * counts).sum(0) / total
    running_mean.lerp_(mean, momentum)
    running_var.lerp_(var * total / (total - 1), momentum)
    return mean, (var + eps).rsqrt()


def _elemt(x, weight, bias, mean, scale, eps):
    shape = [1, -1, *[1] * (x.ndim - 2)]
    out = (x - mean.view(shape)) * scale.view(shape)
    return out if weight is None else out * weight.view(shape) + bias.view(shape)


def _reduce(grad, x, mean, scale, weight, input_g, weight_g, bias_g):
    dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
    slope = (grad * (x - mean.view(shape))).sum(dims)
    return grad.sum(dims), slope, slope * scale, grad.sum(dims)


def _backward_elemt(grad, x, mean, scale, weight, sum_dy, sum_dy_xmu, counts):
    shape, total = [1, -1, *[1] * (x.ndim - 2)], counts.sum()
    centered = (x - mean.view(shape)) * (scale**2 * sum_dy_xmu / total).view(shape)
    return (grad - (sum_dy / total).view(shape) - centered) * (scale * weight).view(shape)


_SLOW_KERNELS = {
    "batch_norm_stats": _stats,
    "batch_norm_gather_stats_with_counts": _gather,
    "batch_norm_elemt": _elemt,
    "batch_norm_backward_reduce": _reduce,
    "batch_norm_backward_elemt": _backward_elemt,
}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("where", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_function_of_gpus_is_torch_s_batch_norm(where, ranks, monkeypatch):
    """Of ranks that all have the same batch, in a group that is played; on a CPU by slow copies of torch's kernels."""
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", lambda every, own: every.copy_(own.repeat(ranks)))
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda own: own.mul_(ranks))
    monkeypatch.setattr(distributed, "world_size", lambda: ranks)
    for name, kernel in _SLOW_KERNELS.items() if where == "cpu" else ():
        monkeypatch.setattr(torch, name, kernel)
    for shape, layout in (((6, 5), None), ((6, 5, 4, 4), None), ((6, 5, 4, 4), torch.channels_last)):
        x = _inputs(shape)[0].to(where, memory_format=layout or torch.contiguous_format).requires_grad_()
        weight, bias = (torch.linspace(0.5, end, 5, device=where).requires_grad_() for end in (1.5, 2.5))
        direction = torch.linspace(-1, 1, x.numel(), device=where).view(shape)
        mean, var = torch.zeros(5, device=where), torch.ones(5, device=where)
        out, own_mean, own_var = batch_norm._SyncedOnGpu.apply(x, weight, bias, 1e-5)
        found = out, *torch.autograd.grad(out, (x, weight, bias), direction)
        plain = F.batch_norm(torch.cat([x] * ranks), mean, var, weight, bias, True, 1.0, 1e-5)
        wanted = torch.autograd.grad(plain, (x, weight, bias), torch.cat([direction] * ranks))
        wanted = plain[: len(x)], *(gradient / ranks for gradient in wanted)
        for ours, theirs in zip((*found, own_mean, own_var), (*wanted, mean, var), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)  # FP32 sums in another order


def _recomputed():
    """The averages after a pass as it is, recomputed as our segments are, and by torch's checkpoint alone."""
    x, found = _inputs(KINDS["images"][1])[0].requires_grad_(), []
    for context in (None, lambda: (nullcontext(), again()), lambda: (nullcontext(), nullcontext())):
        _, ours = _pair("images")
        out = ours(x) if context is None else checkpoint(ours, x, use_reentrant=False, context_fn=context)
        x.grad = None
        out.square().sum().backward()
        found.append((copied(ours.state_dict()), x.grad.clone()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_recomputation_counts_a_batch_once(world):
    for plain, recomputed, twice in run_on_ranks(_recomputed, world=world):
        assert torch.equal(plain[1], recomputed[1])
        assert all(torch.equal(plain[0][name], tensor) for name, tensor in recomputed[0].items())
        assert plain[0]["0.num_batches_tracked"] == 1 and twice[0]["0.num_batches_tracked"] == 2


def test_no_batch_norm_of_torch_s_is_left():
    backbone = ForeignBackbone(ForeignSpec("resnet18", arguments='{"layers": [1, 1, 1, 1]}'), 32, BackboneOptions())
    head = DinoHead(12, 20, 8, 15, 3).add_batch_norm(synced=False)
    for network, synced in ((backbone, True), (head, False)):
        theirs = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        assert theirs and theirs == batch_norms(network)
        assert all(isinstance(m, BatchNorm) and m.synced is synced for m in theirs)
    timm_s = nn.Sequential(BatchNormAct2d(4))
    before = timm_s.state_dict().keys()
    use_own_batch_norm(timm_s, synced=True)
    assert isinstance(timm_s[0], BatchNorm) and timm_s.state_dict().keys() == before


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.SyncBatchNorm(4), "is of class SyncBatchNorm"),
        (nn.InstanceNorm2d(4, track_running_stats=True), "is of class InstanceNorm2d"),
        (nn.BatchNorm2d(4, momentum=None), "give its momentum a number"),
    ],
)
def test_others_are_refused(module, message):
    with pytest.raises(ConfigError, match=message):
        use_own_batch_norm(nn.Sequential(module), synced=True)


def _evaluates_alone():
    _, ours = _pair("no averages")
    return ours.eval()(_inputs(KINDS["no averages"][1])[0]).detach() if distributed.rank() == 0 else None


def test_evaluation_asks_no_other_rank():
    """Ranks evaluate batches of other sizes, or none, with or without running averages."""
    theirs, _ = _pair("no averages")
    expected = theirs.eval()(_inputs(KINDS["no averages"][1])[0])
    assert torch.equal(run_on_ranks(_evaluates_alone)[0], expected)


def test_one_value_of_a_channel_is_refused():
    _, ours = _pair("images")
    with pytest.raises(ConfigError, match="give more images to a micro-batch"):
        ours(torch.ones(1, 5, 1, 1))
