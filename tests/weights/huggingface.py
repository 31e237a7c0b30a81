"""A folder of Hugging Face's own, as transformers writes it: a ViT with weights of ours, and an image processor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dino_ds.weights.load import Backbone
from tests.weights.originals import randomised

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
