"""Benchmarks of the DINO papers that bring images of their own: readers of their layouts, and their metrics."""
