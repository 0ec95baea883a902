"""What public calls refuse: each argument is named before any product."""

import math

import pytest
import torch

from head_calls import Products
from liger_rl import FusedLinearGRPOLoss, linear_divergence, linear_logprobs, support_logprobs, topk_divergence
from liger_rl.fused_linear import grpo_loss_from_logits
from liger_rl.head import LogitTransform, logits_logprobs
from liger_rl.losses import PPOClip, TokenMean
from liger_rl.support import Support

IDS, NAN = torch.zeros(3, 5, dtype=torch.int64), math.nan
HEAD = {"hidden": torch.randn(3, 5, 16), "weight": torch.randn(129, 16, requires_grad=True)}
LINEAR, GIVEN = HEAD | {"targets": IDS}, {"logits": torch.zeros(3, 5, 129), "targets": IDS}
TOKENS = {"hidden": torch.randn(15, 16), "weight": HEAD["weight"]}
TWO_HEADS = {"hidden": torch.randn(3, 7, 16), "weight": torch.randn(131, 16), "teacher_hidden": torch.randn(3, 7, 24)}
LOSS = {"selected_token_ids": IDS, "advantages": torch.zeros(3)}
GRPO = {"hidden": torch.randn(4, 7, 16), "weight": HEAD["weight"], "selected_token_ids": torch.zeros(4, 7).long()}
GRPO |= {"advantages": torch.ones(4), "ref_per_token_logps": torch.zeros(4, 7)}
POLICY = {"logits": GIVEN["logits"], **LOSS, "beta": 0.1, "ref_per_token_logps": torch.zeros(3, 5)}
LISTS = {"teacher_ids": torch.zeros(15, 2).long(), "teacher_logps": torch.zeros(15, 2)}


