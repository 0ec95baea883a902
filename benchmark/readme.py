"""Tables of numbers in README and docs, from the committed results: `python -m benchmark.readme` writes them there."""

import re
from pathlib import Path

from benchmark import (
    conformance,
    distillation_loss,
    divergence,
    head_losses,
    row_losses,
    step,
    support,
    targets,
    train_real_runs,
    whole_step,
)
from benchmark.environment import RESULTS, ROOT, read_results
from benchmark.table import brief, markdown

NAMES = ("results", "support")
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES))
# The tables of other benchmarks, by how the names of their results begin.
OTHERS = {
    conformance.PREFIX: conformance.markdown,
    row_losses.PREFIX: row_losses.markdown,
    support.PREFIX: support.summary,
    divergence.PREFIX: divergence.markdown,
    distillation_loss.PREFIX: distillation_loss.markdown,
    head_losses.PREFIX: head_losses.markdown,
    targets.PREFIX: targets.markdown,
    step.PREFIX: step.markdown,
    train_real_runs.PREFIX: train_real_runs.markdown,
    whole_step.PREFIX: whole_step.markdown,
}
BLOCK = re.compile(r"(<!-- begin table (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end table \2 -->)", re.DOTALL)
FULL = re.compile(r"<!-- full table (\S+)((?: \S+)*) -->")


def table_of(name: str, *words: str) -> str:
    """Of `benchmark/results/<name>.json`."""
    results = read_results(RESULTS / f"{name}.json")
    for prefix, table in OTHERS.items():
        if name.startswith(prefix):
            return table(results, *words)
    return brief(results) if words == ("brief",) else markdown(results, patterns=words or ["*"], timed=True)


def with_full_tables(text: str) -> str:
    """`text` with a table in place of every `<!-- full table NAME WORD... -->`, as the site shows it.

    Such a table has more columns and rows than a reader of the repository needs, so that it stands in no file.
    """
    return FULL.sub(lambda match: table_of(match[1], *match[2].split()), text)


def filled(text: str) -> str:
    """`text` with every marked block filled from `benchmark/results/<name>.json`.

    `<!-- begin table NAME brief -->` is one table of milliseconds. `<!-- begin table NAME -->` takes every timed case,
    `<!-- begin table NAME GLOB... -->` those that match. Results of other benchmarks are one table each; words behind
    their names are arguments of their tables.
    """

    def block(match: re.Match[str]) -> str:
        return f"{match[1]}{table_of(match[2], *match[3].split())}{match[5]}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    for page in PAGES:
        Path(page).write_text(filled(page.read_text(encoding="utf-8")), encoding="utf-8")
