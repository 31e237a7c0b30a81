"""DINO self-supervised pre-training of Vision Transformers on DeepSpeed."""

__version__ = "0.1.0"
