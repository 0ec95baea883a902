"""examples/: what runs in seconds."""

import json
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
