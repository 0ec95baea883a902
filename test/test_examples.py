"""examples/: what runs in seconds."""

import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "docs" / "top_p_replay.json"


@pytest.fixture
def example(monkeypatch):
    """The example's main, with the arguments of a command line."""
    for system in ("matplotlib", "tokenizers", "tqdm", "transformers"):
        pytest.importorskip(system, reason="the example needs it")
    monkeypatch.syspath_prepend(ROOT / "examples")
    import top_p_replay

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["top_p_replay.py", *arguments])
        top_p_replay.main()

    return run


def test_replay_closes_the_gap(example, tmp_path):
    sizes = {"--warm-start-steps": 3, "--steps": 2, "--prompts": 4, "--group": 2}
    example(*(str(part) for pair in sizes.items() for part in pair), "--output", str(tmp_path))
    record = json.loads((tmp_path / "top_p_replay.json").read_text())
    assert (tmp_path / "top_p_replay.png").stat().st_size > 0
    assert len(record["full"]) == len(record["replayed"]) == 2
    for full, replayed in zip(record["full"], record["replayed"], strict=True):
        assert full["mean_gap"] > 1e-3
        assert replayed["largest_gap"] < 1e-4


def test_the_page_shows_what_the_record_says(example, tmp_path, capsys):
    record = tmp_path / RECORD.name
    record.write_bytes(RECORD.read_bytes())
    example("--draw", str(record))
    assert capsys.readouterr().out.strip() in (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert record.with_suffix(".png").exists()


def printed(notebook) -> list[str]:
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return [output.text for output in outputs if output.get("name") == "stdout"]


def shape(notebook) -> list[str]:
    """What it prints, whatever the numbers."""
    return [re.sub(r"[-+.,\de]+", "#", word) for text in printed(notebook) for word in text.split()]


def test_notebook():
    for system in ("ipykernel", "matplotlib", "nbclient", "transformers"):
        pytest.importorskip(system, reason="the notebook needs it")
    import quickstart

    committed, fresh = quickstart.committed(), quickstart.executed()
    exactness, memory, losses = ([line.split() for line in text.splitlines()] for text in printed(fresh)[1:])
    assert [float(line[-1]) < 1e-4 for line in exactness] == [True] * 3
    full, fused = ([float(cell) for cell in line if cell[0].isdigit()] for line in memory[1:])
    assert full[-1] > 10 * full[0]
    assert fused[-1] < 1.5 * fused[0]
    assert [line[0] for line in losses[1:]] == ["grpo", "dapo", "gspo"]
    assert all(float(line[-1]) > 0 for line in losses[1:])
    assert shape(committed) == shape(fresh), "run make notebook"
    pictures = [
        output.data["image/png"] for cell in committed.cells for output in cell.get("outputs", ()) if "data" in output
    ]
    assert len(pictures) == 1
    assert len(pictures[0]) < 80_000
