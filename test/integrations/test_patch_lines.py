"""The lines of docs/frameworks.md are run."""

import importlib
import re
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "frameworks.md"
# Framework -> its line, of the table that has them.
LINES = dict(re.findall(r"^\| \[(.+?)\]\(.*?\|.*?\| `(from .+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_table_is_found():
    """A row whose cells are written otherwise would not be run."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "`from liger_rl" in line]
    assert len(rows) >= 4
    assert {re.match(r"\| \[(.+?)\]", row)[1] for row in rows} == LINES.keys()


@pytest.mark.parametrize("framework", LINES)
def test_the_line(framework):
    names = {}
    if "(model)" in LINES[framework]:
        names["model"] = importlib.import_module("hf_models").build("Qwen3")
    imported, call = LINES[framework].split("; ")
    exec(imported, names)  # which needs no framework, but transformers for its models
    try:
        exec(call, names)
    except ImportError as error:  # it says which framework is missing, or of which version
        pytest.skip(str(error))
