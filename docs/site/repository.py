"""mkdocs hook: one set of links for a git host and for the site.

Pages link to files of the repository by relative paths, as a git host wants them. The site is made of docs/ alone. So
every linked file outside of it (a picture, a page, a source file, a notebook) becomes a file of the site, and the link
is rewritten. A link that leads nowhere stops the build.

`<!-- README: Install -->` in a page stands for that section of README.md, `<!-- README -->` for what is before them.
`<!-- full table NAME -->` stands for the table of all of `benchmark/results/NAME.json`.
"""

import json
import re
import sys
from pathlib import Path
from posixpath import relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # `benchmark` is not part of the package
from benchmark import readme  # noqa: E402

DOCS, README = ROOT / "docs", ROOT / "README.md"
# Code comes first, so that what looks like a link in it is none; a link's text may be code.
LINK = re.compile(
    r"^(?P<fence>`{3,}).*?^(?P=fence)$"
    r"|\[(?P<text>(?:`[^`\n]*`|[^][`])*)\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)"
    r"|`[^`\n]+`",
    re.MULTILINE | re.DOTALL,
)
NUMBER = re.compile(r'<td (?=style="text-align: right;">[^<]{1,12}</td>)')
INCLUDE = re.compile(r"<!-- README(?:: (.+?))? -->")
AS_IT_IS, WITH_LINKS = (".md", ".png", ".svg"), (".md", ".ipynb")
LANGUAGES = {".py": "python", ".json": "json", ".yml": "yaml", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages, seen = [*sorted(DOCS.rglob("*.md")), README], set()
    for page in pages:  # grows: linked pages have links of their own
        for match in LINK.finditer(markdown_of(page)):
            if not match["path"]:
                continue
            target = linked(match["path"], page)
            if target in seen or target == README or target.is_relative_to(DOCS):
                continue
            seen.add(target)
            files.append(published(target, config))
            if target.suffix in WITH_LINKS:
                pages.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.parent is None:  # alone under its tab: no page to list beside it
        page.meta["hide"] = ["navigation"]
    uri = page.file.src_uri
    places = [DOCS / uri, ROOT / uri, ROOT / uri.removesuffix(".md")]
    source = next(place for place in places if place.exists())
    if source.suffix not in WITH_LINKS:
        return markdown
    text = relinked(readme.with_full_tables(markdown), source, uri, files)
    return INCLUDE.sub(lambda match: relinked(section(match[1]), README, uri, files), text)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return NUMBER.sub(r'<td class="number" ', html)


def linked(target: str, page: Path) -> Path:
    """The file of the repository that a link of `page` means."""
    path = (page.parent / target).resolve()
    if not path.is_file() or not path.is_relative_to(ROOT):
        raise PluginError(f"{page.relative_to(ROOT)} links to {target}, which is no file of the repository")
    return path


def published(path: Path, config: MkDocsConfig) -> File:
    """The file of the site that shows `path`."""
    uri = site_uri(path)
    if path.suffix in AS_IT_IS:
        return File.generated(config, uri, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV)
    return File.generated(config, uri, content=markdown_of(path), inclusion=InclusionLevel.NOT_IN_NAV)


def markdown_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return text
    if path.suffix == ".ipynb":
        return notebook(text)
    return f"# {path.relative_to(ROOT)}\n\n{fenced(text, LANGUAGES.get(path.suffix, 'text'))}"


def site_uri(path: Path) -> str:
    if path == README:
        return "index.md"
    uri = path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT).as_posix()
    return uri if path.suffix in AS_IT_IS or path.is_relative_to(DOCS) else f"{uri}.md"


def relinked(markdown: str, source: Path, uri: str, files: Files) -> str:
    """`markdown` of the repository's file `source`, with links that fit its place in the site."""

    def moved(match: re.Match) -> str:
        to = site_uri(linked(match["path"], source))
        text = match["text"]
        if text == match["path"]:  # a path tells a reader of the site less than the page's name in the navigation
            file = files.get_file_from_path(to)
            text = (file and file.page and file.page.title) or text
        return f"[{text}]({relpath(to, Path(uri).parent.as_posix())}{match['anchor'] or ''})"

    return LINK.sub(lambda match: moved(match) if match["path"] else match[0], markdown)


def section(title: str | None) -> str:
    """A section of README.md with its heading; without a title, what is before the first one."""
    before, *sections = re.split(r"^(?=## )", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    if title is None:
        return before
    found = [part for part in sections if part.startswith(f"## {title}\n")]
    if not found:
        raise PluginError(f"README.md has no section {title!r}")
    return found[0]


def fenced(text: str, language: str) -> str:
    return f"````{language}\n{text.rstrip()}\n````\n"


def notebook(text: str) -> str:
    """Markdown of a notebook's cells with their outputs."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else fenced(source, "python"))
        for output in cell.get("outputs", []):
            if "data" in output and "image/png" in output["data"]:
                parts.append(f"![Output](data:image/png;base64,{output['data']['image/png'].strip()})")
            elif output.get("name") == "stdout":
                parts.append(fenced("".join(output["text"]), "text"))
    return "\n\n".join(parts)
