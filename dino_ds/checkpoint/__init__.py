"""Checkpoints of a run: written during training, sealed by a manifest, trusted only when every byte is as it says."""
