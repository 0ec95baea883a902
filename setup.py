"""The metadata that depends on where the repository is published; the rest is in pyproject.toml.

The publisher sets LIGER_RL_REPOSITORY, an address like https://HOST/OWNER/NAME. The links and pictures of the README
then lead there, also from a package index, and the metadata names the address. Without it, the README stays as it is.
"""

import os
import re
from pathlib import Path

from setuptools import setup

LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!\w+:|#)([^)]+)\)")
repository = os.environ.get("LIGER_RL_REPOSITORY", "").rstrip("/")
readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def absolute(match: re.Match) -> str:
    picture, text, path = match.groups()
    return f"{picture}{text}({repository}/{'raw' if picture else 'blob'}/HEAD/{path})"


setup(
    long_description=LINK.sub(absolute, readme) if repository else readme,
    long_description_content_type="text/markdown",
    project_urls={"Repository": repository} if repository else {},
)
