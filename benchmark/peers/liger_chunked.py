"""liger-kernel's LigerFusedLinearGRPOLoss: chunked over sequences, gradients made in the forward."""

from collections.abc import Callable

from torch import Tensor

from benchmark.cases import Case
from benchmark.inputs import Inputs
from benchmark.loss import BETA, EPSILON


def available(case: Case) -> str | None:
    try:
        import liger_kernel.chunked_loss  # noqa: F401
    except ImportError as error:
        return f"liger-kernel cannot be imported: {error}"
    if case.softcap is not None:
        return "has no softcap"
    return None


def make(case: Case, inputs: Inputs) -> Callable[[], Tensor]:
    from liger_kernel.chunked_loss import LigerFusedLinearGRPOLoss

    loss_fn = LigerFusedLinearGRPOLoss(
        beta=BETA,
        epsilon_low=EPSILON,
        epsilon_high=EPSILON,
        loss_type="dapo",
        use_ref_model=True,
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


def logps(case: Case, inputs: Inputs) -> None:
    """Per-token values stay inside its loss."""
    return None
