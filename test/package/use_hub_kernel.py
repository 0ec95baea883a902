# ruff: noqa: E402
"""Run in a folder with build/hub by test_hub_kernel.py: the card's snippets and every layer, without the package."""

import importlib
import pkgutil
import re
import sys
from pathlib import Path

sys.modules["liger_rl"] = None  # importing the package raises

import pytest
import torch
from kernels import LocalLayerRepository, Metadata, Mode, kernelize, use_kernel_forward_from_hub, use_kernel_mapping
from kernels._rust import Digest, DigestAlgorithm
from transformers.loss.loss_utils import ForCausalLMLoss

HUB = Path("build/hub")
VARIANTS = sorted((HUB / "build").iterdir())
page: dict = {}
for snippet in re.findall(r"```python\n(.*?)```", (HUB / "README.md").read_text(encoding="utf-8"), re.DOTALL):
    exec(snippet, page)
kernel = page["liger_rl"]
assert page["loss_fn"].forward.__func__ is kernel.layers.LigerFusedLinearGRPOLoss.forward

# The metadata says what is there.
assert [variant.name for variant in VARIANTS] == ["torch-cpu", "torch-cuda", "torch-rocm", "torch-universal"]
metadata = [Metadata.read_from_file(variant / "metadata.json") for variant in VARIANTS]
assert kernel.__name__ == metadata[torch.version.cuda is not None].id  # a CUDA build takes it without a GPU, too
assert len({each.id for each in metadata}) == len(VARIANTS)
for variant, each in zip(VARIANTS, metadata, strict=True):
    for cached in variant.rglob("__pycache__/*"):
        cached.unlink()
    each.digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))

# transformers' loss, by the layer of its name.
logits, labels = torch.randn(2, 9, 50), torch.randint(0, 50, (2, 9))
labels[0, :4] = -100
function = use_kernel_forward_from_hub("ForCausalLMLoss")(ForCausalLMLoss)
with use_kernel_mapping({"ForCausalLMLoss": {"cpu": LocalLayerRepository(HUB, layer_name="ForCausalLMLoss")}}):
    kernelize(function, mode=Mode.TRAINING, device="cpu", use_fallback=False)
assert function.forward.__func__ is kernel.layers.ForCausalLMLoss.forward
for options in ({}, {"num_items_in_batch": 7}, {"num_items_in_batch": torch.tensor(7)}, {"ignore_index": 3}):
    own, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    given = labels.clamp(min=3) if "ignore_index" in options else labels
    loss, expected = function(own, given, 50, **options), ForCausalLMLoss(theirs, given, 50, **options)
    (loss + expected).backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(own.grad, theirs.grad)
torch.testing.assert_close(
    function(logits, None, 50, shift_labels=labels), ForCausalLMLoss(logits, None, 50, shift_labels=labels)
)
for bad in (-5, 50):
    labels[1, 3] = bad
    with pytest.raises(ValueError, match="50"):
        function(logits, labels, 50)

# No module of it needs the package, and nothing clashes with it.
for module in pkgutil.walk_packages(kernel.__path__, f"{kernel.__name__}."):
    if "triton" not in module.name or importlib.util.find_spec("triton"):
        importlib.import_module(module.name)
del sys.modules["liger_rl"]
import liger_rl

rooms = {"distill", "fused_linear", "head", "layers", "losses", "support"}
assert rooms | ({*liger_rl.__all__} & {*vars(liger_rl)}) == set(kernel.__all__)
tensors = [page[name] for name in ("hidden", "weight", "ids")]
expected = liger_rl.linear_logprobs(*tensors).logps
torch.testing.assert_close(kernel.linear_logprobs(*tensors).logps, expected)
