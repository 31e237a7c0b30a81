"""Checkpoints of a run: written beside training, sealed by a manifest, trusted only when every byte is as it says."""
