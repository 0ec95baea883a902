"""Pictures of results: `python -m benchmark.plot [DIR]` draws what each results file in DIR has the rows for.

memory-NAME.png            peak memory against tokens and vocabulary
time-NAME.png              milliseconds per 1,000 tokens against tokens
rl-NAME.png                time, gradient error and memory on the batch as RL makes it
step-NAME.png              completion tokens per second and peak memory of a whole training step
support-NAME.png           milliseconds over what the sampler could have drawn
train-real-runs-NAME.png   reward, KL and entropy of a published model
"""

import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmark import step, support, train_real_runs
from benchmark.cases import ITEM_BYTES, RL, TOKENS, VOCABULARY
from benchmark.environment import RESULTS, read_results
from benchmark.picture import make_panels, save, write_out
from benchmark.table import format_percent, gradient_error
from benchmark.variants import LABELS, OURS

STYLES: dict[str, dict[str, Any]] = {
    "eager": {"color": "#8c8c8c", "marker": "s"},
    "compiled": {"color": "#4d4d4d", "marker": "D"},
    "liger_chunked": {"color": "#d9822b", "marker": "^"},
    "liger_triton": {"color": "#e0b14a", "marker": "v"},
    "liger_sm90": {"color": "#a04000", "marker": "<"},
    "trl_chunked": {"color": "#7d3c98", "marker": ">"},
    "cce": {"color": "#2e8b57", "marker": "P"},
    "torch_linear_ce": {"color": "#c0392b", "marker": "X"},
    "verl_triton": {"color": "#16a085", "marker": "*"},
    "ours": {"color": "#1f6fb4", "marker": "o", "linewidth": 3.0, "zorder": 3},
}
# A logarithm has no place for a variant that needs nothing beyond its gradients.
SMALLEST_MIB = 1.0
# Of the picture of whole steps: a variant and its name there.
STEP_WAYS = {
    "TRL": "TRL",
    "TRL, no checkpointing": "TRL, no checkpointing",
    step.UNSLOTH: step.UNSLOTH,
    "TRL, use_liger_kernel": "TRL, Liger's kernels",
    "TRL, use_liger_kernel, no checkpointing": "TRL, Liger's kernels, no checkpointing",
    "TRL, use_liger_kernel, flash_attention_4, no checkpointing": "TRL, Liger's kernels, flash, no checkpointing",
    "TRL, patch_trl()": "patch_trl()",
    "TRL, patch_trl(), use_liger_kernel": "patch_trl(), Liger's kernels",
    "TRL, patch_trl(), use_liger_kernel, flash-attn-4": "patch_trl(), Liger's kernels, flash",
    "TRL, patch_trl(memory=0), use_liger_kernel": "patch_trl(memory=0), Liger's kernels",
}
STEP_BATCH = "window"
OURS_COLOR, OTHERS_COLOR = "#1f6fb4", "#b3b3b3"

Row = dict[str, Any]


def plot_memory(results: dict[str, Any], path: Path) -> bool:
    """Draw `path`; False where the results hold no sweep."""
    sweeps = {axis: _of_group(results, axis) for axis in (TOKENS, VOCABULARY)}
    if any(len({row["case"] for row in rows}) < 2 for rows in sweeps.values()):
        return False
    figure, panels = _panels(2, sharey=True)
    for panel, (axis, rows) in zip(panels, sweeps.items(), strict=True):
        _draw_memory(panel, axis, rows)
    panels[0].set_ylabel("peak memory above inputs\nand gradients (MiB)")
    _finish(figure, panels, results, "Forward + backward of lm_head and GRPO loss", path)
    return True


def _draw_memory(panel: Any, axis: str, rows: list[Row]) -> None:
    field = "vocab" if axis == VOCABULARY else "rows"
    first = rows[0]
    _draw_lines(panel, rows, lambda row: row[field], lambda row: _at_least(row.get("peak_extra_mib"), SMALLEST_MIB))
    sizes = sorted({row[field] for row in rows})
    fixed = first["vocab"] if axis == TOKENS else first["rows"]
    one_copy = [size * fixed * ITEM_BYTES[first["dtype"]] / 2**20 for size in sizes]
    panel.plot(sizes, one_copy, ":", color="black", linewidth=1, label=f"the logits once, {first['dtype']}")
    other = f"V = {fixed:,}" if axis == TOKENS else f"N = {fixed:,}"
    panel.set_title(f"{other}, H = {first['hidden_size']:,}, {first['dtype']}", fontsize=10)
    panel.set_xlabel("tokens in the batch, N" if axis == TOKENS else "vocabulary size, V (token ids)")
    _logarithmic(panel, sizes)


