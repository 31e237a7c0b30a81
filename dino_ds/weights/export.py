"""Exports a backbone to the formats of other programs: safetensors, timm's and transformers' folder."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from dino_ds.basics.files import replacing_folder
from dino_ds.errors import ConfigError
from dino_ds.models.specs.backbones import VITS, ViTSpec
from dino_ds.weights.load import Backbone
from dino_ds.weights.read import is_timm_name
from dino_ds.weights.sidecar import write_with_sidecar

_SMALL = 96  # models of at most this size in pixels: their images are taken to have it already, and are not cropped


def export_safetensors(model: Backbone, out: Path) -> str:
    """Write one file under timm's names, and next to it a JSON that says how it was made, like RUN/teacher.json."""
    spec: Any = model.network.spec  # a frozen dataclass
    about: dict[str, Any] = {"architecture": dataclasses.asdict(spec)}
    if model.is_vit:
        about |= {"pos_embed_interpolation": model.vit.options.pos_embed_interpolation}
    else:
        about |= {"backbone": model.title, "image_size": model.image_size}
    if (timm := timm_model(model)) is not None:
        about |= {"timm_arguments": timm[1], **({} if model.is_vit else {"timm_name": timm[0]})}
    elif model.is_vit:
        about["image_size"] = model.image_size
    about |= model.about
    tensors = _tensors(model)
    with _explained(out):
        write_with_sidecar(out, lambda file: safetensors.torch.save_file(tensors, file, {"format": "pt"}), about)
    if timm is None:
        return f"dino_ds.load({str(out)!r}{'' if model.is_vit else f', backbone={model.title!r}'})"
    return f"dino_ds.load({str(out)!r}), or safetensors.torch.load_file({str(out)!r}) into a timm model"


def export_timm(model: Backbone, out: Path) -> str:
    """Write a folder as on the Hugging Face hub: timm.create_model("local-dir:FOLDER") builds and loads the model, and
    so does AutoModel.from_pretrained(FOLDER) of transformers, by its wrapper of timm's models. A rotary ViT without
    LayerScale gets one of ones, which changes nothing: all of timm's have it. Raises ConfigError for a network unknown
    to timm."""
    config = {"model_type": "timm_wrapper", "architectures": ["TimmWrapperModel"], **timm_config(model)}
    if model.value_range is not None:
        config["value_range"] = list(model.value_range)
    with _explained(out), replacing_folder(out) as folder:
        tensors = _tensors(model)
        if model.is_vit and (arch := model.vit.arch) != _like_timm(arch):
            names = itertools.product(range(arch.depth), (1, 2))
            tensors |= {f"blocks.{block}.gamma_{half}": torch.ones(arch.width) for block, half in names}
        safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return (
        f"timm.create_model('local-dir:{out}', pretrained=True)(images), or "
        f"AutoModel.from_pretrained({str(out)!r})(pixel_values).pooler_output"
    )


def export_onnx(model: Backbone, out: Path) -> str:
    """Write an ONNX file by PyTorch's exporter, of the network as timm builds it: images (batch, channels, side, side),
    normalized -> features (batch, width). Its metadata say how images are prepared. Raises ConfigError for a network
    unknown to timm."""
    import timm

    about = timm_config(model)["pretrained_cfg"] | {"value_range": model.value_range}
    with _explained(out), tempfile.TemporaryDirectory(dir=out.parent) as folder:
        export_timm(model, Path(folder) / "timm")
        network = timm.create_model(f"local-dir:{folder}/timm", pretrained=True).eval()
        images = torch.zeros(2, *about["input_size"])
        names: dict[str, Any] = {"input_names": ["images"], "output_names": ["features"]}
        batch = ({0: torch.export.Dim("batch")},)
        program = torch.onnx.export(network, (images,), dynamo=True, verbose=False, dynamic_shapes=batch, **names)
        assert program is not None
        kept = ("mean", "std", "input_size", "crop_pct", "interpolation", "value_range")
        program.model.metadata_props.update((name, json.dumps(about[name])) for name in kept)
        program.save(f"{folder}/model.onnx")
        os.replace(f"{folder}/model.onnx", out)
    return f"onnxruntime.InferenceSession({str(out)!r}).run(None, {{'images': images}})[0]"


