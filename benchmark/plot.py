"""Peak memory against tokens and vocabulary: `python -m benchmark.plot [DIR]`, one picture per results file."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmark.cases import ITEM_BYTES, TOKENS, VOCABULARY
from benchmark.peers import LABELS

RESULTS = Path(__file__).resolve().parent / "results"
STYLES = {
    "eager": {"color": "#8c8c8c", "marker": "s"},
    "liger_chunked": {"color": "#d9822b", "marker": "^"},
    "ours": {"color": "#1f6fb4", "marker": "o", "linewidth": 2.4},
}
# A logarithm has no place for a variant that needs nothing beyond its gradients.
SMALLEST_MIB = 1.0


def plot_memory(results: dict[str, Any], path: Path) -> bool:
    """Draw `path`; False where the results hold no sweep."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweeps = {axis: [row for row in results["rows"] if axis in row["groups"]] for axis in (TOKENS, VOCABULARY)}
    if any(len({row["case"] for row in rows}) < 2 for rows in sweeps.values()):
        return False
    figure, panels = pyplot.subplots(1, 2, figsize=(10.5, 4.2), sharey=True, layout="constrained")
    for panel, (axis, rows) in zip(panels, sweeps.items(), strict=True):
        _draw(panel, axis, rows)
    panels[0].set_ylabel("peak memory above inputs\nand gradients (MiB)")
    environment = results["environment"]
    figure.suptitle(f"Forward + backward of lm_head and GRPO loss, {environment['device_name']}", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path, dpi=150, metadata={"Software": None})
    pyplot.close(figure)
    return True


def _draw(panel: Any, axis: str, rows: list[dict[str, Any]]) -> None:
    from matplotlib.ticker import FuncFormatter, NullFormatter

    field = "vocab" if axis == VOCABULARY else "rows"
    first = rows[0]
    sizes = sorted({row[field] for row in rows})
    for variant, style in STYLES.items():
        points = sorted(
            (r[field], r["peak_extra_mib"]) for r in rows if r["variant"] == variant and r["status"] == "ok"
        )
        if points:
            across, up = zip(*points, strict=True)
            panel.plot(across, [max(mib, SMALLEST_MIB) for mib in up], label=LABELS[variant], **style)
    fixed = first["vocab"] if axis == TOKENS else first["rows"]
    one_copy = [size * fixed * ITEM_BYTES[first["dtype"]] / 2**20 for size in sizes]
    panel.plot(sizes, one_copy, ":", color="black", linewidth=1, label=f"the logits once, {first['dtype']}")
    other = f"V = {fixed:,}" if axis == TOKENS else f"N = {fixed:,}"
    panel.set_title(f"{other}, H = {first['hidden_size']:,}, {first['dtype']}", fontsize=10)
    panel.set_xlabel("tokens in the batch, N" if axis == TOKENS else "vocabulary size, V (token ids)")
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes)
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.xaxis.set_minor_formatter(NullFormatter())
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.grid(True, which="major", color="#dddddd", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def plot_directory(directory: Path) -> list[Path]:
    """memory-<device>.png beside every <device>.json that holds sweeps."""
    drawn = []
    for source in sorted(directory.glob("*.json")):
        target = directory / f"memory-{source.stem}.png"
        if plot_memory(json.loads(source.read_text(encoding="utf-8")), target):
            drawn.append(target)
    return drawn


if __name__ == "__main__":
    for picture in plot_directory(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS):
        print(picture.name)
