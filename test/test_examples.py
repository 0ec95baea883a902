"""examples/: what runs in seconds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE, RECORD = ROOT / "examples" / "top_p_replay.py", ROOT / "docs" / "top_p_replay.json"


def run(*arguments: str) -> str:
    for system in ("matplotlib", "tokenizers", "tqdm", "transformers"):
        pytest.importorskip(system, reason="the example needs it")
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_replay_closes_the_gap(tmp_path):
    sizes = {"--warm-start-steps": 3, "--steps": 2, "--prompts": 4, "--group": 2}
    run(*(str(part) for pair in sizes.items() for part in pair), "--output", str(tmp_path))
    record = json.loads((tmp_path / "top_p_replay.json").read_text())
    assert (tmp_path / "top_p_replay.png").stat().st_size > 0
    assert len(record["full"]) == len(record["replayed"]) == 2
    for full, replayed in zip(record["full"], record["replayed"], strict=True):
        assert full["mean_gap"] > 1e-3
        assert replayed["largest_gap"] < 1e-4


def test_the_page_shows_what_the_record_says(tmp_path):
    record = tmp_path / RECORD.name
    record.write_bytes(RECORD.read_bytes())
    assert run("--draw", str(record)).strip() in (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert record.with_suffix(".png").exists()
