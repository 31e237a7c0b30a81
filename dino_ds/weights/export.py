"""Exports a backbone to the formats of other programs: safetensors, timm, Hugging Face, DINO, ONNX, TorchScript."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeGuard

import safetensors.torch
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from dino_ds.durable import replace_file, replacing, replacing_folder
from dino_ds.errors import ConfigError
from dino_ds.weights.card import model_card
from dino_ds.weights.huggingface import hf_config, to_huggingface
from dino_ds.weights.load import Backbone
from dino_ds.weights.plain import PlainBackbone
from dino_ds.weights.reference import to_reference

_BATCH, _SIDE = 4096, 512
"""Largest batch, and largest side in patches, that an ONNX program takes."""


def export_safetensors(model: Backbone, out: Path) -> str:
    """One file with timm's names, and beside it the JSON that says how it was made, as RUN/teacher.json."""
    about = {
        "timm_arguments": _timm(model)[1],
        "architecture": dataclasses.asdict(model.vit.arch),
        "pos_embed_interpolation": model.vit.options.pos_embed_interpolation,
        **model.about,
    }
    with _written(out) as file:
        safetensors.torch.save_file(_tensors(model), file, metadata={"format": "pt"})
        replace_file(out.with_suffix(".json"), json.dumps(about, indent=1) + "\n")
    return f"dino_ds.load({out.name!r}), or safetensors.torch.load_file({out.name!r}) into a timm model"


