"""liger-kernel's fused linear GRPO losses on this package's head and losses: docs/liger.md."""

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from liger_rl.distributed import has_ranks
from liger_rl.fused_linear.grpo import FusedLinearGRPOLoss
from liger_rl.head.checks import check_dense, check_optional_count
from liger_rl.integrations.patching import Framework, Patch
from liger_rl.kernels.public_call import outside_of_graphs
from liger_rl.losses.objectives import SAPO, VESPO
from liger_rl.losses.options import warn_caller
from liger_rl.losses.presets import PRESETS
from liger_rl.losses.reductions import GlobalTokenMean
from liger_rl.models.tensors import is_zero_3, localize

__all__ = ["LigerFusedLinearGRPOLoss", "is_patched", "patch_liger", "patched_liger", "unpatch_liger"]

TensorT = TypeVar("TensorT", Tensor, Tensor | None)

LOSS_TYPES = ("grpo", "bnpo", "dapo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")
# Options that some losses do not read -> the value that is accepted there.
SWITCHES = {"delta": None, "importance_sampling_level": "token"}


@dataclass(eq=False, repr=False)
class LigerFusedLinearGRPOLoss(nn.Module):
    """Drop-in for `liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss` 0.8.5: `(loss, metrics)` from hidden states.

    The numbers are Liger's, except where Liger's are wrong: in the padding of luspo, with (B, T) advantages, and with
    -inf at masked tokens. docs/liger.md lists all differences, and the options without effect.

    Options are Liger's. They are attributes of the same names, and may be changed between calls.
    """

    beta: float = 0.04
    compiled: bool = True  # no effect
    use_ref_model: bool = True  # must be True where beta > 0
    chunk_size: int = 1  # no effect
    epsilon_low: float = 0.2
    epsilon_high: float = 0.2  # for "cispo" the bound itself, elsewhere its distance from 1
    loss_type: str = "dapo"
    max_completion_length: int | None = None  # "dr_grpo" needs it
    importance_sampling_level: str = "token"  # or "sequence" for the losses that clip with PPO's formula
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    temperature: float = 1.0
    delta: float | None = None  # for the losses that clip with PPO's formula
    use_bias_correction_kl: bool = False
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0

    def __post_init__(self) -> None:
        super().__init__()
        self._built: tuple[tuple[Any, ...], FusedLinearGRPOLoss] | None = None  # the options, and their loss
        self._find_loss()  # checks the options

    @outside_of_graphs
    def forward(
        self,
        _input: Tensor,  # (B, T, H)
        lin_weight: Tensor,  # (V, H), in _input's dtype or float32; any under autocast
        selected_token_ids: Tensor,  # (B, T), the sampled tokens; _input[:, t] predicts column t
        attention_mask: Tensor,  # (B, T) bool or 0/1, the completion tokens that count
        advantages: Tensor,  # (B,) or (B, T)
        bias: Tensor | None = None,  # (V,), in lin_weight's dtype
        ref_per_token_logps: Tensor | None = None,  # (B, T)
        old_per_token_logps: Tensor | None = None,  # (B, T); None: the ratio is 1
        ref_input: Tensor | None = None,  # (B, T, H)
        ref_weight: Tensor | None = None,  # (V, H)
        ref_bias: Tensor | None = None,  # (V,)
        vllm_is_ratio: Tensor | None = None,  # (B, T), (B, 1) or (B,), trainer over sampler probability
        num_items_in_batch: int | float | Tensor | None = None,  # tokens of the whole optimiser step, over all ranks
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Loss and metrics of one batch.

        The reference is ref_per_token_logps, or else the reference model's head: ref_input, ref_weight and ref_bias.
        Without beta no reference has an effect.

        "dapo", "cispo" and "vespo" divide by num_items_in_batch / ranks, where ranks is the size of the
        default group of torch.distributed.
        If num_items_in_batch is None, the batch's count is summed over the ranks: one all-reduce in each call.

        Returns:
            loss: () in float32.
            metrics: 0-dim float32 tensors: the mean KL in nats if beta > 0, and last the share of clipped tokens.
        """
        fused = self._find_loss()
        local = localize(_input, lin_weight, bias=bias)
        _input = local.hidden
        if check_dense("_input", _input).dim() != 3:
            raise ValueError(f"_input must be (B, T, H), got {tuple(_input.shape)}")
        rows, columns = _input.shape[:2]
        _check_shape("selected_token_ids", selected_token_ids, _input, (rows, columns))
        _check_shape("attention_mask", attention_mask, _input, (rows, columns))
        if vllm_is_ratio is not None:
            _check_shape("vllm_is_ratio", vllm_is_ratio, _input, (rows, columns), (rows, 1), (rows,))
        check_dense("lin_weight", local.weight, _input, "_input")
        counted = (attention_mask != 0) & (selected_token_ids >= 0)
        global_mean = isinstance(fused.terms.reduction, GlobalTokenMean)
        num_items_in_batch = _compute_divisor(num_items_in_batch, counted, global_mean=global_mean)
        if vllm_is_ratio is not None and isinstance(fused.terms.objective, VESPO):
            vllm_is_ratio = _spread_ratios(vllm_is_ratio, counted)
        if self.use_ref_model and ref_per_token_logps is not None and ref_input is not None:
            warn_caller("Both ref_per_token_logps and ref_input are provided. Using ref_per_token_logps.")
        if self.beta == 0.0:
            ref_per_token_logps = None
        elif ref_per_token_logps is None:
            if ref_input is None or ref_weight is None:
                raise ValueError(
                    f"ref_per_token_logps, or ref_input and ref_weight, must be given with beta = {self.beta}"
                )
            reference = localize(ref_input, ref_weight, bias=ref_bias)
            check_dense("ref_input", reference.hidden, _input, "_input")
            check_dense("ref_weight", reference.weight, _input, "_input")
            ref_input, ref_weight, ref_bias = _prepare_head(reference.hidden, reference.weight, reference.bias)
            ref_per_token_logps = fused.reference_logps(
                ref_input, ref_weight, selected_token_ids, attention_mask, bias=ref_bias,
                vocab_parallel=reference.vocab_parallel,
            )  # fmt: skip
        hidden, weight, bias = _prepare_head(_input, local.weight, local.bias)
        loss, metrics = fused(
            hidden,
            weight,
            selected_token_ids,
            advantages,
            attention_mask,
            bias=bias,
            vocab_parallel=local.vocab_parallel,
            old_per_token_logps=old_per_token_logps,
            ref_per_token_logps=ref_per_token_logps,
            importance_ratio=vllm_is_ratio,
            num_items_in_batch=num_items_in_batch,
        )
        values = [metrics["kl_ref"].value] if "kl_ref" in metrics else []
        clipped = metrics["clip_ratio"].value if "clip_ratio" in metrics else loss.new_zeros(())
        return loss, (*values, clipped)

    def _find_loss(self) -> FusedLinearGRPOLoss:
        """The fused loss of the current options. It is built again only if one of them has changed."""
        ranks = _count_ranks()
        options = (ranks, *(getattr(self, field.name) for field in fields(self)))
        if self._built is None or self._built[0] != options:
            self._built = options, self._build_loss(ranks)
        return self._built[1]

    def _build_loss(self, ranks: int) -> FusedLinearGRPOLoss:
        if self.loss_type not in LOSS_TYPES:
            raise ValueError(
                f"loss_type must be one of {list(LOSS_TYPES)}, as in liger-kernel, got {self.loss_type!r}; "
                "liger_rl.FusedLinearGRPOLoss has more"
            )
        if self.beta != 0.0 and not self.use_ref_model:
            raise ValueError(f"use_ref_model must be True with beta = {self.beta}, or beta 0.0: a KL needs a reference")
        check_optional_count("chunk_size", self.chunk_size)
        SAPO(sapo_temperature_pos=self.sapo_temperature_pos, sapo_temperature_neg=self.sapo_temperature_neg)
        preset = PRESETS[self.loss_type]
        known = {field.name for term in (preset.objective, preset.reduction) for field in fields(term)}
        for name, off in SWITCHES.items():
            if name not in known and getattr(self, name) != off:
                raise ValueError(f"{name} must be {off!r} with loss_type {self.loss_type!r}, got {getattr(self, name)}")
        options = {name: value for name, value in vars(self).items() if name in known}
        if "world_size" in known:
            options["world_size"] = ranks
        return FusedLinearGRPOLoss(
            self.loss_type,
            beta=self.beta,
            importance_weighted=self.use_bias_correction_kl,
            temperature=self.temperature,
            **options,
        )


def _count_ranks() -> int:
    return dist.get_world_size() if has_ranks() else 1


def _compute_divisor(
    num_items_in_batch: int | float | Tensor | None, counted: Tensor, *, global_mean: bool
) -> int | float | Tensor | None:
    """Tokens of all ranks, at least 1 for each rank as in Liger; None if the loss does not divide by them."""
    count, ranks = num_items_in_batch, _count_ranks()
    if count is None and global_mean:
        count = counted.sum()
        if ranks > 1:
            dist.all_reduce(count)
    if isinstance(count, Tensor):
        return count.clamp(min=ranks)
    return ranks if isinstance(count, (int, float)) and 0 <= count < ranks else count


def _spread_ratios(ratio: Tensor, counted: Tensor) -> Tensor:
    """(B, T) ratios. A ratio for a sequence goes to its first counted token; the other tokens get 1."""
    if ratio.shape == counted.shape:
        return ratio
    first = counted & (counted.cumsum(-1) == 1)
    return torch.where(first, ratio.reshape(-1, 1), 1.0)


def _check_shape(name: str, value: Any, hidden: Tensor, *shapes: tuple[int, ...]) -> None:
    if check_dense(name, value, hidden, "_input").shape not in shapes:
        raise ValueError(f"{name} must be {' or '.join(map(str, shapes))} from _input, got {tuple(value.shape)}")


def _prepare_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """hidden, weight and bias: hidden in float32 if the weight is, and parameters that ZeRO-3 will empty as copies."""
    autocast = torch.is_autocast_enabled(hidden.device.type)
    if weight.dtype == torch.float32 and hidden.dtype in (torch.bfloat16, torch.float16) and not autocast:
        hidden = hidden.float()
    return hidden, _copy_under_zero_3(weight), _copy_under_zero_3(bias)


def _copy_under_zero_3(parameter: TensorT) -> TensorT:
    """A copy if ZeRO-3 empties the parameter after the forward."""
    return parameter.clone() if parameter is not None and is_zero_3(parameter) else parameter


LIGER = Framework(
    "liger-kernel",
    (0, 8),
    (0, 9),
    Patch(
        "liger_kernel.chunked_loss:LigerFusedLinearGRPOLoss",
        LigerFusedLinearGRPOLoss,
        None,
        modules=("liger_kernel", "trl", "swift"),
    ),
    gain="float32 logits, without the defects of the chunked loss in padding, masks and ratios",
    distributions=("liger-kernel", "liger-kernel-nightly"),
)


def patch_liger() -> None:
    """Put `LigerFusedLinearGRPOLoss` of this module in place of liger-kernel's, in liger-kernel, TRL and ms-swift.

    Objects that exist keep their class. liger-kernel's functional form, `liger_fused_linear_grpo`, is not replaced.
    """
    LIGER.patch()


unpatch_liger = LIGER.unpatch
patched_liger = LIGER.within
is_patched = LIGER.is_patched
