"""Full logits, then liger-kernel's Triton GRPO loss on them, which writes the gradient over the logits."""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.loss import EPSILON
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values, import_reason, softcapped


class Head(Base):
    devices = ("cuda",)

    def missing(self) -> str | None:
        return import_reason("liger-kernel", lambda: import_module("liger_kernel.transformers.grpo_loss"))

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        """Without a gradient: its log-probabilities by themselves have none."""
        from liger_kernel.ops.grpo_loss import fused_selective_log_softmax

        with torch.no_grad():
            return Values(fused_selective_log_softmax(_logits(case, inputs), inputs.ids, 1.0, inputs.mask.long()))

    def make(self, case: Case, inputs: Inputs) -> Callable[[], Tensor]:
        from liger_kernel.transformers.grpo_loss import triton_grpo_loss

        mask = inputs.mask.long()

        def loss() -> Tensor:
            value, _metrics = triton_grpo_loss(
                _logits(case, inputs),
                inputs.old_logps,
                inputs.ref_logps,
                inputs.ids,
                inputs.advantages,
                mask,
                temperature=1.0,
                beta=case.beta,
                eps_low=EPSILON,
                eps_high=EPSILON,
                inplace=True,
                loss_type="dapo",
                reduce=True,
            )
            return value

        return loss


def _logits(case: Case, inputs: Inputs) -> Tensor:
    """(B, T + 1, V): the last position, which predicts nothing, is one that a model's output has anyway."""
    hidden = torch.cat([inputs.hidden, inputs.hidden[:, -1:].detach()], dim=1)
    return softcapped(hidden @ inputs.weight.T, case)
