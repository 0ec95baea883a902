"""The example of docs/transformers.md for DDP, on two processes: its gradient is that of the whole batch."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="transformers is not installed")

PAGE = Path(__file__).parents[2] / "docs" / "transformers.md"
CHECK = """
alone = swap_lm_head(AutoModelForCausalLM.from_config(config))
alone.load_state_dict(model.module.state_dict())
loss_step(alone, rows, FusedLinearGRPOLoss("dapo")).loss.backward()
for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(ours.grad, expected.grad)
print("same gradients")
"""


def test_the_example_for_ddp(tmp_path):
    (example,) = re.findall(r"```py\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "train.py").write_text(example + CHECK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("same gradients") == 2
