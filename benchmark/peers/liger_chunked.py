"""liger-kernel's LigerFusedLinearGRPOLoss: chunked over sequences, gradients made in the forward."""

from collections.abc import Callable
from importlib import import_module

from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.loss import EPSILON
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import import_reason


class Head(Base):
    softcap = False
    per_token = False  # they stay inside its loss

    def missing(self) -> str | None:
        return import_reason("liger-kernel", lambda: import_module("liger_kernel.chunked_loss"))

    def make(self, case: Case, inputs: Inputs) -> Callable[[], Tensor]:
        from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

        loss_fn = LigerFusedLinearGRPOLoss(
            beta=case.beta,
            epsilon_low=EPSILON,
            epsilon_high=EPSILON,
            loss_type="dapo",
            use_ref_model=case.beta != 0.0,
            # It compiles the loss on (1, T) values alone. On CPU that gains nothing, and the compiler's own memory
            # would be counted as the loss's.
            compiled=inputs.hidden.is_cuda,
        )
        mask = inputs.mask.long()

        def loss() -> Tensor:
            value, _metrics = loss_fn(
                inputs.hidden,
                inputs.weight,
                inputs.ids,
                mask,
                inputs.advantages,
                ref_per_token_logps=inputs.ref_logps,
                old_per_token_logps=inputs.old_logps,
            )
            return value

        return loss
