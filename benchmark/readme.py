"""The README's tables of numbers, from the committed results: `python -m benchmark.readme` writes them into it."""

import json
import re
from pathlib import Path

from benchmark.environment import ROOT
from benchmark.plot import RESULTS
from benchmark.table import markdown

README = ROOT / "README.md"
BLOCK = re.compile(r"(<!-- begin table (\S+)((?: \S+)*) -->\n)(.*?)(<!-- end table \2 -->)", re.DOTALL)


def filled(text: str) -> str:
    """`text` with every marked block filled from `benchmark/results/<name>.json`.

    `<!-- begin table NAME -->` takes every timed case, `<!-- begin table NAME GLOB... -->` those that match.
    """

    def block(match: re.Match[str]) -> str:
        results = json.loads((RESULTS / f"{match[2]}.json").read_text(encoding="utf-8"))
        patterns = match[3].split() or ["*"]
        return f"{match[1]}{markdown(results, patterns=patterns, sweeps=False)}{match[5]}"

    return BLOCK.sub(block, text)


if __name__ == "__main__":
    Path(README).write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
