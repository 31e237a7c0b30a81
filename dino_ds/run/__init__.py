"""A training run: its parts, its loop, its files and its log."""
