"""mkdocs hook: every public name is in the API reference and has a docstring that names its parameters.

Public is what `__all__` lists, in `liger_rl` and in every other module of it that a page imports from. The reference
shows a name of `liger_rl` as such, wherever else it is. What is missing stops the build.
"""

import re
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError

JOINT = ",\N{NO-BREAK SPACE}"  # as docstrings.py keeps names together
ROOT = Path(__file__).resolve().parents[2]
IMPORT = re.compile(r"^\s*from (liger_rl[\w.]*) import ", re.MULTILINE)
REFERENCE = re.compile(r"^::: (\S+)", re.MULTILINE)


def on_pre_build(config: MkDocsConfig) -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    shared = griffe.load_extensions(str(ROOT / "docs" / "site" / "docstrings.py"))
    package = griffe.load("liger_rl", search_paths=[ROOT], try_relative_path=False, extensions=shared)
    problems = missing(package, {"liger_rl", *IMPORT.findall(pages)}, set(REFERENCE.findall(pages)))
    if problems:
        raise PluginError("the API reference is incomplete:\n  " + "\n  ".join(problems))


def missing(package: griffe.Module, modules: set[str], shown: set[str]) -> list[str]:
    """What the reference lacks, one sentence each, when its pages have a directive for each of `shown`."""
    problems = []
    for module in sorted(modules):
        names = package[module.removeprefix("liger_rl").removeprefix(".")] if module != "liger_rl" else package
        if names.exports is None:
            problems.append(f"{module} has no __all__, and a page imports from it")
            continue
        front = set() if names is package else set(map(str, package.exports))
        for name in sorted({*map(str, names.exports)} - front):
            if f"{module}.{name}" not in shown:
                problems.append(f"{module}.{name} is on no page of docs/api")
            if not names[name].has_docstring:
                problems.append(f"{module}.{name} has no docstring")
            elif differing := parameters_apart(names[name]):
                problems.append(f"{module}.{name} differs from its docstring in {', '.join(sorted(differing))}")
    return problems


def parameters_apart(described: griffe.Object) -> set[str]:
    """Parameters that only the signature or only the docstring has; none where the docstring lists no parameter."""
    listed = set()
    for section in described.docstring.parse("google", warnings=False):
        if section.kind in (griffe.DocstringSectionKind.parameters, griffe.DocstringSectionKind.attributes):
            listed |= {name for item in section.value for name in item.name.split(JOINT)}
    return listed ^ ({parameter.name for parameter in described.parameters} - {"self"}) if listed else set()
