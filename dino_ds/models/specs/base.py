"""The contract of a backbone's spec, without torch, and the options that a run gives to any backbone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar


class BackboneSpec:
    """Description of a backbone without building it: the base of a frozen dataclass of plain numbers. One class for
    each kind of backbone. The rest of the program never asks which kind it has: it asks the questions below, whose
    answers here are those of a network without special features. `dino_ds.models.foreign` maps kinds to networks.
    `obeys` names the options of a recipe's section `model` and of a ds config's section `dino_ds` that change the
    network; `told_by_tensors`: whether names and shapes of its tensors identify it."""

    told_by_tensors: ClassVar[bool] = False

    if TYPE_CHECKING:  # as properties they would be the defaults of a dataclass's fields of these names

        @property
        def width(self) -> int:
            """Length of the feature of an image."""

        @property
        def depth(self) -> int:
            """Number of segments that are compiled and recomputed one by one."""

        @property
        def in_chans(self) -> int:
            """Channels of the images."""

        @property
        def stride(self) -> int:
            """Pixels from one patch feature to the next."""

    @property
    def obeys(self) -> frozenset[str]:
        spec: Any = self  # a dataclass
        return frozenset(field.name for field in fields(spec))

    @property
    def title(self) -> str:
        """Name of the network in messages: the recipe's name for it, if it has one."""
        return type(self).__name__

    @property
    def sizes(self) -> str:
        """The main numbers of the network, in words."""
        return f"width {self.width}, depth {self.depth}"

    @property
    def problem(self) -> str:
        """Why no network can have these numbers, or ""."""
        return ""

    @property
    def side_multiple(self) -> int:
        """Number of pixels of which the sides of images must be multiples."""
        return self.stride

    @property
    def patch_width(self) -> int:
        """Length of the feature of a patch, or 0 for a network that has features of whole images only."""
        return self.width

    @property
    def has_batch_norm(self) -> bool:
        return False

    @property
    def arguments(self) -> str:
        """Keyword arguments of the backbone's class, as a JSON object."""
        return "{}"

    def attention(self, side: int) -> tuple[int, int, int] | None:
        """Heads, width of a head and tokens of an image of `side` pixels, or None for a foreign network."""
        return None

    def timm_model(self, name: str, image_size: int | None = None) -> tuple[str, dict[str, Any]] | None:
        """Name and arguments by which timm.create_model builds this backbone, called `name` here; None if it can't.
        image_size: side of the native images in pixels, or None for timm's own."""
        return None

    @property
    def timm_layers(self) -> dict[str, Any]:
        """Names of the first convolution and of the classifier in timm's network, by the keys of its config."""
        return {}


@dataclass(frozen=True)
class BackboneOptions:
    """Options that a recipe and a ds config give to a backbone; `attention` to `cls_only_last_block` change speed only.
    Most have the names of keys in the recipe's section "model" and the ds JSON's "dino_ds". `mask_token`: a learned
    token replaces hidden patches; `packed` False runs one pass per size; `cls_only_last_block` False computes the last
    block for all tokens; `channels_last` None turns this layout on for GPUs, whose tensor cores need it."""

    drop_path: float = 0.0
    drop_path_growth: str = "linear"
    stochastic_depth: str = "per_image"
    pos_embed_interpolation: str = "dino"
    attention: str = "sdpa"
    packed: bool = True
    cls_only_last_block: bool = True
    mask_token: bool = False
    sync_batch_norm: bool = True
    rope_rescale: float | None = None
    channels_last: bool | None = None
