"""For tools that still call setup.py, as some installers of research code do. All of it is in pyproject.toml."""

from setuptools import setup

setup()
