"""liger_rl in two passes, with a tolerance, in one pass."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from benchmark.cases import STEP, Case
from benchmark.inputs import Inputs
from benchmark.loss import EPSILON
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values
from liger_rl import FusedLinearGRPOLoss, LogitTransform, linear_logprobs
from liger_rl.head.sparse import lists
from liger_rl.head.sparse.lists import wait_for_counts
from liger_rl.head.sparse.parts import PartCounts


class Head(Base):
    entropy = True

    def __init__(
        self,
        *,
        grad_tolerance: float = 0.0,
        passes: str = "two",
        chunk_tokens: int | None = None,
    ) -> None:
        self.grad_tolerance, self.passes, self.chunk_tokens = grad_tolerance, passes, chunk_tokens
        self._share: float | None = None

    def reason(self, case: Case, device: str) -> str | None:
        if self.grad_tolerance and case.task != STEP:
            return "a tolerance is of gradients"
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
        self._share = None
        loss_fn = FusedLinearGRPOLoss(
            loss_type="dapo",
            beta=case.beta,
            epsilon_low=EPSILON,
            epsilon_high=EPSILON,
            softcap=case.softcap,
            grad_tolerance=self.grad_tolerance,
            passes=self.passes,
            chunk_tokens=self.chunk_tokens,
        )
        if self.grad_tolerance:
            lists.wait_for_counts = self._recorded
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

    def _recorded(self, *arguments: Any) -> PartCounts:
        """`wait_for_counts`, which also notes the share of selected parts. The host knows it anyway."""
        counts = wait_for_counts(*arguments)
        self._share = counts.share
        return counts

    def kept_share(self) -> float | None:
        return self._share