def export_timm(model: Backbone, out: Path) -> str:
    """A folder as on the Hugging Face hub: timm.create_model("local-dir:FOLDER") builds and fills the model."""
    arch = model.vit.arch
    name, arguments = _timm(model)
    mean, std = model.normalisation.mean, model.normalisation.std
    config = {
        "architecture": name,
        "num_classes": 0,
        "num_features": arch.width,
        "global_pool": "token",
        "model_args": arguments,
        "pretrained_cfg": {
            "tag": "dino_ds",
            "custom_load": False,
            "input_size": [arch.in_chans, model.image_size, model.image_size],
            "fixed_input_size": True,
            "interpolation": "bicubic",
            "crop_pct": 0.875,
            "crop_mode": "center",
            "mean": list(mean),
            "std": list(std),
            "num_classes": 0,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    card = model_card(model, "timm", out.name)
    _write_folder(out, _tensors(model), card, {"config.json": config})
    return f"timm.create_model('local-dir:{out}', pretrained=True)(images)"


def export_hf(model: Backbone, out: Path) -> str:
    """A folder for transformers: config, weights, image processor, model card.

    Raises ConfigError for an architecture that transformers has no model of.
    """
    arch, size = model.vit.arch, model.image_size
    config = hf_config(arch, size, model.mask_token is not None)
    mean, std = model.normalisation.mean, model.normalisation.std
    processor = {
        "image_processor_type": "BitImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": int(size * 256 / 224)},
        "resample": 3,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "do_convert_rgb": arch.in_chans == 3,
        "image_mean": list(mean),
        "image_std": list(std),
    }
    card = model_card(model, "transformers", out.name)
    jsons = {"config.json": config, "preprocessor_config.json": processor}
    _write_folder(out, to_huggingface(_tensors(model), arch, _mask_token(model)), card, jsons)
    return f"AutoModel.from_pretrained({str(out)!r})(pixel_values).last_hidden_state[:, 0]"


def export_dino(model: Backbone, out: Path) -> str:
    """A file as facebookresearch/dino saves it, which its evaluation scripts read: --pretrained_weights FILE.

    The only head that it has is that of the CLS token.
    """
    network = to_reference(_tensors(model), model.heads, _mask_token(model))
    with _written(out) as file:
        torch.save({"teacher": network, "student": {f"module.{n}": t for n, t in network.items()}}, file)
    return f"eval_knn.py --pretrained_weights {out} ({'with' if 'head' in model.heads else 'without'} a head)"


def export_dinov2(model: Backbone, out: Path) -> str:
    """A file as the teacher_checkpoint.pth of facebookresearch/dinov2's training, blocks not in chunks."""
    network = to_reference(_tensors(model), model.heads, _mask_token(model), v2=True)
    with _written(out) as file:
        torch.save({"teacher": network}, file)
    return f"dinov2/run/eval/knn.py --pretrained-weights {out} ({', '.join(model.heads) or 'without a head'})"


def export_onnx(model: Backbone, out: Path) -> str:
    """One ONNX file: images (batch, c, h, w) -> features (batch, d), any batch and any multiple of the patch size.

    Raises ConfigError where onnx and onnxscript are not installed.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise ConfigError("ONNX needs two more packages: pip install 'dino_ds[onnx]'") from None
    size = model.patch_size
    batch = torch.export.Dim("batch", min=1, max=_BATCH)
    rows, columns = (torch.export.Dim(name, min=2, max=_SIDE) for name in ("rows", "columns"))
    with _quiet():
        program = torch.onnx.export(
            PlainBackbone(model.vit),
            (_example(model),),
            dynamo=True,
            dynamic_shapes=({0: batch, 2: size * rows, 3: size * columns},),
            input_names=["images"],
            output_names=["features"],
            verbose=False,
        )
    assert program is not None
    with _written(out) as file:
        program.save(str(file), external_data=False)
    return f"onnxruntime.InferenceSession({out.name!r}).run(None, {{'images': images}})"


def export_torchscript(model: Backbone, out: Path) -> str:
    """One TorchScript file: images (b, c, h, w) -> features (b, d), any batch and any multiple of the patch size."""
    with _quiet(), torch.no_grad():
        traced = torch.jit.trace(PlainBackbone(model.vit), _example(model))
    with _written(out) as file:
        torch.jit.save(traced, str(file))
    return f"torch.jit.load({out.name!r})(images)"


FORMATS: dict[str, tuple[Callable[[Backbone, Path], str], str]] = {
    "safetensors": (export_safetensors, ".safetensors"),
    "timm": (export_timm, "-timm"),
    "hf": (export_hf, "-hf"),
    "dino": (export_dino, ".pth"),
    "dinov2": (export_dinov2, "-dinov2.pth"),
    "onnx": (export_onnx, ".onnx"),
    "torchscript": (export_torchscript, ".pt"),
}
"""Name -> what writes it and returns the line that loads it; what its file or folder is called after the run."""


def _tensors(model: Backbone) -> dict[str, Tensor]:
    """Without what is of use in training only, which timm's networks have no place for."""
    kept = [(name, p) for name, p in model.vit.named_parameters() if name not in model.vit.training_only]
    return {name: p.detach().cpu().contiguous() for name, p in kept}


def _mask_token(model: Backbone) -> Tensor | None:
    return None if model.mask_token is None else model.mask_token.detach().cpu()


def _timm(model: Backbone) -> tuple[str, dict[str, int | float]]:
    """Name and arguments with which timm builds this backbone."""
    arch = model.vit.arch
    # A model of timm's whose kind of block is ours; all sizes are arguments.
    kind = "reg4_" if arch.registers else ""
    like = f"vit_{'giant' if arch.swiglu else 'small'}_patch14_{kind}dinov2"
    usual = "vit_small_patch16_224" if arch.layer_scale is None else like
    stated = model.about.get("timm_name")
    name, arguments = arch.timm_model(stated if _is_timm_name(stated) else usual)
    return name, arguments | {"img_size": model.image_size, "mlp_ratio": arch.mlp_ratio}


def _is_timm_name(name: object) -> TypeGuard[str]:
    """Whether timm itself has a model of this name; a run folder's JSON may hold anything, such as a hub's address."""
    import timm

    return isinstance(name, str) and re.fullmatch(r"\w+", name) is not None and bool(timm.is_model(name))


def _example(model: Backbone) -> Tensor:
    """Two images of unequal sides, neither of them the native one: nothing is to be taken for a constant."""
    size, grid = model.patch_size, model.image_size // model.patch_size
    device = model.vit.pos_embed.device
    return torch.zeros(2, model.vit.arch.in_chans, (grid + 1) * size, (grid + 2) * size, device=device)


def _write_folder(out: Path, tensors: dict[str, Tensor], card: str, jsons: dict[str, dict[str, Any]]) -> None:
    with _written(out, replacing_folder) as folder:
        safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for name, content in jsons.items():
            (folder / name).write_text(json.dumps(content, indent=1) + "\n")
        (folder / "README.md").write_text(card)


@contextlib.contextmanager
def _written(out: Path, write: Callable[[Path], AbstractContextManager[Path]] = replacing) -> Iterator[Path]:
    """A path beside `out` that takes its place when it is written. Raises ConfigError if it can't be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with write(out) as temporary:
            yield temporary
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise ConfigError(f"{out} can't be written: {reason}; fix --out") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the exporters' warnings and gives them torch's own linear function.

    DeepSpeed leaves another one behind in a process that has trained under ZeRO 3, which no exporter can trace.
    """
    before, linear = logging.root.manager.disable, F.linear
    logging.disable(logging.WARNING)
    F.linear = torch._C._nn.linear
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        F.linear = linear
        logging.disable(before)
