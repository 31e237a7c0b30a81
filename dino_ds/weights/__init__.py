"""Weights in and out: other projects' names, files and shapes against ours."""
