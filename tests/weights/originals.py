"""The networks of facebookresearch/dino and dinov2 in short: their modules' names, and their arithmetic as published;
how features of theirs and ours are compared; and a folder of Hugging Face's own, as transformers writes it.

Sources: dino `vision_transformer.py` (VisionTransformer, DINOHead); dinov2 `models/vision_transformer.py` with its
layers Mlp, SwiGLUFFN and LayerScale, and how its `hub/backbones.py` builds the released ones.
"""

from __future__ import annotations

import itertools
import json
import math
import warnings
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dino_ds.weights.load import Backbone


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        weights = (q @ k.transpose(-2, -1) * (d // self.heads) ** -0.5).softmax(dim=-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(b, n, d))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(OrderedDict(fc1=nn.Linear(width, 4 * width), act=nn.GELU(), fc2=nn.Linear(4 * width, width)))


class SwiGlu(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = (int(4 * width * 2 / 3) + 7) // 8 * 8
        self.w12, self.w3 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, dim=-1)
        return self.w3(F.silu(gate) * value)


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, width: int, heads: int, scaled: bool, swiglu: bool) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-6), Attention(width, heads)
        self.norm2, self.mlp = nn.LayerNorm(width, eps=1e-6), SwiGlu(width) if swiglu else mlp(width)
        self.ls1, self.ls2 = (LayerScale(width) if scaled else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class Original(nn.Module):
    """dino's ViT, or with `v2` dinov2's."""

    def __init__(self, size, patch, width, depth, heads, v2=False, registers=0, swiglu=False) -> None:
        super().__init__()
        self.patch, self.registers = patch, registers
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, (size // patch) ** 2 + 1, width))
        if registers:
            self.register_tokens = nn.Parameter(torch.zeros(1, registers, width))
        if v2:
            self.mask_token = nn.Parameter(torch.zeros(1, width))
        self.blocks = nn.ModuleList(Block(width, heads, v2, swiglu) for _ in range(depth))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(std=0.2)

    def _positions(self, height: int, width: int) -> Tensor:
        side = math.isqrt(self.pos_embed.shape[1] - 1)
        if height == width == side:
            return self.pos_embed
        grid = self.pos_embed[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
        if self.registers:  # released with interpolate_antialias=True, interpolate_offset=0.0
            grid = F.interpolate(grid, size=(height, width), mode="bicubic", antialias=True)
        else:
            grid = F.interpolate(grid, scale_factor=((height + 0.1) / side, (width + 0.1) / side), mode="bicubic")
        return torch.cat((self.pos_embed[:, :1], grid.permute(0, 2, 3, 1).flatten(1, 2)), dim=1)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """(b, 3, h, w) -> CLS features (b, width)."""
        height, width = images.shape[2] // self.patch, images.shape[3] // self.patch
        patches = self.patch_embed["proj"](images).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(len(images), -1, -1), patches), dim=1) + self._positions(height, width)
        if self.registers:
            x = torch.cat((x[:, :1], self.register_tokens.expand(len(images), -1, -1), x[:, 1:]), dim=1)
        for block in self.blocks:
            x = block(x)
        return self.norm(x)[:, 0]


class OriginalHead(nn.Module):
    """dino's DINOHead: torch's weight_norm over the last layer."""

    def __init__(self, width: int, prototypes: int, layers: int = 3, hidden: int = 2048, bottleneck: int = 256) -> None:
        super().__init__()
        sizes = [width, *[hidden] * (layers - 1), bottleneck]
        linear = [nn.Linear(*pair) for pair in itertools.pairwise(sizes)]
        parts = [part for one in linear[:-1] for part in (one, nn.GELU())]
        self.mlp = nn.Sequential(*parts, linear[-1]) if parts else linear[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the reference's checkpoints have the old weight_norm's names
            self.last_layer = nn.utils.weight_norm(nn.Linear(bottleneck, prototypes, bias=False))
        self.last_layer.weight_g.data.fill_(1)

    @torch.no_grad()
    def forward(self, features: Tensor) -> Tensor:
        """(b, width) -> logits (b, prototypes)."""
        return self.last_layer(F.normalize(self.mlp(features), dim=-1))


def saved_by_dino(model: Backbone) -> dict[str, dict[str, Tensor]]:
    """A plain ViT of ours and its head, as facebookresearch/dino saves its teacher."""
    head = {f"head.{name}": t for name, t in model.heads.get("head", {}).items() if name != "prototypes.weight"}
    if model.heads:
        rows = model.heads["head"]["prototypes.weight"]
        head |= {"head.last_layer.weight_v": rows, "head.last_layer.weight_g": torch.ones(len(rows), 1)}
    return {"teacher": {f"backbone.{name}": t for name, t in model.vit.state_dict().items()} | head}


def images(height: int = 32, width: int = 32, count: int = 3, channels: int = 3) -> Tensor:
    return torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(1))


def randomised(network: nn.Module) -> nn.Module:
    """Weights and statistics that matter everywhere."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(std=0.2)
        for name, buffer in network.named_buffers():
            if name.endswith("num_batches_tracked"):
                buffer.fill_(7)
            elif "running" in name:
                buffer.uniform_(0.5, 2)
    return network.eval()


def assert_same(ours: Tensor, theirs: Tensor, close: float = 1e-5) -> None:
    """Features are equal relative to the largest, and not all alike: other programs run other kernels, in FP32."""
    ours, theirs = ours.detach(), theirs.detach()
    assert theirs.std() > 0.05
    torch.testing.assert_close(ours, theirs, rtol=0, atol=close * max(1.0, float(theirs.abs().max())))


PROCESSOR = {
    "image_processor_type": "BitImageProcessor", "do_resize": True, "size": {"shortest_edge": 36}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 32, "width": 32}, "do_rescale": True, "rescale_factor": 1 / 255,
    "do_normalize": True, "do_convert_rgb": True, "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
}  # fmt: skip


def write_native(_: Backbone | None, folder: Path) -> torch.nn.Module:
    """A Dinov2 of two blocks for images of 32 pixels; the model that was saved."""
    transformers = pytest.importorskip("transformers")
    numbers = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1, "image_size": 32, "patch_size": 8}
    model = randomised(transformers.Dinov2Model(transformers.Dinov2Config(**numbers)))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model
