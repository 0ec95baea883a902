"""liger_rl's FusedLinearGRPOLoss with its defaults."""

from collections.abc import Callable

from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs, logit_transform
from benchmark.loss import BETA, EPSILON
from liger_rl import FusedLinearGRPOLoss, linear_logprobs


def available(case: Case) -> str | None:
    return None


def make(case: Case, inputs: Inputs) -> Callable[[], Tensor]:
    loss_fn = FusedLinearGRPOLoss(
        loss_type="dapo", beta=BETA, epsilon_low=EPSILON, epsilon_high=EPSILON, softcap=case.softcap
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


def logps(case: Case, inputs: Inputs) -> Tensor:
    return linear_logprobs(inputs.hidden, inputs.weight, inputs.ids, transform=logit_transform(case)).logps
