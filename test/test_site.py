"""docs/site: what would go wrong without a word. `make docs` itself is the test that the pages are right."""

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
griffe = pytest.importorskip("griffe", reason="the site needs what `make docs` installs")
files = pytest.importorskip("mkdocs.structure.files", reason="the site needs what `make docs` installs")
PluginError = pytest.importorskip("mkdocs.exceptions").PluginError


@pytest.fixture
def site(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    import repository

    return repository


def test_names_that_the_reference_lacks_are_named(site, tmp_path):
    import public_names

    (tmp_path / "liger_rl").mkdir()
    listed = '"""Does it.\\n\\nArgs:\\n    x,\\xa0y: numbers.\\n"""'
    lines = ['__all__ = ["a", "b", "c", "d"]', 'def a(): "Says it."', "def b(): ...", "def c(x, y):", f" {listed}"]
    (tmp_path / "liger_rl" / "__init__.py").write_text("\n".join([*lines, "def d(x, z):", f" {listed}"]))
    (tmp_path / "liger_rl" / "trl.py").write_text("def patch(): ...\n")
    package = griffe.load("liger_rl", search_paths=[tmp_path], try_relative_path=False)
    problems = public_names.missing(package, {"liger_rl", "liger_rl.trl"}, {f"liger_rl.{name}" for name in "bcd"})
    assert problems == [
        "liger_rl.a is on no page of docs/api",
        "liger_rl.b has no docstring",
        "liger_rl.d differs from its docstring in y, z",
        "liger_rl.trl has no __all__, and a page imports from it",
    ]


@pytest.mark.parametrize("target", ["nowhere.md", "../liger_rl", "../../outside.md"])
def test_a_link_that_leads_nowhere_stops_the_build(site, target):
    with pytest.raises(PluginError, match="which is no file of the repository"):
        site.relinked(f"[a]({target})", ROOT / "docs" / "page.md", "page.md", files.Files([]))


def test_full_tables_stand_on_the_site_alone(site):
    from benchmark.readme import table_of

    page = ROOT / "docs" / "results.md"
    text = page.read_text(encoding="utf-8")
    table = table_of("nvidia-h200")
    assert table not in text
    assert table in site.readme.with_full_tables(text)
    for page in ROOT.glob("docs/**/*.md"):  # no marker is misspelt
        text = page.read_text(encoding="utf-8")
        assert "full table" not in site.readme.with_full_tables(text).replace("full tables", ""), page


def test_maths_are_typeset(site):
    import maths

    assert "<mfrac>" in maths.typeset(r"\frac{1}{2}", "math", "math", {}, None)


def test_a_section_that_the_readme_lacks_stops_the_build(site):
    assert site.section("Install").startswith("## Install\n")
    with pytest.raises(PluginError, match="no section 'Instal'"):
        site.section("Instal")