def plot_time(results: dict[str, Any], path: Path) -> bool:
    """Draw `path`; False where fewer than two batch sizes were timed."""
    rows = [row for row in _of_group(results, TOKENS) if row.get("step_ms")]
    if len({row["rows"] for row in rows}) < 2:
        return False
    from matplotlib.ticker import LogLocator

    figure, (panel,) = _panels(1)
    _draw_lines(panel, rows, lambda row: row["rows"], lambda row: row["step_ms"] / row["rows"] * 1000)
    sizes = sorted({row["rows"] for row in rows})
    floors = [_floor([row for row in rows if row["rows"] == size]) / size * 1000 for size in sizes]
    panel.plot(sizes, floors, ":", color="black", linewidth=1, label="the matmuls alone")
    first = rows[0]
    panel.set_title(f"V = {first['vocab']:,}, H = {first['hidden_size']:,}, {first['dtype']}", fontsize=10)
    panel.set_xlabel("tokens in the batch, N")
    panel.set_ylabel("ms per 1,000 tokens")
    _logarithmic(panel, sizes)
    panel.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    panel.yaxis.set_minor_formatter(panel.yaxis.get_major_formatter())
    _finish(figure, [panel], results, "Forward + backward of lm_head and GRPO loss", path)
    return True


def plot_rl(results: dict[str, Any], path: Path) -> bool:
    """Draw `path`; False where the batch was not measured. Of several heads, the first."""
    rows = [row for row in _of_group(results, RL) if row.get("step_ms") and gradient_error(row)]
    rows = [row for row in rows if row["case"] == rows[0]["case"]]
    if len(rows) < 2:
        return False
    rows.sort(key=lambda row: row["step_ms"], reverse=True)
    figure, (times, errors, memory) = _panels(3, sharey=True, width_ratios=(4, 3, 3))
    names, colors = [LABELS[row["variant"]] for row in rows], [_emphasis(row) for row in rows]
    _draw_bars(times, names, [row["step_ms"] for row in rows], colors, "{:.1f}".format)
    times.axvline(_floor(rows), color="black", linewidth=1.2, linestyle=":", zorder=0, label="the three matmuls alone")
    times.legend(loc="upper right", frameon=False, fontsize=10)
    times.set_xlabel("time of a step (ms)")
    _draw_bars(errors, names, [gradient_error(row) for row in rows], colors, format_percent)
    errors.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    errors.set_xlabel("relative error of the gradient")
    _draw_bars(memory, names, [row.get("peak_extra_mib") for row in rows], colors, "{:,.0f}".format)
    write_out(memory.xaxis)
    memory.set_xlabel("extra memory (MiB)")
    for tick, row in zip(times.get_yticklabels(), rows, strict=True):
        tick.set_fontweight("bold" if row["variant"] == OURS else "normal")
    first = rows[0]
    shape = f"N = {first['rows']:,}, V = {first['vocab']:,}, H = {first['hidden_size']:,}, {first['dtype']}"
    share = f"{first['mask_share']:.0%} padding, {first['idle_share']:.0%} of sequences without advantage"
    _finish(figure, [], results, f"Forward and backward of an RL batch: {shape}, {share}", path)
    return True


def _emphasis(row: Row) -> str:
    return OURS_COLOR if row["variant"] == OURS else OTHERS_COLOR


def _draw_bars(
    panel: Any, names: list[str], values: list[float | None], colors: list[str], text: Callable[[float], str]
) -> None:
    """Horizontal ones with their numbers, each whole."""
    bars = panel.barh(names, [value or 0.0 for value in values], color=colors)
    panel.bar_label(bars, ["" if value is None else text(value) for value in values], padding=5, fontsize=11)
    panel.margins(x=0.24)
    panel.locator_params(axis="x", nbins=5)
    panel.tick_params(axis="y", labelsize=11)
    panel.xaxis.label.set_fontsize(11)
    panel.spines[["top", "right"]].set_visible(False)


