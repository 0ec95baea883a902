"""The README and docs/ say what the code does: their snippets run, the tables are those of the results."""

import re
from pathlib import Path
from statistics import mean, stdev

import pytest

from liger_rl import PRESETS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOSSES = (ROOT / "docs" / "losses.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SNIPPETS = {
    f"{page.name}-{i}": snippet
    for page in PAGES
    for i, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
}
OTHER_SYSTEMS = ("transformers", "trl", "peft")


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_run(name):
    for system in OTHER_SYSTEMS:
        if re.search(rf"\b(from|import) {system}\b", SNIPPETS[name]):
            pytest.importorskip(system, reason="the snippet needs it")
    exec(compile(SNIPPETS[name], name, "exec"), {"__name__": "page"})


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_tables_of_numbers_are_those_of_the_results():
    readme = pytest.importorskip("benchmark.readme", reason="the benchmark is not part of an installed package")
    tables = {
        "README.md": {"nvidia-h200-policy"},
        "results.md": {
            "row-losses-nvidia-h200",
            "nvidia-h200",
            "nvidia-h200-policy",
            "pretrained-cpu",
            "cpu",
            "tolerance-runs-nvidia-h200",
            "train-real-runs-nvidia-h200",
            "step-nvidia-h200",
        },
        "support.md": {"support-nvidia-h200", "replay-mismatch-nvidia-h200"},
        "distillation.md": {"divergence-nvidia-h200", "divergence-policy-nvidia-h200", "distillation_loss-nvidia-h200"},
        "targets.md": {"targets-nvidia-h200"},
    }
    found = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert {page.name for page in readme.PAGES} == tables.keys()
    for name, text in found.items():
        assert set(re.findall(r"begin (?:table|summary) (\S+)", text)) == tables.get(name, set()), name
        assert readme.filled(text) == text, "run python -m benchmark.readme"


def test_the_whole_step_is_that_of_the_results():
    """The sentence below README's table."""
    environment = pytest.importorskip("benchmark.environment", reason="the benchmark is not part of a package")
    results = environment.read_results(environment.RESULTS / "step-nvidia-h200.json")
    rows = {row["variant"]: row for row in results["rows"] if row["shape"] == "qwen3-1.7b"}
    ours, trl = rows["policy_steps, max_tokens=16384"], rows["TRL"]
    faster, smaller = ours["tokens_per_s"] / trl["tokens_per_s"], ours["peak_mib"] / trl["peak_mib"]
    assert f"{faster:.2f} x the tokens per second" in README
    assert f"{smaller:.0%} of its memory" in README


def test_sentences_have_the_numbers_of_the_rl_batch():
    """Those below the picture and below the table, and the versions, which are the pictures', too."""
    table = pytest.importorskip("benchmark.table", reason="the benchmark is not part of a package")
    from benchmark.environment import RESULTS, read_results
    from benchmark.variants import DEFAULT

    results = read_results(RESULTS / "nvidia-h200-policy.json")
    rows = {row["variant"]: row for row in results["rows"] if row["case"] == "rl-policy-0.6"}
    default, cce = rows[DEFAULT], rows["cce"]
    error = {
        name: f"{table.gradient_error(row):.1e}".replace("e-0", "e-")
        for name, row in rows.items()
        if row["status"] == "ok"
    }
    sentences = (
        f"with torch {'.'.join(results['environment']['torch'].split('.')[:2])} and Triton "
        f"{'.'.join(results['environment']['triton'].split('.')[:2])}",
        f"gradient error is {error['cce']} against our {error[DEFAULT]}",
        f"its step takes {cce['step_ms'] / default['step_ms']:.1f} times as long as our default",
        f"most of its {rows['liger_chunked']['step_ms']:.0f} ms",
        f"it took {_of_another_batch('liger_sm90')['step_x_trl']:.2f} x TRL's time",
    )
    text = " ".join(README.split())
    for sentence in sentences:
        assert sentence in text
    assert cce["peak_extra_mib"] == min(row["peak_extra_mib"] for row in rows.values() if row["status"] == "ok")


def _of_another_batch(variant: str) -> dict:
    from benchmark.environment import RESULTS, read_results

    rows = read_results(RESULTS / "nvidia-h200.json")["rows"]
    return next(row for row in rows if (row["case"], row["variant"]) == ("rl-llama-3-8b", variant))


def test_rewards_are_those_of_the_runs():
    runs = pytest.importorskip("benchmark.train_real_runs", reason="the benchmark is not part of a package")
    from benchmark.environment import RESULTS, read_results

    found = runs.ends(read_results(RESULTS / "train-real-runs-nvidia-h200.json"))
    trl, default, _ = (
        [ends["reward"] for (variant, _), ends in found.items() if variant == name] for name in runs.VARIANTS
    )
    assert len(trl) == 5
    assert {f"{stdev(values) / len(values) ** 0.5:.2f}" for values in (trl, default)} == {"0.02"}
    sentence = f"Five seeds end with a mean reward of {mean(trl):.2f} and {mean(default):.2f}, each ± 0.02"
    assert sentence in " ".join(README.split())


def test_sampling_sets_take_the_time_of_the_results():
    environment = pytest.importorskip("benchmark.environment", reason="the benchmark is not part of a package")
    rows = environment.read_results(environment.RESULTS / "support-nvidia-h200.json")["rows"]
    ours, masked = (
        next(row["step_ms"] for row in rows if (row["variant"], row["mean"]) == (variant, "field"))
        for variant in ("liger_rl", "masked logits")
    )
    assert f"take {ours:.1f} ms on one H200. Masked logits take {masked:.0f} ms" in " ".join(README.split())


def test_losses_are_counted():
    assert f"**{len(PRESETS)} published losses.**" in README


def test_exactness_is_that_of_the_results():
    """How many times bfloat16 logits are further from float64, in every case that has them."""
    environment = pytest.importorskip("benchmark.environment", reason="the benchmark is not part of a package")
    logps, gradients = [], []
    for name in ("nvidia-h200", "nvidia-h200-policy"):
        results = environment.read_results(environment.RESULTS / f"{name}.json")
        found = {(row["case"], row["variant"]): row for row in results["rows"] if row.get("logp_max_error")}
        for case, ours in ((case, row) for (case, variant), row in found.items() if variant == "ours"):
            other = found.get((case, "eager")) or found.get((case, "trl_chunked"))
            if other is None:
                continue
            logps.append(other["logp_max_error"] / ours["logp_max_error"])
            names = [name for name in ("grad_hidden_error", "grad_weight_error") if ours.get(name)]
            gradients += [other[name] / ours[name] for name in names]
    least, lowest, highest = map(int, re.search(
        r"at least (\d+) times closer to float64, and exact gradients (\d+) to (\d+) times", " ".join(README.split())
    ).groups())  # fmt: skip
    assert least <= min(logps) < 1.1 * least
    assert (lowest, highest) == (round(min(gradients)), round(max(gradients)))


def test_every_preset_has_its_row():
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|$", LOSSES, re.MULTILINE))
    assert rows.keys() == PRESETS.keys()
    for name, preset in PRESETS.items():
        objective, _formula, reduction, _paper = rows[name].split(" | ")
        assert objective == f"`{preset.objective.__name__}`", name
        assert reduction == f"`{preset.reduction.__name__}`", name


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets
