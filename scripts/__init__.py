"""Tools for those who work on dino_ds: run with `python -m scripts.NAME` in a checkout. Not part of the wheel."""
