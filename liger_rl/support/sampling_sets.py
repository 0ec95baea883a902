"""The support of each token: the ids that its sampler could have drawn."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from liger_rl.head.checks import check_count, check_dense, check_flag, check_floating, check_optional_count
from liger_rl.kernels.argument_checks import check_number, check_type
from liger_rl.support.segment_sums import BAD_IDS, BAD_STARTS


@dataclass(frozen=True, eq=False)
class Support:
    """Token ids in compressed rows: token t could have been drawn from token_ids[offsets[t] : offsets[t + 1]].

    Log-probabilities and entropies are over a token's ids alone. A (B, T) call has N = B T rows, in flattened order. An
    empty row means the whole vocabulary. Ids may be in any order. A repeated id counts once, unless `distinct`. A row
    that does not list its target gets it, and `SupportLogProbs.missing_target` marks the token. The row of a token that
    does not count is validated, and not used.

    Attributes:
        token_ids: (P,) int32 or int64, ids of the whole vocabulary.
        offsets: (N + 1,) int32 or int64, from 0 to P, never decreasing.
        distinct: True promises that no row repeats an id, so that the ids need not be sorted. If the promise is broken,
            a repeated id counts twice.

    Raises:
        TypeError, ValueError: wrong dtypes, shapes or devices. On CPU also invalid offsets and negative ids. On other
            devices invalid values raise in the call, so that the host need not wait twice.
    """

    token_ids: Tensor
    offsets: Tensor
    distinct: bool = False

    def __post_init__(self) -> None:
        check_flag("distinct", self.distinct)
        for name in ("token_ids", "offsets"):
            tensor = check_dense(name, getattr(self, name))
            if tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
            if tensor.dim() != 1:
                expected = "(P,)" if name == "token_ids" else "(N + 1,)"
                raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")
        check_dense("offsets", self.offsets, self.token_ids, "token_ids")
        if self.offsets.numel() == 0:
            raise ValueError("offsets must be (N + 1,) with at least the 0 that it starts with, got (0,)")
        if self.offsets.device.type == "cpu":
            self._raise_for_values(None)

    @classmethod
    def from_padded(cls, ids: Tensor) -> "Support":
        """A support from (N, K) or (B, T, K) int32 or int64 ids, where -1 is no id. Waits for the device."""
        if check_dense("ids", ids).dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids must be int32 or int64, got {ids.dtype}")
        if ids.dim() not in (2, 3):
            raise ValueError(f"ids must be (N, K) or (B, T, K), got {tuple(ids.shape)}")
        rows = ids.reshape(ids.shape[:-1].numel(), ids.shape[-1])
        return cls(rows[rows != -1], _make_offsets((rows != -1).sum(1)))

    @classmethod
    def from_vllm(
        cls,
        mask: Any,
        *,
        length: int | None = None,
        device: torch.device | str | int | None = None,
    ) -> "Support":
        """A support from the masks of an inference engine. It is `distinct`, unless it is made of rows of ids.

        Args:
            mask: an object with `token_ids` and `offsets` (lists, arrays or tensors), such as vLLM's `SamplingMask`; or
                a list of such objects, one per sequence; or a list of rows, one per token, each a list of ids or None.
            length: T of a (B, T) call, not for rows of ids. Each sequence is padded with empty rows.
            device: device of the support.
        """
        masks = [mask] if _is_mask(mask) else mask
        if not isinstance(masks, (list, tuple)):
            raise TypeError(
                "mask must have token_ids and offsets, or be a list of such objects or of rows of ids, "
                f"got {type(mask).__name__}"
            )
        if not masks or not all(map(_is_mask, masks)):
            if length is not None:
                raise ValueError(f"length must be None for rows of ids, got {length}")
            rows = [[] if row is None else list(row) for row in masks]
            sizes = torch.tensor([len(row) for row in rows], dtype=torch.int64, device=device)
            ids = _to_integers("mask", [number for row in rows for number in row], device)
            return cls(ids, _make_offsets(sizes))
        supports, row_lengths = [], []
        for index, sequence in enumerate(masks):
            token_ids, offsets = (
                _to_integers(name, getattr(sequence, name), device) for name in ("token_ids", "offsets")
            )
            # A sequence's object may be a Support, which has `distinct`.
            support = cls(token_ids, offsets, distinct=getattr(sequence, "distinct", True))
            if length is not None and support.tokens > length:
                raise ValueError(f"length must be at least {support.tokens} from mask[{index}], got {length}")
            padding = 0 if length is None else length - support.tokens
            row_lengths.append(torch.nn.functional.pad(support.offsets.long().diff(), (0, padding)))
            supports.append(support)
        distinct = all(support.distinct for support in supports)
        token_ids = torch.cat([support.token_ids for support in supports])
        return cls(token_ids, _make_offsets(torch.cat(row_lengths)), distinct=distinct)

    @classmethod
    @torch.no_grad()
    def from_logits(
        cls,
        logits: Tensor,
        *,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        temperature: float = 1.0,
    ) -> "Support":
        """A support from (N, V) or (B, T, V) logits, by the rules of Hugging Face's sampling. Waits for the device.

        All V ids of each token are sorted. The most likely id always stays. Entries that are not finite are left out.

        Args:
            logits: float32, bfloat16 or float16, divided by the temperature first.
            top_k: at least 1; keeps the `top_k` largest logits, and logits equal to the smallest of them.
            top_p: in (0, 1]; of these, keeps the smallest set of most likely ids with at least this share of the mass.
            min_p: in [0, 1]; of these, keeps ids with at least `min_p` times the largest probability. vLLM does so
                before top_p, so with both its sets may differ.
            temperature: above 0.
        """
        check_floating("logits", logits)
        if logits.dim() not in (2, 3) or logits.shape[-1] == 0:
            raise ValueError(f"logits must be (N, V) or (B, T, V) with V of at least 1, got {tuple(logits.shape)}")
        check_optional_count("top_k", top_k)
        limits = ("temperature", temperature, math.inf), ("top_p", top_p, 1.0), ("min_p", min_p or None, 1.0)
        for name, value, most in limits:
            if value is not None:
                check_number(name, value)
                if not 0.0 < value <= most:
                    raise ValueError(f"{name} must be above 0{' and at most 1' * (most == 1.0)}, got {value}")
        z = logits.reshape(-1, logits.shape[-1]).float() / temperature
        ordered, ids = z.sort(dim=-1, descending=True, stable=True)
        selected = torch.isfinite(ordered)
        if top_k is not None:
            selected &= ordered >= ordered[:, min(top_k, z.shape[1]) - 1 :][:, :1]
        if top_p is not None and top_p < 1.0:
            p = ordered.masked_fill(~selected, -torch.inf).softmax(-1)
            selected &= p.cumsum(-1) - p < top_p  # the more likely ids together have less than top_p
        if min_p is not None:
            selected &= (ordered - ordered[:, :1]).exp() >= min_p
        selected[:, 0] = True
        return cls(ids[selected], _make_offsets(selected.sum(1)), distinct=True)

    @property
    def tokens(self) -> int:
        """N, the number of rows."""
        return self.offsets.numel() - 1

    def to(self, device: torch.device | str | int) -> "Support":
        """A support on `device`."""
        return replace(self, token_ids=self.token_ids.to(device), offsets=self.offsets.to(device))

    def take(self, sequences: slice | Tensor, *, batch: int) -> "Support":
        """The rows of some sequences of a (B, T) call, such as the sequences of a micro-batch.

        On another device than CPU the host waits once, for the number of ids. So keep the support of many micro-batches
        on CPU, and move each part to the device by `to`.

        Args:
            sequences: a slice of the B sequences, an index (b,) in any order, or a mask (B,) bool.
            batch: B. All sequences have T rows.
        """
        check_count("batch", batch, least=1)
        if self.tokens % batch != 0:
            raise ValueError(f"batch must divide the {self.tokens} rows of the support, got {batch}")
        check_type("sequences", sequences, (slice, Tensor), "a slice or a tensor")
        device = self.offsets.device
        sequences = sequences.to(device) if isinstance(sequences, Tensor) else sequences
        rows = torch.arange(self.tokens, device=device).view(batch, -1)[sequences].reshape(-1)
        offsets = _make_offsets(self.offsets.diff()[rows])
        shifts = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], offsets.diff())
        positions = torch.arange(shifts.numel(), device=device) + shifts
        return replace(self, token_ids=self.token_ids[positions], offsets=offsets)

    def place_at(self, mask: Tensor) -> "Support":
        """A support with these rows at the True positions of `mask`, in order, and empty rows elsewhere.

        Use it if the rows cover sampled tokens only, and the call also has prompts and padding. On a GPU nothing waits.

        Args:
            mask: (B, T) or (N,) bool, True at as many tokens as the support has rows. Another number raises here on
                CPU. On other devices the call that uses the support mostly raises.
        """
        if check_dense("mask", mask, self.token_ids, "token_ids").dtype != torch.bool:
            raise TypeError(f"mask must be bool, got {mask.dtype}")
        flat, row_lengths = mask.reshape(-1), self.offsets.diff()
        if flat.device.type == "cpu" and int(flat.sum()) != self.tokens:
            raise ValueError(
                f"mask must be True at {self.tokens} tokens, the rows of the support, got {int(flat.sum())}"
            )
        if self.tokens == 0:
            return replace(self, offsets=self.offsets.new_zeros(flat.numel() + 1))
        row = (flat.cumsum(0) - 1).clamp(0, self.tokens - 1)
        return replace(self, offsets=_make_offsets(torch.where(flat, row_lengths[row], 0)))

    def check_values(self, numbers: Sequence[int], *, vocab: int) -> None:
        """Raise ValueError for invalid offsets or ids.

        Args:
            numbers: `Slots.numbers`, which the caller has read. The host waits for the device only if they count an
                invalid value.
        """
        if any(numbers[BAD_STARTS : BAD_IDS + 1]):
            self._raise_for_values(vocab)

    def _raise_for_values(self, vocab: int | None) -> None:
        pairs, offsets = self.token_ids.numel(), self.offsets
        if int(offsets[0]) != 0:
            raise ValueError(f"offsets must start at 0, got {int(offsets[0])}")
        down = (offsets[1:] < offsets[:-1]).nonzero()
        if down.numel():
            row = int(down[0])
            raise ValueError(
                f"offsets must never decrease, got {int(offsets[row])} and then {int(offsets[row + 1])} at row {row}"
            )
        if int(offsets[-1]) != pairs:
            raise ValueError(f"offsets must end at the number of token_ids, {pairs}, got {int(offsets[-1])}")
        if pairs:
            least, most = (int(number) for number in self.token_ids.aminmax())
            if least < 0 or (vocab is not None and most >= vocab):
                expected = "at least 0" if vocab is None else f"in [0, {vocab}) from weight"
                raise ValueError(f"token_ids must be token ids {expected}, got {least if least < 0 else most}")


def _is_mask(value: Any) -> bool:
    return hasattr(value, "token_ids") and hasattr(value, "offsets")


def _to_integers(name: str, values: Any, device: torch.device | str | int | None) -> Tensor:
    try:
        tensor = torch.as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be integers: {error}") from error
    # PyTorch makes an empty list a tensor of floats.
    return tensor.long() if tensor.numel() == 0 else tensor


def _make_offsets(row_lengths: Tensor) -> Tensor:
    """(N,) lengths of rows -> (N + 1,) int64 offsets, from 0."""
    return torch.cat([row_lengths.new_zeros(1, dtype=torch.int64), row_lengths.cumsum(0)])