# Name in the message, type, arguments that replace good ones.
LOGPROBS = [
    ("hidden", ValueError, {"hidden": torch.zeros(16)}),
    ("hidden", ValueError, {"hidden": torch.zeros(1, 3, 5, 16)}),
    ("hidden", TypeError, {"hidden": torch.zeros(3, 5, 16, dtype=torch.float64)}),
    ("hidden", TypeError, {"hidden": torch.zeros(3, 5, 16, dtype=torch.int64)}),
    ("hidden", TypeError, {"hidden": [[0.0]]}),
    ("hidden", ValueError, {"hidden": torch.zeros(3, 5, 0), "weight": torch.zeros(129, 0)}),
    ("hidden", TypeError, {"hidden": torch.zeros(15, 16).to_sparse(), "targets": torch.zeros(15, dtype=torch.int64)}),
    ("weight", TypeError, {"weight": torch.zeros(129, 16).to_sparse()}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5, dtype=torch.int64).to_sparse()}),
    ("mask", TypeError, {"mask": torch.ones(3, 5).to_sparse()}),
    ("weight", ValueError, {"weight": torch.zeros(129)}),
    ("weight", ValueError, {"weight": torch.zeros(129, 17)}),
    ("weight", ValueError, {"weight": torch.zeros(0, 16)}),
    ("weight", TypeError, {"weight": torch.zeros(129, 16, dtype=torch.float64)}),
    ("autocast", TypeError, {"weight": torch.zeros(129, 16, dtype=torch.bfloat16)}),
    ("weight", ValueError, {"weight": torch.zeros(129, 16, device="meta")}),
    ("bias", ValueError, {"bias": torch.zeros(128)}),
    ("bias", ValueError, {"bias": torch.zeros(129, 1)}),
    ("bias", TypeError, {"bias": torch.zeros(129, dtype=torch.float16)}),
    ("bias", TypeError, {"bias": 1.0}),
    ("bias", ValueError, {"bias": torch.zeros(129, device="meta")}),
    ("targets", ValueError, {"targets": torch.zeros(3, 4, dtype=torch.int64)}),
    ("targets", ValueError, {"targets": torch.zeros(15, dtype=torch.int64)}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5)}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5, dtype=torch.bool)}),
    ("targets", TypeError, {"targets": [0]}),
    ("targets", ValueError, {"targets": torch.zeros(3, 5, dtype=torch.int64, device="meta")}),
    ("targets", ValueError, {"targets": torch.full((3, 5), 129)}),
    ("targets", ValueError, {"targets": torch.full((3, 5), 10**12)}),
    ("mask", ValueError, {"mask": torch.ones(3, 4)}),
    ("mask", ValueError, {"mask": torch.ones(3)}),
    ("mask", TypeError, {"mask": [1]}),
    ("mask", ValueError, {"mask": torch.full((3, 5), 0.5)}),
    ("mask", ValueError, {"mask": torch.full((3, 5), NAN)}),
    ("mask", ValueError, {"mask": torch.full((3, 5), -1)}),
    ("mask", ValueError, {"mask": torch.ones(3, 5, device="meta")}),
    ("transform", TypeError, {"transform": 0.5}),
    ("transform", TypeError, {"transform": LogitTransform}),
    ("entropy", TypeError, {"entropy": 1}),
    ("extras", TypeError, {"extras": 5}),
    ("chunk_tokens", ValueError, {"chunk_tokens": 0}),
    ("chunk_tokens", TypeError, {"chunk_tokens": 4.0}),
    ("chunk_vocab", ValueError, {"chunk_vocab": -1}),
    ("chunk_vocab", TypeError, {"chunk_vocab": True}),
    ("extras", ValueError, {"extras": ("is_top2",)}),
    ("extras", TypeError, {"extras": "is_top1"}),
    ("compute_dtype", TypeError, {"compute_dtype": torch.float64}),
    ("gather", TypeError, {"gather": True}),
    ("vocab_parallel", TypeError, {"vocab_parallel": object()}),
]
LOGITS = [
    ("logits", ValueError, {"logits": torch.zeros(129)}),
    ("logits", ValueError, {"logits": torch.zeros(3, 5, 0)}),
    ("logits", TypeError, {"logits": torch.zeros(3, 5, 129, dtype=torch.float64)}),
    ("logits", TypeError, {"logits": None}),
    ("targets", ValueError, {"targets": torch.zeros(3, 4, dtype=torch.int64)}),
    ("targets", TypeError, {"targets": torch.zeros(3, 5)}),
    ("targets", ValueError, {"targets": torch.zeros(3, 5, dtype=torch.int64, device="meta")}),
    ("targets", ValueError, {"targets": torch.full((3, 5), 129)}),
    ("mask", ValueError, {"mask": torch.ones(15)}),
    ("mask", TypeError, {"mask": [1]}),
    ("mask", ValueError, {"mask": torch.full((3, 5), 0.5)}),
    ("logits", TypeError, {"logits": torch.zeros(3, 5, 129).to_sparse()}),
    ("entropy", TypeError, {"entropy": 1}),
    ("transform", TypeError, {"transform": {"temperature": 1.0}}),
]
LOSSES = [
    ("hidden", ValueError, {"hidden": torch.zeros(7, 4, 1, 16)}),
    ("weight", ValueError, {"weight": torch.zeros(129, 15)}),
    ("bias", ValueError, {"bias": torch.zeros(3)}),
    ("selected_token_ids", ValueError, {"selected_token_ids": torch.zeros(4, 8, dtype=torch.int64)}),
    ("selected_token_ids", TypeError, {"selected_token_ids": torch.zeros(4, 7)}),
    ("ids", ValueError, {"selected_token_ids": torch.full((4, 7), 129)}),
    ("advantages", ValueError, {"advantages": torch.zeros(3)}),  # other columns: test_policy.py
    ("vocab_parallel must be a VocabParallel or None, got str", TypeError, {"vocab_parallel": "all of it"}),
    (
        r"selected_token_ids must be \(B, T\) = \(4, 7\)",
        ValueError,
        {"selected_token_ids": torch.zeros(4, 7, 3).long()},
    ),
]
# Message, options.
FROM_LOGITS = [
    ("ref_per_token_logps", {"ref_per_token_logps": None}),
    ("temperature", {"temperature": 0.0}),
    ("epsilon", {"epsilon": 0.2}),
    ("reduction.*reduce its result", {"reduction": TokenMean()}),
    ("no option per_token", {"per_token": False}),
    ("entropy_coef", {"entropy_coef": 0.1}),
    ("loss_type", {"loss_type": PPOClip()}),
]
# Arguments that replace good ones, type, message.
SEVERAL = [
    ({"targets": torch.zeros(15, 0).long()}, ValueError, r"targets must be \(N,\) = \(15,\).*from 1 to 1024"),
    ({"targets": torch.zeros(14, 3, dtype=torch.long)}, ValueError, r"targets must be .*got \(14, 3\)"),
    ({"targets": torch.zeros(15, 3)}, TypeError, "targets must be integers, got torch.float32"),
    ({"targets": torch.full((15, 3), 129)}, ValueError, r"token ids in \[0, 129\).*15 of them.*largest is 129"),
    ({"mask": torch.ones(15, 3)}, ValueError, r"mask must be \(N,\) = \(15,\)"),
    ({"extras": ["is_top1"]}, ValueError, "is_top1"),
    ({"targets": torch.zeros(15, 1025).long()}, ValueError, r"targets must be.*from 1 to 1024.*\(15, 1025\)"),
    ({"lse": 1}, TypeError, "lse must be a bool, got int"),
]
TOPK = [
    ({"tail": "sum"}, ValueError, "tail must be one of .*bucket.*got 'sum'"),
    ({"teacher_ids": torch.zeros(15).long()}, ValueError, r"teacher_ids must be \(N, K\) with hidden"),
    ({"teacher_ids": [[1]]}, TypeError, "teacher_ids must be a tensor, got list"),
    ({"teacher_ids": torch.full((15, 2), 129)}, ValueError, r"teacher_ids must be token ids in \[0, 129\)"),
    ({"teacher_ids": torch.zeros(15, 2)}, TypeError, "teacher_ids must be integers"),
    ({"teacher_logps": torch.zeros(15, 3)}, ValueError, r"teacher_logps must be \(15, 2\) from.*got \(15, 3\)"),
    ({"teacher_logps": torch.zeros(15, 2).long()}, TypeError, "teacher_logps must be float32, bfloat16 or float16"),
    ({"teacher_logps": torch.zeros(15, 2, requires_grad=True)}, ValueError, "teacher_logps must require no gradient"),
    ({"teacher_logps": torch.zeros(15, 2, device="meta")}, ValueError, "teacher_logps must be on cpu from teacher_ids"),
]
DIVERGENCE = [
    ({"kind": "kl"}, ValueError, "kind must be one of"),
    ({"kind": "jsd", "beta": 1.1}, ValueError, r"beta must be in \[0, 1\]"),
    ({"kind": "jsd", "beta": "half"}, TypeError, "beta must be a number"),
    ({"beta": 0.3}, ValueError, 'beta is an option of kind="jsd" alone'),
    ({"vocab_parallel": None}, TypeError, "unexpected argument 'vocab_parallel'"),
    ({"nonsense": 1}, TypeError, "unexpected argument 'nonsense'"),
    ({"teacher_transform": 1.0}, TypeError, "transform must be"),
    ({"teacher_hidden": torch.zeros(3, 6, 24)}, ValueError, "teacher_hidden must have the tokens"),
    ({"teacher_hidden": torch.zeros(3, 7, 25)}, ValueError, "teacher_weight must be"),
    ({"teacher_weight": torch.zeros(140, 24)}, ValueError, "teacher_weight must have the 131 .* teacher_weight.:V."),
    ({"teacher_weight": torch.zeros(131, 24, dtype=torch.float64)}, TypeError, "teacher_weight must be float32"),
    ({"teacher_weight": torch.zeros(131, 24).bfloat16()}, TypeError, "teacher_weight must be torch.float32"),
    ({"teacher_bias": torch.zeros(7)}, ValueError, "teacher_bias must be"),
    ({"weight": torch.zeros(131, 24)}, ValueError, "^weight must be"),
    ({"mask": torch.zeros(7)}, ValueError, "mask must be"),
    ({"teacher_hidden": torch.zeros(3, 7, 24, device="meta")}, ValueError, "teacher_hidden must have values"),
]
OUTSIDE = ({"selected_token_ids": IDS + 129}, ValueError, "selected_token_ids must be token ids")
LATE = [OUTSIDE, ({"mask": torch.full((3, 5), 0.5)}, ValueError, "mask must be 0 or 1")]
REFERENCE = [OUTSIDE, ({"selected_token_ids": IDS[:, 1:]}, ValueError, r"selected_token_ids must be \(B, T\)")]
SUPPORT = Support.from_vllm([[1]] * 15)
# Call, arguments, type, message.
TOGETHER = [
    *((function, given | {"support": SUPPORT}, TypeError, "unexpected argument 'support': call support_logprobs")
      for function, given in ((FusedLinearGRPOLoss(), HEAD | LOSS), (linear_logprobs, LINEAR))),
    (support_logprobs, LINEAR | {"support": [[1]]}, TypeError, "support must be a Support, got list"),
    (support_logprobs, LINEAR | {"support": Support.from_vllm([[1]])}, ValueError, "a row for each of the 15 tokens"),
    (topk_divergence, HEAD | {"teacher_ids": IDS, "teacher_logps": torch.zeros(3, 5)}, ValueError, "must be .B, T, K."),
    (LogitTransform, {"temperature": torch.ones(3, 5)}, TypeError, "temperature must be a number, got Tensor"),
    (FusedLinearGRPOLoss, {"temperature": torch.ones(3, 5)}, TypeError, "temperature must be a number, got Tensor"),
]  # fmt: skip

