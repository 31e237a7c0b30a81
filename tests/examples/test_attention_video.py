"""The example that paints the frames of a clip."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from dino_ds.examples.attention_video import main
from dino_ds.weights.export import FORMATS
from tests.weights.test_weights import _backbone


@pytest.mark.slow
def test_every_frame_is_painted_and_equal_frames_alike(tmp_path):
    FORMATS["safetensors"][0](_backbone(), tmp_path / "teacher.safetensors")
    (tmp_path / "frames").mkdir()
    random = np.random.default_rng(0)
    images = [Image.fromarray(random.integers(0, 255, (48, 64, 3), dtype=np.uint8)) for _ in range(3)]
    for number, image in enumerate([*images, images[0]]):
        image.save(tmp_path / f"frames/{number}.png")
    out = tmp_path / "painted"
    main([str(tmp_path), str(tmp_path / "frames"), str(out), "--size", "64"])
    painted = [np.asarray(Image.open(path)).astype(int) for path in sorted(out.iterdir())]
    assert [picture.shape for picture in painted] == [(64, 80, 3)] * 4
    assert (painted[0] == painted[3]).all() and np.abs(painted[0] - painted[1]).max() > 20
    with pytest.raises(SystemExit, match="holds no PNG, JPEG or WebP"):
        main([str(tmp_path), str(tmp_path), "x"])