FORMATS: dict[str, Callable[[Backbone, Path], str]] = {
    "safetensors": export_safetensors,
    "timm": export_timm,
    "onnx": export_onnx,
}
"""Format -> function that writes it and returns the line that loads it."""


def _like_timm(arch: ViTSpec) -> ViTSpec:
    """`arch`, with LayerScale if it has rotary positions, as all of timm's."""
    return dataclasses.replace(arch, layer_scale=1.0) if arch.rope and arch.layer_scale is None else arch


def timm_model(model: Backbone, arch: ViTSpec | None = None) -> tuple[str, dict[str, Any]] | None:
    """Name and arguments by which timm builds this backbone, or None. arch: in the place of a ViT's own."""
    if not model.is_vit:
        return model.network.spec.timm_model("", model.image_size)
    arch = arch or model.vit.arch
    # A timm model with the same kind of block; all sizes are arguments.
    kind = "reg4_" if arch.registers else ""
    like = f"vit_{'giant' if arch.swiglu else 'small'}_patch14_{kind}dinov2"
    usual = "vit_small_patch16_224" if arch.layer_scale is None and not arch.swiglu else like
    name = said if is_timm_name(said := model.about.get("timm_name")) else usual
    ours = VITS.get(name, VITS["vit_small_patch16_224"])  # timm's other ViTs that dino_ds reads have plain blocks
    if (ours.swiglu, ours.rope is None) != (arch.swiglu, arch.rope is None):
        name = usual
    known = arch.timm_model(name, model.image_size)
    if known is None or arch.rope is not None:
        return known
    return known[0], known[1] | {"mlp_ratio": arch.mlp_ratio}


def timm_config(model: Backbone) -> dict[str, Any]:
    """A folder's config.json as on the Hugging Face hub. Raises ConfigError for a network unknown to timm."""
    spec = model.network.spec
    known = timm_model(model, _like_timm(model.vit.arch) if model.is_vit else None)
    if known is None:
        problem = "with these norms or rotary positions" if model.is_vit else "is a class of your own"
        why = f"{spec.title} {problem}, which neither timm nor transformers can build: take --format safetensors"
        raise ConfigError(why)
    # timm.create_model drops arguments that are None, but not those that it reads from a folder's config.json.
    name, arguments = known[0], {key: value for key, value in known[1].items() if value is not None}
    return {
        "architecture": name,
        "num_classes": 0,
        "num_features": spec.width,
        **({"global_pool": "token"} if model.is_vit else {}),
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "dino_ds",
            "custom_load": False,
            "input_size": [spec.in_chans, model.image_size, model.image_size],
            "fixed_input_size": model.is_vit or "img_size" in arguments,
            "interpolation": "bicubic",
            "crop_pct": model.crop_pct or (1.0 if model.image_size <= _SMALL else 0.875),
            "crop_mode": "center",
            "mean": list(model.normalization.mean),
            "std": list(model.normalization.std),
            "num_classes": 0,
            "pool_size": None,
            **spec.timm_layers,
        },
    }


def _tensors(model: Backbone) -> dict[str, Tensor]:
    """The network's tensors without those of use in training only, which timm's networks lack."""
    network = model.network
    kept = [(name, tensor) for name, tensor in network.state_dict().items() if name not in network.training_only]
    # Copies: networks that use a module twice have it under two names, which a file may not share.
    return {name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in kept}


@contextlib.contextmanager
def _explained(out: Path) -> Iterator[None]:
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{out} can't be written: {reason}; fix --out") from error
