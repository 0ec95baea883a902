"""The lines of docs/integrations.md are run; and the frameworks that have no page of their own, by their own code."""

import ast
import importlib
import inspect
import re
import textwrap
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

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

ROWS, TOKENS, HIDDEN, VOCAB = 3, 5, 12, 137


def swift_methods():
    """The methods of ms-swift's GRPO trainer that build liger-kernel's loss and call it."""
    tree = ast.parse((checkouts.source("ms-swift") / "rlhf_trainers" / "grpo_trainer.py").read_text())
    (trainer,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GRPOTrainer"]
    needed = {"_prepare_liger_loss", "compute_liger_loss"}
    methods = [node for node in trainer.body if isinstance(node, ast.FunctionDef) and node.name in needed]
    assert {method.name for method in methods} == needed
    for method in methods:
        method.decorator_list = []
    names = {"_ForwardRedirection": nullcontext, "gather_object": lambda values: values}
    exec("from typing import Any, Dict\nGRPOBatch = Any", names)
    exec(compile(ast.Module(methods, []), "grpo_trainer.py", "exec"), names)
    return names["_prepare_liger_loss"], names["compute_liger_loss"]


def swift_step(prepare, compute, head, hidden, batch, **options):
    chosen = {
        "beta": 0.04, "epsilon_low": 0.2, "epsilon_high": 0.28, "temperature": 0.9, "loss_type": "grpo",
        "max_completion_length": TOKENS, "importance_sampling_level": "token", "tau_pos": 1.0, "tau_neg": 1.05,
        **options,
    }  # fmt: skip
    logged = {"kl": [], "clip_ratio": []}
    trainer = SimpleNamespace(
        args=SimpleNamespace(use_liger_kernel=True),
        template=SimpleNamespace(padding_free=False),
        advantage_estimator="grpo",
        accelerator=SimpleNamespace(gather_for_metrics=lambda value: value),
        control=SimpleNamespace(should_evaluate=False),
        _metrics={"train": logged},
        _get_last_hidden_state=lambda *arguments: hidden,
        **chosen,
    )
    prepare(trainer)
    head.weight.grad = None
    ids = torch.cat([torch.zeros(ROWS, 2, dtype=torch.int64), batch.ids], 1)
    loss = compute(trainer, SimpleNamespace(lm_head=head), {"input_ids": ids}, batch)
    loss.backward()
    return type(trainer.liger_grpo_loss).__module__, loss.detach(), head.weight.grad, logged


@pytest.mark.parametrize("options", [{}, {"beta": 0.0, "loss_type": "dapo"}, {"importance_sampling_level": "sequence"}])
def test_ms_swifts_grpo(options):
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    prepare, compute = swift_methods()
    head, hidden = torch.nn.Linear(HIDDEN, VOCAB), torch.randn(ROWS, TOKENS, HIDDEN)
    mask = torch.arange(TOKENS) < torch.tensor([5, 3, 1])[:, None]
    old, ref = (-5 + 0.3 * torch.randn(ROWS, TOKENS) for _ in range(2))
    batch = SimpleNamespace(
        ids=torch.randint(VOCAB, (ROWS, TOKENS)),
        logits_to_keep=TOKENS,
        completion_mask=mask,
        old_per_token_logps=old,
        ref_per_token_logps=ref,
        rollout_per_token_logps=None,
        advantages=torch.randn(ROWS, 1).expand(ROWS, TOKENS),
    )
    theirs = swift_step(prepare, compute, head, hidden, batch, **options)
    importlib.import_module("liger_rl.integrations.liger").patch_liger()
    ours = swift_step(prepare, compute, head, hidden, batch, **options)
    assert theirs[0].startswith("liger_kernel")
    assert ours[0].startswith("liger_rl")
    for mine, other in zip(ours[1:3], theirs[1:3], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)
    for name, values in theirs[3].items():
        assert ours[3][name] == pytest.approx(values, rel=1e-4, abs=1e-6)


def test_ms_swifts_gkd():
    """What its trainer gives liger-kernel's loss is what ours takes."""
    ours = importlib.import_module("liger_rl.integrations.liger").LigerFusedLinearJSDLoss
    tree = ast.parse((checkouts.source("ms-swift") / "rlhf_trainers" / "gkd_trainer.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for name, function in (("LigerFusedLinearJSDLoss", ours), ("self.liger_jsd_loss", partial(ours.forward, None))):
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
    assert loss.LigerFusedLinearGRPOLoss.__module__ == "liger_rl.integrations.liger"