META = [
    (Support.from_padded, {"ids": torch.zeros(3, 2).long()}), (Support.from_logits, {"logits": torch.zeros(3, 9)}),
]  # fmt: skip
REQUIRED = [
    (linear_logprobs, LINEAR), (logits_logprobs, GIVEN), (grpo_loss_from_logits, POLICY),
    (topk_divergence, TOKENS | LISTS),
    (linear_divergence, TWO_HEADS | {"teacher_weight": torch.randn(131, 24)}),
    (FusedLinearGRPOLoss("grpo", beta=0.1), GRPO),
]  # fmt: skip

REFUSED = [
    *((function, given, {}, *rest) for function, given, *rest in TOGETHER),
    *((function, given, {name: wrong}, (TypeError, ValueError), rf"\b{name}\b")
      for function, given in REQUIRED for name in given for wrong in (None, [0]) if name != "beta"),
    *((function, {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in given.items()}, {},
       ValueError, rf"^{next(iter(given))} must have values, got a tensor on the meta device")
      for function, given in (*REQUIRED, *META)),
    *((linear_logprobs, LINEAR, changed, error, rf"\b{name}\b") for name, error, changed in LOGPROBS),
    *((FusedLinearGRPOLoss("grpo"), HEAD | LOSS, *row) for row in LATE),
    *((FusedLinearGRPOLoss("grpo").reference_logps, HEAD, *row) for row in REFERENCE),
    *((FusedLinearGRPOLoss("grpo", beta=0.1), GRPO, changed, error, rf"\b{name}") for name, error, changed in LOSSES),
    *((grpo_loss_from_logits, POLICY, options, ValueError, message) for message, options in FROM_LOGITS),
    *((linear_logprobs, TOKENS | {"targets": torch.zeros(15, 3).long()}, *row) for row in SEVERAL),
    *((topk_divergence, TOKENS | LISTS, *row) for row in TOPK),
    *((linear_divergence, TWO_HEADS | {"teacher_weight": torch.randn(131, 24)}, *row) for row in DIVERGENCE),
    *((logits_logprobs, GIVEN, changed, error, rf"\b{name}\b")
      for name, error, changed in LOGITS),
]  # fmt: skip


@pytest.mark.parametrize(("function", "good", "changed", "error", "message"), REFUSED)
def test_arguments_are_named_before_any_product(function, good, changed, error, message):
    with Products() as products, pytest.raises(error, match=message):
        function(**good | changed)
    assert products.flops == 0
