"""The columns of a batch, which are checked and aligned once, before any loss reads them."""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from liger_rl.kernels.argument_checks import check_type
from liger_rl.kernels.public_call import NamedOptions
from liger_rl.losses.options import read_number
from liger_rl.losses.segments import Segments, segment_sum

# A ratio of e^40 is 2e17. The bound keeps products of two ratios finite in float32, and 0 * ratio from being NaN.
MAX_LOG_RATIO = 40.0
# The columns of a PolicyBatch, and those that only a PreferenceBatch has.
COLUMNS = ("advantages", "old_per_token_logps", "ref_per_token_logps", "sampling_per_token_logps", "importance_ratio")
PREFERENCE_COLUMNS = ("shift", "nll_mask")
# PyTorch promotes no other dtypes with these.
NUMBERS = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
)  # fmt: skip


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp(log_ratio), at most e^40."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


@dataclass(frozen=True, kw_only=True)
class AlignedBatch:
    """The batch that losses read. Columns have the shape and dtype of the log-probabilities, and are 0 where masked."""

    advantages: Tensor
    mask: Tensor  # bool
    old_per_token_logps: Tensor | None
    ref_per_token_logps: Tensor | None
    sampling_per_token_logps: Tensor | None
    importance_ratio: Tensor | None
    importance_ratio_per_sequence: bool
    segments: Segments | None
    num_sequences: int | Tensor | None
    num_items_in_batch: int | float | Tensor | None
    # Rows r and B / 2 + r of (B, T), a chosen and a rejected sequence, are one sequence.
    pairs: bool = False
    shift: Tensor | None = None  # subtracted from a sequence's log-ratio or reward
    nll_mask: Tensor | None = None  # tokens of an objective's NLL term; None: those with an advantage above 0
    # The head's other values for each token, if an objective reads them. `lse` and `mean_logits` have a gradient.
    entropy: Tensor | None = None
    lse: Tensor | None = None
    mean_logits: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None
    is_top1: Tensor | None = None

    def clean(self, dtype: torch.dtype, mask: Tensor | None = None) -> "AlignedBatch":
        """The batch with a bool mask, and columns that are detached, in `dtype`, and 0 where masked.

        `mask` replaces the batch's.
        """
        mask = (self.mask if mask is None else mask).bool()
        masked, columns = ~mask, dict(vars(self))
        for name in (*COLUMNS, *PREFERENCE_COLUMNS):
            if columns[name] is not None:
                columns[name] = columns[name].detach().to(dtype).masked_fill(masked, 0.0)
        columns["mask"] = mask
        return AlignedBatch(**columns)

    def take(self, positions: Tensor) -> "AlignedBatch":
        """The rows (b, w) at flat positions of (B, T), pairs in order, with the divisors of the whole batch."""
        shape, columns = self.mask.shape, dict(vars(self))
        for name in ("mask", *COLUMNS, *PREFERENCE_COLUMNS):
            if columns[name] is not None:
                columns[name] = columns[name].expand(shape).reshape(-1)[positions]
        if self.segments is not None:
            columns["segments"] = replace(self.segments, index=self.segments.index[positions])
        return AlignedBatch(**columns)

    def log_ratio(self, logps: Tensor) -> Tensor:
        """logp - old, differentiable. If there are no old log-probabilities, old is logp without gradient."""
        return logps - (logps.detach() if self.old_per_token_logps is None else self.old_per_token_logps)

    def ratio(self, logps: Tensor) -> Tensor:
        """exp(logp - old), at most e^40, differentiable."""
        return bounded_exp(self.log_ratio(logps))

    @property
    def nll_tokens(self) -> Tensor:
        """Bool, the tokens of an objective's NLL term."""
        return self.advantages > 0 if self.nll_mask is None else self.nll_mask != 0

    def check_sequences(self) -> None:
        """Raises ValueError for packed tokens without segments."""
        if self.mask.dim() == 1 and self.segments is None:
            raise ValueError(
                "segments must say which sequence each packed token belongs to, because something here is per "
                "sequence; got None (or give (B, T) tensors, one sequence a row)"
            )

    def sequence_sum(self, values: Tensor) -> Tensor:
        """The sum over each token's sequence or pair: (B, T) -> (B, 1), (N,) -> (N,). Masked values must be 0."""
        if values.dim() == 2:
            sums = values.sum(-1, keepdim=True)
            return sums.unflatten(0, (2, -1)).sum(0).repeat(2, 1) if self.pairs else sums
        self.check_sequences()
        assert self.segments is not None
        return segment_sum(values, self.segments)

    def sequence_length(self) -> Tensor:
        """Tokens that count in each token's sequence, at least 1."""
        return self.sequence_sum(self.mask.to(self.advantages.dtype)).clamp(min=1)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """The mean over the tokens that count in each token's sequence. Masked values must be 0."""
        return self.sequence_sum(values) / self.sequence_length()


