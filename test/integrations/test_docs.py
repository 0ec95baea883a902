"""The pages on transformers and PEFT say what the code does: their snippets run, each on its own."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = ("transformers.md", "peft.md")
SNIPPETS = [
    pytest.param(page, snippet, id=f"{page}-{i}")
    for page in PAGES
    for i, snippet in enumerate(re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL))
]


@pytest.mark.parametrize(("page", "snippet"), SNIPPETS)
def test_snippets_run(page, snippet):
    for package in ("transformers", "peft"):
        if f"from {package} import" in snippet:
            pytest.importorskip(package, reason=f"the snippet needs {package}")
    exec(compile(snippet, page, "exec"), {"__name__": "docs"})


def test_there_are_snippets():
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)(.*?)\)", (DOCS / page).read_text("utf-8")):
        assert (DOCS / target).is_file(), target
