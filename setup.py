"""Installation; metadata and tools' settings are in pyproject.toml."""

from setuptools import setup

setup()
