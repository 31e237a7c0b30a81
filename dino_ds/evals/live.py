"""The teacher of a running training job as the `Model` that evaluations and pictures take."""

from __future__ import annotations

from torch import Tensor

from dino_ds.teachers.base import Teacher
from dino_ds.weights.load import Backbone


class LiveTeacher:
    """A `Model`: in FP32 whatever the precision of training, its blocks as they are without a compiler.

    `image_size` is the native side in pixels. Nothing is copied: it is always the newest teacher.
    """

    def __init__(self, teacher: Teacher, image_size: int) -> None:
        self._teacher = teacher
        self._backbone = Backbone(teacher.backbone, image_size, "the teacher", {})
        self.image_size, self.patch_size, self.width = image_size, self._backbone.patch_size, self._backbone.width

    def features(self, images: Tensor) -> Tensor:
        return self._teacher.features(images)

    def patch_tokens(self, images: Tensor) -> Tensor:
        with self._teacher.evaluating():
            return self._backbone.patch_tokens(images)

    def attention(self, images: Tensor) -> Tensor:
        with self._teacher.evaluating():
            return self._backbone.attention(images)

    def last_tokens(self, images: Tensor, blocks: int) -> Tensor:
        with self._teacher.evaluating():
            return self._backbone.last_tokens(images, blocks)
