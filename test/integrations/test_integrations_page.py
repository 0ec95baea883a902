"""The lines of docs/integrations.md are run; and the frameworks that have no page of their own, by their own code."""

import ast
import importlib
import inspect
import re
import textwrap
from functools import partial
from pathlib import Path

import pytest

import checkouts

PAGE = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
# Framework -> its line, of the table that has them.
LINES = dict(re.findall(r"^\| \[(.+?)\]\(.*?\|.*?\| `(from .+?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_table_is_found():
    """A row whose cells are written otherwise would not be run."""
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "`from liger_rl" in line]
    assert len(rows) >= 9
    assert {re.match(r"\| \[(.+?)\]", row)[1] for row in rows} == LINES.keys()


@pytest.mark.parametrize("framework", LINES)
def test_the_line(framework):
    names = {}
    if "(model)" in LINES[framework]:
        names["model"] = importlib.import_module("hf_models").build("Qwen3")
    imported, call = LINES[framework].split("; ")
    exec(imported, names)  # which needs no framework, but transformers for its models
    try:
        exec(call, names)
    except ImportError as error:  # it says which framework is missing, or of which version
        pytest.skip(str(error))


# --- ms-swift ---------------------------------------------------------------------------------------------------------

# File of its trainer -> the class that it builds, and the name under which it calls what it has built.
SWIFT = {
    "grpo_trainer.py": ("LigerFusedLinearGRPOLoss", "self.liger_grpo_loss"),
    "gkd_trainer.py": ("LigerFusedLinearJSDLoss", "self.liger_jsd_loss"),
}


@pytest.mark.parametrize("file", SWIFT)
def test_ms_swift(file):
    """What its trainer gives liger-kernel's loss is what ours takes. The numbers: test_liger.py."""
    built, called = SWIFT[file]
    ours = getattr(importlib.import_module("liger_rl.integrations.liger"), built)
    tree = ast.parse((checkouts.source("ms-swift") / "rlhf_trainers" / file).read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for name, function in ((built, ours), (called, partial(ours.forward, None))):
        (call,) = [call for call in calls if ast.unparse(call.func) == name]
        assert not call.args
        inspect.signature(function).bind(**{keyword.arg: None for keyword in call.keywords})


# --- Axolotl ----------------------------------------------------------------------------------------------------------


def test_axolotls_plugin():
    """That of the page, built from Axolotl's own class."""
    loss = pytest.importorskip("liger_kernel.chunked_loss", reason="liger-kernel is not installed")
    for needed in ("peft", "addict"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    original = loss.LigerFusedLinearGRPOLoss
    (block,) = re.findall(r"(    # liger_rl_for_axolotl\.py.*?)\n\n    # in Axolotl's", PAGE.read_text(), re.DOTALL)
    names = {}
    with checkouts.bare(checkouts.source("axolotl"), "axolotl", "axolotl.integrations"):
        exec(textwrap.dedent(block), names)
        names["LigerRL"]().pre_model_load({})
    assert loss.LigerFusedLinearGRPOLoss is not original
    assert loss.LigerFusedLinearGRPOLoss.__module__ == "liger_rl.integrations.liger_grpo"
