"""liger_rl in two passes and in one pass."""

from collections.abc import Callable

from torch import Tensor

from benchmark.cases import STEP, Case
from benchmark.inputs import Inputs
from benchmark.loss import EPSILON
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values
from liger_rl import FusedLinearGRPOLoss, linear_logprobs
from liger_rl.head import LogitTransform


class Head(Base):
    entropy = True

    def __init__(self, *, passes: str = "two", chunk_tokens: int | None = None) -> None:
        self.passes, self.chunk_tokens = passes, chunk_tokens

    def reason(self, case: Case, device: str) -> str | None:
        if self.passes != "two" and case.task != STEP:
            return "passes differ in their gradients"
        return super().reason(case, device)

    def values(self, case: Case, inputs: Inputs, *, entropy: bool = False) -> Values:
        found = linear_logprobs(
            inputs.hidden,
            inputs.weight,
            inputs.ids,
            mask=inputs.mask,
            transform=LogitTransform(softcap=case.softcap),
            entropy=entropy,
        )
        return Values(found.logps, found.entropy)

    def make(self, case: Case, inputs: Inputs) -> Callable[[], Tensor]:
        loss_fn = FusedLinearGRPOLoss(
            loss_type="dapo",
            beta=case.beta,
            epsilon_low=EPSILON,
            epsilon_high=EPSILON,
            softcap=case.softcap,
            passes=self.passes,
            chunk_tokens=self.chunk_tokens,
        )
        return lambda: (
            loss_fn(
                inputs.hidden,
                inputs.weight,
                inputs.ids,
                inputs.advantages,
                inputs.mask,
                old_per_token_logps=inputs.old_logps,
                ref_per_token_logps=inputs.ref_logps,
            ).loss
        )
