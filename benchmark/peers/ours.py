"""liger_rl."""

from collections.abc import Callable

from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.loss import EPSILON
from benchmark.peers.peer import Head as Base
from benchmark.peers.peer import Values
from liger_rl import FusedLinearGRPOLoss, linear_logprobs
from liger_rl.head import LogitTransform


class Head(Base):
    entropy = True

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
