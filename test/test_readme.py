"""The README says what the code does: its snippets run, its tables are those of the results."""

import re
from pathlib import Path

import pytest

from liger_rl import PRESETS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=[f"snippet-{i}" for i in range(len(SNIPPETS))])
def test_snippets_run(snippet):
    if "transformers" in snippet:
        pytest.importorskip("transformers", reason="the snippet needs transformers")
    exec(compile(snippet, "README.md", "exec"), {"__name__": "readme"})


def test_there_are_snippets():
    assert len(SNIPPETS) >= 3


def test_tables_of_numbers_are_those_of_the_results():
    readme = pytest.importorskip("benchmark.readme", reason="the benchmark is not part of an installed package")
    assert re.findall(r"begin table (\S+)", README) == ["nvidia-h200", "cpu"]
    assert readme.filled(README) == README, "run python -m benchmark.readme"


def test_every_preset_has_its_row():
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|[^|]*\|$", README, re.MULTILINE))
    assert rows.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        objective, reduction = rows[name].split(" | ")
        assert f"`{preset.objective.__name__}`" in objective, name
        assert reduction == f"`{preset.reduction.__name__}`", name


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_the_picture_is_there():
    for path in re.findall(r"!\[.*?\]\((.*?)\)", README):
        assert (ROOT / path).is_file(), path
