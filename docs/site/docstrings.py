"""griffe extension: docstrings of the package as the site shows them. Their text in the source stays as it is."""

import re
from pathlib import Path

import griffe

# griffe reads the second of `low, high: bounds` as a type, unless no space is before it.
JOINT = ",\N{NO-BREAK SPACE}"
SHARED = re.compile(r"^( *)((?:\*{0,2}\w+, )+\w+): ", re.MULTILINE)
PAGE = re.compile(r"docs/(\w+\.md)")
PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")
NAME = re.compile(r"(?<!`)`(\w+)`(?!`)")
REFERENCE = re.compile(r"^::: (\S+\.(\w+))", re.MULTILINE)
API = Path(__file__).resolve().parents[1] / "api"


class Docstrings(griffe.Extension):
    """Keeps names that share a description together, and links names of the reference, pages and papers."""

    def on_package(self, *, pkg: griffe.Module, **_) -> None:
        if pkg.name == "liger_rl":
            for module in pkg["integrations"].modules.values():
                for part in (module, *module.modules.values()):
                    _describe_methods(part, pkg["integrations.patching.Framework"])
            pages = [page.read_text(encoding="utf-8") for page in API.glob("*.md")]
            _rewrite(pkg, {name: path for page in pages for path, name in REFERENCE.findall(page)})


def _describe_methods(module: griffe.Module, framework: griffe.Class) -> None:
    """`unpatch_x = X.unpatch` has the docstring of the method."""
    for member in module.attributes.values():
        method = str(member.value).rpartition(".")[2]
        if not member.docstring and method in framework.members:
            text = framework[method].docstring.value
            member.docstring = griffe.Docstring(text, parent=member)


def _rewrite(owner: griffe.Object, shown: dict[str, str]) -> None:
    for member in owner.members.values():
        if member.is_alias:
            continue
        if owner.is_class and member.is_attribute and not member.docstring:
            # A field says what it is behind its default.
            comment = member.lines[-1].partition("  # ")[2] if member.lines else ""
            member.docstring = griffe.Docstring(comment, parent=member) if comment else None
        if member.docstring:
            member.docstring.value = _as_shown(member.docstring.value, member.name, shown)
        _rewrite(member, shown)


def _as_shown(text: str, own: str, shown: dict[str, str]) -> str:
    def linked(match: re.Match) -> str:
        name = match[1]
        return f"[{match[0]}][{shown[name]}]" if name in shown and name != own else match[0]

    text = SHARED.sub(lambda match: match[0].replace(", ", JOINT), text)
    text = PAGE.sub(r"[\g<0>](../\1)", text)
    return NAME.sub(linked, PAPER.sub(r"[\g<0>](https://arxiv.org/abs/\1)", text))
