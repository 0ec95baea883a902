"""The example of docs/transformers.md for DDP, on two processes: its gradient is that of the whole batch."""

import re
import runpy
from pathlib import Path

import pytest

from forks import run_ranks

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
    printed = run_ranks(tmp_path, runpy.run_path, str(tmp_path / "train.py"))
    assert ["same gradients" in text for text in printed] == [True, True]