@dataclass(frozen=True, kw_only=True)
class PolicyBatch(NamedOptions):
    """The columns of a batch: one entry per token, (B, T), or packed (N,).

    Columns are dense tensors, and get no gradient. Log-probabilities are in nats.

    Attributes:
        advantages: (B,) one per sequence, or (B, T) / (N,) one per token.
        mask: (B, T) or (N,), bool or 0/1, the tokens that count; None counts all. `ppo_loss_fn` refuses
            other values in CPU memory. It does not read a mask on another device, where any value but 0 counts.
        old_per_token_logps: under the policy that sampled; None means the current ones, detached (ratio 1).
        ref_per_token_logps: under the reference policy, for the KL penalty.
        sampling_per_token_logps: as the sampler (an inference engine) reported them, NaN where it has none. For
            `SamplerCorrection` and `OffPolicySequenceMask`.
        importance_ratio: trainer over sampler probability, (B, T) / (N,) per token, or (B,) / (B, 1) per sequence. It
            multiplies the policy term, without gradient.
        segments: which sequence each token of a packed batch belongs to, for losses per sequence.
        num_sequences: divisor of means over sequences; None is B, or segments.count.
        num_items_in_batch: tokens of the whole optimiser step (all micro-batches, all ranks), a divisor.

    A divisor is a finite number of at least 1, or a 0-dim real tensor, whose value is not read; under 1 it counts as 1.
    """

    advantages: Tensor
    mask: Tensor | None = None
    old_per_token_logps: Tensor | None = None
    ref_per_token_logps: Tensor | None = None
    sampling_per_token_logps: Tensor | None = None
    importance_ratio: Tensor | None = None
    segments: Segments | None = None
    num_sequences: int | Tensor | None = None
    num_items_in_batch: int | float | Tensor | None = None

    ALIGNED: ClassVar[tuple[str, ...]] = ("mask", *COLUMNS)

    def align(self, shape: torch.Size, device: torch.device) -> AlignedBatch:
        """The columns in `shape`, (B, T) or (N,), values unchanged, and a mask of True if there is none.

        Raises TypeError or ValueError for a column or a divisor that does not fit.
        """
        if len(shape) not in (1, 2):
            raise ValueError(f"per_token_logps must be (B, T) or (N,), got {tuple(shape)}")
        columns: dict[str, Any] = dict.fromkeys(COLUMNS)
        for name in self.ALIGNED:
            column = getattr(self, name)
            if column is not None or name == "advantages":
                columns[name] = _align_column(name, column, shape, device)
        if self.mask is None:
            columns["mask"] = torch.ones(shape, dtype=torch.bool, device=device)
        if self.segments is not None:
            _check_segments(self.segments, shape, device)
        num_sequences, num_items_in_batch = self.num_sequences, self.num_items_in_batch
        if num_sequences is not None:
            num_sequences = _check_divisor("num_sequences", num_sequences, device)
        elif len(shape) == 2:
            num_sequences = max(shape[0], 1)
        elif self.segments is not None:
            num_sequences = max(self.segments.count, 1)
        if num_items_in_batch is not None:
            num_items_in_batch = _check_divisor("num_items_in_batch", num_items_in_batch, device)
        ratio = self.importance_ratio
        return AlignedBatch(
            **columns,
            importance_ratio_per_sequence=ratio is not None and len(shape) == 2 and ratio.shape != shape,
            segments=self.segments,
            num_sequences=num_sequences,
            num_items_in_batch=num_items_in_batch,
            pairs=getattr(self, "pairs", False),
        )