def plot_step(results: dict[str, Any], path: Path) -> bool:
    """Draw `path`: speed and memory of the ways that ran, of each shape on one GPU; False where ours did not run."""
    label, base = f", {STEP_BATCH}", "TRL, use_liger_kernel"
    wanted = {base, "TRL, patch_trl(), use_liger_kernel"}
    beside_trl = step.rows_beside_trl(results)
    batches = [(title, rows) for title, rows in beside_trl if title.endswith(label) and wanted <= rows.keys()]
    if not batches:
        return False
    ways = [[way for way in reversed(STEP_WAYS) if way in rows] for _, rows in batches]
    heights = list(map(len, ways))
    figure, panels = make_panels(
        len(batches), 2, figsize=(13, 0.4 * sum(heights) + 2), sharey="row", height_ratios=heights, width_ratios=(5, 4)
    )
    for (speed, memory), (title, rows), drawn in zip(panels, batches, ways, strict=True):
        names = [STEP_WAYS[way] for way in drawn]
        colors = [OURS_COLOR if "patch_trl" in way else OTHERS_COLOR for way in drawn]
        of_trl = rows[base]["tokens_per_s"] / 1e3
        fast = [rows[way]["tokens_per_s"] / 1e3 for way in drawn]
        _draw_bars(speed, names, fast, colors, lambda value, of_trl=of_trl: f"{value:.0f} ({value / of_trl:.1f} x)")
        peaks = [rows[way]["peak_mib"] and rows[way]["peak_mib"] / 1024 for way in drawn]
        _draw_bars(memory, names, peaks, colors, "{:.0f}".format)
        speed.set_title(title.removesuffix(label), fontsize=11, loc="left")
    panels[-1, 0].set_xlabel("completion tokens per second, thousands (x TRL with Liger's kernels)")
    panels[-1, 1].set_xlabel("peak memory (GiB)")
    about = step.about_batch(results, batches[0][1]["TRL"])
    heading = f"{about['sequences']} completions in rows of {about['row_tokens']:,} tokens"
    _finish(figure, [], results, f"A step of TRL's GRPOTrainer, without generation: {heading}", path)
    return True


def _of_group(results: dict[str, Any], group: str) -> list[Row]:
    return [row for row in results["rows"] if group in row["groups"]]


def _floor(rows: list[Row]) -> float:
    """Milliseconds of one case's products, which every row has timed for itself."""
    return statistics.median(row["step_floor_ms"] for row in rows)


def _at_least(value: float | None, least: float) -> float | None:
    return None if value is None else max(value, least)


def _panels(count: int, **options: Any) -> tuple[Any, Any]:
    figure, panels = make_panels(1, count, figsize=(min(13, 5.25 * max(count, 1.4)), 4.4), **options)
    return figure, panels[0]


def _draw_lines(panel: Any, rows: list[Row], across: Callable[[Row], float], up: Callable[[Row], float | None]) -> None:
    """One line per variant that has a value at more than one place."""
    for variant, style in STYLES.items():
        mine = [row for row in rows if row["variant"] == variant and row["status"] == "ok"]
        points = sorted((across(row), value) for row in mine if (value := up(row)) is not None)
        if len(points) > 1:
            xs, ys = zip(*points, strict=True)
            panel.plot(xs, ys, label=LABELS[variant], **style)


def _logarithmic(panel: Any, sizes: list[int]) -> None:
    from matplotlib.ticker import NullFormatter

    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(sizes)
    panel.tick_params(axis="x", labelrotation=30 if len(sizes) > 6 else 0)
    write_out(panel.xaxis)
    panel.xaxis.set_minor_formatter(NullFormatter())
    write_out(panel.yaxis)
    panel.grid(True, which="major", color="#dddddd", linewidth=0.8)
    panel.spines[["top", "right"]].set_visible(False)


def _finish(figure: Any, labelled: list[Any], results: dict[str, Any], heading: str, path: Path) -> None:
    environment = results["environment"]
    versions = [f"{name} {environment[name]}" for name in ("torch", "triton") if environment.get(name)]
    figure.suptitle(f"{heading}\n{', '.join([environment['device_name'], *versions])}", fontsize=12)
    found: dict[str, Any] = {}
    for panel in labelled:
        handles, labels = panel.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    columns = round(figure.get_figwidth() / 2.6)
    if found:
        figure.legend(
            found.values(), found.keys(), loc="outside lower center", ncols=columns, frameon=False, fontsize=9
        )
    save(figure, path, results)


PLOTS = {"memory": plot_memory, "time": plot_time, "rl": plot_rl}
# Of other benchmarks, by how the names of their results begin.
OTHERS = {step.PREFIX: plot_step, support.PREFIX: support.plot, train_real_runs.PREFIX: train_real_runs.plot}


def plot_directory(directory: Path) -> list[Path]:
    """Beside every NAME.json <plot>-NAME.png, or NAME.png of another benchmark, where it has the rows for it."""
    drawn = []
    for source in sorted(directory.glob("*.json")):
        results = read_results(source)
        plots = [("", draw) for prefix, draw in OTHERS.items() if source.stem.startswith(prefix)]
        if not plots and all("groups" in row for row in results.get("rows", [{}])):
            plots = [(f"{name}-", draw) for name, draw in PLOTS.items()]
        for name, draw in plots:
            target = directory / f"{name}{source.stem}.png"
            if draw(results, target):
                drawn.append(target)
    return drawn


if __name__ == "__main__":
    for picture in plot_directory(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS):
        print(picture.name)
