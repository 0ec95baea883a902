"""The README and docs/ say what the code does: their snippets run, the tables are those of the results."""

import re
import shutil
import subprocess
import sys
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

import pytest

from liger_rl.losses import PRESETS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
LOSSES, FORMULAS = ((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("losses", "formulas"))
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
SNIPPETS = {
    f"{page.name}-{i}": snippet
    for page in PAGES
    if page.name != "frameworks.md"  # test_frameworks_page.py runs its recipes
    for i, snippet in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL))
}
OTHER_SYSTEMS = ("transformers", "trl", "peft")
SCRIPT, PUBLISHED, KERNELS = SNIPPETS.pop("README.md-0"), '"Qwen/Qwen3-0.6B"', "use_liger_kernel=True"


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippets_run(name):
    for system in OTHER_SYSTEMS:
        if re.search(rf"\b(from|import) {system}\b", SNIPPETS[name]):
            pytest.importorskip(system, reason="the snippet needs it")
    exec(compile(SNIPPETS[name], name, "exec"), {"__name__": "page"})


def test_the_first_script_is_a_run_under_the_patch(tmp_path):
    """Two steps of a small model in place of the published one, on a CPU, without kernels that need a GPU."""
    pytest.importorskip("trl", reason="the script needs it")
    import trl_runs

    model = Path(trl_runs.save_model("qwen3", tmp_path))
    trl_runs.tokenizer().save_pretrained(model)
    options = {**trl_runs.CPU_ARGS, "output_dir": str(tmp_path), "max_steps": 2, "max_completion_length": 4}
    assert SCRIPT.count(PUBLISHED) == SCRIPT.count(KERNELS) == 1
    names: dict[str, object] = {"__name__": "page"}
    exec(SCRIPT.replace(PUBLISHED, repr(str(model))).replace(KERNELS, f"**{options}"), names)
    assert names["trainer"].state.global_step == 2
    assert "its 4 micro-batches in one forward" in names["explain_trl"](names["trainer"])


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 130
    prose = re.sub(r"<!-- begin table.*?<!-- end table", "", README, flags=re.DOTALL)
    assert len(prose.split()) <= 1000


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\((?!http)([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


TABLES = {
    "README.md": {"step-nvidia-h200"},
    "results.md": {
        "step-nvidia-h200", "step-nvidia-h100-80gb-hbm3", "whole-step-nvidia-h200", "nvidia-h200",
        "train-real-runs-nvidia-h200", "cpu",
    },
    "support.md": {"support-nvidia-h200"},
}  # fmt: skip


def test_tables_of_numbers_are_those_of_the_results():
    readme = pytest.importorskip("benchmark.readme", reason="the benchmark is not part of an installed package")
    found = {page.name: page.read_text(encoding="utf-8") for page in PAGES}
    assert {page.name for page in readme.PAGES} == TABLES.keys()
    for name, text in found.items():
        assert set(re.findall(r"begin table (\S+)", text)) == TABLES.get(name, set()), name
        assert readme.filled(text) == text, "run python -m benchmark.readme"


def test_pictures_are_drawn_from_the_results():
    pytest.importorskip("benchmark.plot", reason="the benchmark is not part of an installed package")
    Image = pytest.importorskip("PIL.Image", reason="it reads pictures")
    from benchmark.environment import RESULTS, read_results
    from benchmark.picture import KEY, digest

    digests = {path.stem: digest(read_results(path)) for path in RESULTS.glob("*.json")}
    pictures = list(RESULTS.glob("*.png"))
    assert len(pictures) >= 4
    for picture in pictures:
        name = picture.stem if picture.stem in digests else picture.stem.partition("-")[2]
        assert Image.open(picture).info[KEY] == digests[name], f"{picture.name}: run python -m benchmark.plot"


@pytest.fixture
def results():
    """name -> what is in that file of results"""
    environment = pytest.importorskip("benchmark.environment", reason="the benchmark is not part of a package")
    return lambda name: environment.read_results(environment.RESULTS / f"{name}.json")


def whole_step(results):
    """README's headline, which compares like with like, and what is said above its table."""
    step = pytest.importorskip("benchmark.step", reason="the benchmark is not part of a package")
    found = results("step-nvidia-h200")
    window = [row for row in found["rows"] if (row["shape"], row["batch"]) == ("qwen3-1.7b", "window")]
    peer, patch, recomputed = (
        next(pair[name] for pair in step.pairs(window) if pair["beside"] == "TRL, both with Liger")
        for name in ("peer", "patch", "recomputed")
    )
    gib, least = (row["peak_mib"] / 1024 for row in (patch, recomputed))
    yield f"**{peer['step_ms'] / patch['step_ms']:.1f} times as fast** as TRL's, with Liger's kernels on both sides."
    yield f"It takes {gib:.1f} GiB; TRL takes {peer['peak_mib'] / 1024:.1f}."
    yield f"it is **{peer['step_ms'] / recomputed['step_ms']:.1f} times as fast in {least:.1f} GiB**"
    both = "TRL, no checkpointing, both with Liger, flash-attn-4"
    best = next(pair for pair in step.pairs(window) if pair["beside"] == both)
    trl = [row["step_ms"] for row in window if re.match(r"TRL(?!.*patch_trl)", row["variant"])]
    assert best["peer"]["step_ms"] == min(trl)
    times = best["peer"]["step_ms"] / best["patch"]["step_ms"]
    yield f"the patch with the same kernels is {times:.1f} times as fast as that."
    trl, patch, *_ = results("whole-step-nvidia-h200")["rows"]
    rest, rest_patched = ((row["scoring_ms"] + row["training_ms"]) / 1e3 for row in (trl, patch))
    small = f"{trl['generation_share']:.0%} of a small step](docs/results.md#with-generation)"
    yield f"[{small}, whose rest falls from {rest:.2f} to {rest_patched:.2f} s."
    of_shape = [row for row in found["rows"] if row["shape"] == "qwen3-1.7b" and row["status"] == "ok"]
    found_ms = {(row["batch"], row["variant"]): row["step_ms"] for row in of_shape}
    ways = "TRL, use_liger_kernel", "TRL, patch_trl(), use_liger_kernel"
    trl, patch = (found_ms["window, float32 weights", way] for way in ways)
    yield f"({trl / patch:.1f} times with float32, TRL's default)"
    by_way = {way: found_ms["default group", way] for way in (*ways, "TRL", "TRL, patch_trl()")}
    with_liger, without = (by_way[way] / by_way[patch] for way, patch in (ways, ("TRL", "TRL, patch_trl()")))
    yield f"run 1.5 to {without:.1f} times as fast, with Liger's kernels 1.1 to {with_liger:.1f}, like"
    for _, rows in groupby(found["rows"], key=step.label):
        for pair in step.pairs([row for row in rows if row["status"] == "ok"]):
            peaks = [pair[name] and pair[name]["peak_mib"] for name in ("peer", "recomputed")]
            if pair["beside"].startswith("TRL") and all(peaks):  # docs/trl.md says so
                assert pair["recomputed"]["peak_mib"] < pair["peer"]["peak_mib"]
    about = found["shapes"]["qwen3-1.7b"]["batches"]["window"]
    assert about["sequences"] == 8 * about["groups"]
    yield f"{about['micro_batches']} micro-batches, {about['padding_share']:.0%} padding, 8 completions of a prompt"
    rows = [row for row in found["rows"] if row["batch"].startswith("window") and "loss_difference" in row]
    assert max(abs(row["loss_difference"]) for row in rows if "dropout" not in row["batch"]) < 4e-4
    yield "GRPO's losses (0.03; 32k: 0.27) agree to 4e-4."


def head_alone(results):
    rows = {row["variant"]: row for row in results("nvidia-h200")["rows"] if row["case"] == "rl-llama-3-8b"}
    ours, trl, cce = (rows[name] for name in ("ours", "trl_chunked", "cce"))
    ms, extra = "{0[step_ms]:.1f} ms and {0[peak_extra_mib]:,.0f} MiB".format, "above inputs and gradients"
    yield f"an RL batch of 8,192 tokens: {ms(ours)} {extra}; TRL's {ms(trl)}; cut-cross-entropy {ms(cce)}."
    dense = {row["variant"]: row for row in results("nvidia-h200")["rows"] if row["case"] == "llama-3-8b"}
    ours, liger = (dense[name]["step_ms"] for name in ("ours", "liger_triton"))
    yield f"A dense batch takes {ours:.1f} ms, Liger's kernel on given logits {liger:.1f}"


def rewards(results):
    from benchmark import train_real_runs as runs

    found = runs.ends(results("train-real-runs-nvidia-h200"))
    trl, patch = ([ends["reward"] for (variant, _), ends in found.items() if variant == name] for name in runs.VARIANTS)
    assert len(trl) == 5
    assert {f"{stdev(values) / len(values) ** 0.5:.2f}" for values in (trl, patch)} == {"0.01"}
    yield f"five seeds end with a mean reward of {mean(trl):.2f} and {mean(patch):.2f}, each ± 0.01"


def sampling_sets(results):
    rows = {row["variant"]: row for row in results("support-nvidia-h200")["rows"] if row["mean"] == "field"}
    ours, masked, gathered = (rows[name]["step_ms"] for name in ("liger_rl", "masked logits", "gathered logits"))
    yield f"take {ours:.1f} ms on one H200. Masked logits take {masked:.0f} ms, gathered ones {gathered:.0f}"


@pytest.mark.parametrize("sentences", [whole_step, head_alone, rewards, sampling_sets])
def test_sentences_have_the_numbers_of_the_results(sentences, results):
    text = " ".join(README.split())
    for sentence in sentences(results):
        assert sentence in text


def test_losses_are_counted():
    assert f"**{len(PRESETS)} policy losses.**" in README


def test_exactness_is_that_of_the_results(results):
    """How many times bfloat16 logits are further from float64, in every case that has them."""
    logps, gradients = [], []
    rows = {(row["case"], row["variant"]): row for row in results("nvidia-h200")["rows"] if row.get("logp_max_error")}
    for case, ours in ((case, row) for (case, variant), row in rows.items() if variant == "ours"):
        other = rows.get((case, "eager")) or rows.get((case, "trl_chunked"))
        if other is not None:
            logps.append(other["logp_max_error"] / ours["logp_max_error"])
            names = [name for name in ("grad_hidden_error", "grad_weight_error") if ours.get(name)]
            gradients += [other[name] / ours[name] for name in names]
    sentence = r"at least (\d+) times closer to float64, and gradients (\d+) to (\d+) times"
    least, lowest, highest = map(int, re.search(sentence, " ".join(README.split())).groups())
    assert least <= min(logps) < 1.1 * least
    assert (lowest, highest) == (round(min(gradients)), round(max(gradients)))


def test_every_preset_has_its_row():
    policy_losses = LOSSES[LOSSES.index("## Policy losses") : LOSSES.index("## Pairs")]
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| (.*?) \|$", policy_losses, re.MULTILINE))
    assert rows.keys() == PRESETS.keys()
    headings, *sections = zip(*re.findall(r"^### (.*)\n((?:(?!#).*\n)*)", FORMULAS, re.MULTILINE), strict=True)
    formulas = dict(zip((heading.lower().replace(" ", "-") for heading in headings), *sections, strict=True))
    for name, preset in PRESETS.items():
        objective, reduction, _paper = rows[name].split(" | ")
        shown, section = re.fullmatch(r"\[`(\w+)`\]\(formulas\.md#([a-z-]+)\)", objective).groups()
        assert shown == preset.objective.__name__, name
        assert f"`{name}`" in formulas[section], name
        assert "```math" in formulas[section], name
        assert reduction == f"`{preset.reduction.__name__}`", name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/design.md"])
def test_files_that_a_page_names_exist(page):
    folders = [ROOT, *(ROOT / "liger_rl" / name for name in ("", "kernels", "head", "support"))]
    names = set(re.findall(r"`([\w./-]+(?:\.py|\.sh|/))`", (ROOT / page).read_text(encoding="utf-8")))
    assert [name for name in sorted(names) if not any((folder / name).exists() for folder in folders)] == []


def test_messages_that_a_page_explains_are_those_of_the_package():
    table = (ROOT / "docs" / "trl.md").read_text(encoding="utf-8").split("| message |")[1].split("\n\n")[0]
    messages = re.findall(r"^\| (.*?) \|", table.split("\n", 2)[2], re.MULTILINE)
    code = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "liger_rl").glob("*/**/*.py")))
    code = re.sub(r'"\n\s*f?"', "", code)  # a message over two lines
    fragments = [fragment.strip() for message in messages for fragment in re.split(r"\.\.\.|;", message)]
    assert len(messages) > 10
    assert [fragment for fragment in fragments if fragment not in code] == []


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_an_old_python_is_told_before_anything_is_installed(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    old = tmp_path / "python"
    code = "import sys; sys.version_info = (3, 10); ${2#import sys;}"
    old.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} -c "{code}"\n')
    old.chmod(0o755)
    shutil.copy(ROOT / "Makefile", tmp_path)
    for name in ("requirements-dev.txt", "pyproject.toml"):
        (tmp_path / name).touch()
    done = subprocess.run(["make", "demo", f"PYTHON={old}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    assert "needs Python >= 3.11" in done.stderr
    assert not (tmp_path / ".venv").exists()
    assert "Installing" not in done.stdout


def test_the_workflow_runs_what_a_change_must_pass():
    targets = re.findall(r"^make ([a-z-]+)$", (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (matrix,) = re.findall(r"target: \[(.*?)\]", workflow)
    assert set(matrix.split(", ")) == set(targets) - {"install"}
