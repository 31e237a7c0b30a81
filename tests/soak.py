"""The long form of tests that can be long: `make soak` asks for it with DINO_DS_SOAK=1."""

from __future__ import annotations

import os

SOAK = os.environ.get("DINO_DS_SOAK") == "1"
