"""Findings of `doctor` about a step's own parts on GPUs: the shortest run of each, in processes of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dino_ds.config.recipe import Recipe
from dino_ds.engine import distributed
from dino_ds.engine.device import device
from dino_ds.engine.engine import Progress
from dino_ds.models.attention import chosen_kernel
from dino_ds.models.fused import why_not_fused
from dino_ds.planning.measure.memory import ChildFailed, run_in_children
from dino_ds.planning.measure.tables import FAILURE, Finding, judge
from dino_ds.planning.measure.trial import build_trial, resolve

_SECONDS = 30
_HEADS, _TOKENS, _HEAD_WIDTH = 6, 197, 64
"""Attention of a ViT-S/16."""
_TOLERANCE = 2e-2
"""The largest difference that passes, as a part of the largest value: bf16 rounds to 2^-8."""
_RECIPE = {
    "model": {"width": 32, "heads": 2, "depth": 2},
    "crops": {"global_size": 32, "local_size": 16, "num_local": 2},
    "head": {"prototypes": 64, "hidden": 64, "bottleneck": 16},
}
_FP16 = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_clipping": 3.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 32, "hysteresis": 1},
    "zero_optimization": {"stage": 1},
}
_CURE = "update the driver, or take the torch of another CUDA version; `dino-ds train` on this GPU is not to be trusted"


def look_at_parts(gpus: int) -> Iterator[Finding]:
    """The findings of `check_parts` on the first of `gpus`, and of a sum over two where there are two."""
    if not gpus:
        return
    try:
        ranks = run_in_children(f"{__name__}:check_parts", min(gpus, 2), seconds=_SECONDS)
    except ChildFailed as error:
        yield judge("parts", str(error), _CURE)
        return
    yield from (Finding(**finding) for finding in ranks[0].value)


def check_parts() -> list[dict[str, Any]]:
    """The findings of this rank, in plain JSON."""
    where = device()
    found = [check_attention(where), check_fused(where), check_skip()]
    if distributed.world_size() > 1:
        found.append(check_sum(where))
    return [vars(finding) for finding in found]


def check_attention(where: torch.device) -> Finding:
    """Output and gradients of torch's attention kernel in bf16 against those of the formula on a CPU."""
    inputs = torch.randn(3, 2, _HEADS, _TOKENS, _HEAD_WIDTH, generator=torch.Generator().manual_seed(0))
    plain = _attention(inputs, lambda q, k, v: (q @ k.mT / _HEAD_WIDTH**0.5).softmax(-1) @ v)
    found = _attention(inputs.to(where, torch.bfloat16), F.scaled_dot_product_attention).float().cpu()
    difference = float((found - plain).abs().max() / plain.abs().max())
    kernel = chosen_kernel(_HEADS, _HEAD_WIDTH, _TOKENS, torch.bfloat16, where)
    text = f"attention by {kernel}, {difference:.0e} from the formula"
    return judge("parts", text, _CURE, not difference <= _TOLERANCE, FAILURE)


def _attention(inputs: Tensor, attend: Any) -> Tensor:
    """Queries, keys and values (3, ...) -> output and their gradients (4, ...)."""
    leaf = inputs.requires_grad_()
    out = attend(*leaf)
    (gradients,) = torch.autograd.grad(out.float().square().sum(), leaf)
    return torch.cat((out.detach().unsqueeze(0), gradients))


def check_fused(where: torch.device) -> Finding:
    """A compiled function against the plain one."""
    why = why_not_fused(where)
    cure = "training works, slower; Triton needs a C compiler and a cache that can be written to (TRITON_CACHE_DIR)"
    return judge("parts", f"fused functions: {why or 'as plain ones'}", cure, bool(why))


def check_skip() -> Finding:
    """A step of a small network in fp16 whose gradient must overflow."""
    recipe, config = resolve(Recipe.model_validate(_RECIPE), _FP16, "doctor", batch=4)
    trial = build_trial(recipe, config)
    scale = trial.step.engine.loss_scale
    progress = trial.step.micro_batch(trial.inputs).progress
    fine = progress is Progress.SKIPPED and trial.step.engine.loss_scale < scale
    text = f"fp16: a gradient that overflows is {'' if fine else 'not '}skipped"
    return judge("parts", text, "take bf16 or fp32 (--ds_config)", not fine, FAILURE)


def check_sum(where: torch.device) -> Finding:
    """A sum over the ranks; every rank must call it."""
    rank, ranks = distributed.rank(), distributed.world_size()
    ones = torch.full((1024,), 1.0 + rank, device=where)
    torch.distributed.all_reduce(ones)
    fine = bool((ones == ranks * (ranks + 1) / 2).all())
    text = f"{torch.distributed.get_backend()}: {ranks} ranks {'sum a tensor' if fine else 'give a wrong sum'}"
    return judge("parts", text, "test with NCCL_P2P_DISABLE=1; look at `nvidia-smi topo -m`", not fine, FAILURE)