@dataclass(frozen=True, kw_only=True)
class PreferenceBatch(PolicyBatch):
    """A batch of judged sequences, whose advantages are 1, -1 or 0: see `liger_rl.losses.preference`."""

    pairs: bool = False
    shift: Tensor | None = None  # (B,), (B, T) or (N,)
    nll_mask: Tensor | None = None  # (B, T) or (N,)

    ALIGNED: ClassVar[tuple[str, ...]] = (*PolicyBatch.ALIGNED, *PREFERENCE_COLUMNS)


def _check_segments(segments: Any, shape: torch.Size, device: torch.device) -> None:
    if len(shape) != 1:
        raise ValueError(f"segments belong to packed (N,) tokens; the log-probabilities are {tuple(shape)}")
    check_type("segments", segments, Segments, "Segments")
    index = segments.index
    if index.shape != shape or index.device != device:
        raise ValueError(
            f"segments.index must be (N,) = {tuple(shape)} on {device} as the log-probabilities, "
            f"got {tuple(index.shape)} on {index.device}"
        )


def _align_column(name: str, column: Tensor, shape: torch.Size, device: torch.device) -> Tensor:
    # This is asked of every column of every call, so `check_column` runs only if it may have something to say.
    if type(column) is not Tensor or column.layout != torch.strided or column.is_nested or column.dtype not in NUMBERS:
        check_column(name, column)
    if column.device != device:
        raise ValueError(f"{name} must be on {device} as the log-probabilities, got {column.device}")
    if column.shape == shape:
        return column
    expected = f"{'(B, T)' if len(shape) == 2 else '(N,)'} = {tuple(shape)}"
    if name in ("advantages", "importance_ratio", "shift") and len(shape) == 2:
        if column.shape in ((shape[0],), (shape[0], 1)):
            return column.reshape(shape[0], 1).expand(shape)
        expected += f" or (B,) = ({shape[0]},)"
    raise ValueError(f"{name} must be {expected} as the log-probabilities, got {tuple(column.shape)}")


def check_column(name: str, column: Any) -> Tensor:
    """Returns the column. Raises TypeError unless it is a dense tensor of NUMBERS, or of a mask bool."""
    check_type(name, column, Tensor, "a real tensor")
    if column.layout != torch.strided or column.is_nested:
        raise TypeError(f"{name} must be a dense tensor, got a nested tensor or one of {column.layout}")
    if column.dtype not in NUMBERS and not (column.dtype == torch.bool and name.endswith("mask")):
        raise TypeError(f"{name} must be a real tensor, got a tensor of {column.dtype}")
    return column


def check_mask_values(mask: Tensor | None) -> None:
    """Raises ValueError if a mask in CPU memory has a value other than 0 and 1."""
    if mask is None or mask.device.type != "cpu" or mask.dtype == torch.bool:
        return
    wrong = mask[(mask != 0) & (mask != 1)]
    if wrong.numel():
        raise ValueError(f"mask must be 0 or 1 for every token, got {wrong[0].item()} and {wrong.numel() - 1} others")


def _check_divisor(name: str, value: Any, device: torch.device) -> Any:
    """Returns the divisor, without gradient. Raises TypeError or ValueError unless it is a number of at least 1."""
    if not isinstance(value, Tensor):
        if not 1 <= read_number(name, value) < math.inf:
            raise ValueError(f"{name} must be at least 1 and finite, got {value}")
        return value
    check_column(name, value)
    if value.numel() != 1:
        raise ValueError(f"{name} must be a number or a 0-dim tensor, got {tuple(value.shape)}")
    if value.dtype == torch.bool:
        raise TypeError(f"{name} must be a number or a 0-dim real tensor, got a tensor of {value.dtype}")
    if value.device not in (device, torch.device("cpu")):
        raise ValueError(f"{name} must be on {device} as the log-probabilities, or on the CPU, got {value.device}")
    return value.detach().reshape(())


def make_batch(function: str, advantages: Tensor | PolicyBatch, **columns: Any) -> PolicyBatch:
    """The `PolicyBatch` of a function's arguments, which are the batch itself, or advantages and other columns."""
    if not isinstance(advantages, PolicyBatch):
        return PolicyBatch(advantages=advantages, **columns)
    separate = [name for name, column in columns.items() if column is not None]
    if separate:
        raise TypeError(f"{', '.join(separate)} must be in the PolicyBatch that {function} got, not beside it")
    return advantages
