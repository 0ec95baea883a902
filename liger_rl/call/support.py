"""The support of each token: the ids that its sampler could have drawn."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from liger_rl.call.checks import check_count, check_dense, check_device, check_flag, check_floating
from liger_rl.call.support_slots import ListedIds
from liger_rl.kernels.segments import BAD_ENDS, BAD_IDS, BAD_ORDERS, BAD_STARTS, FULL_ROWS, MISSING_TARGETS

MOST_KEPT = 1 << 20  # slots that a Support keeps
MissingTarget = Literal["add", "error"]


@dataclass(frozen=True, eq=False)
class Support:
    """The ids of each of a call's N tokens in compressed rows: token t has token_ids[offsets[t] : offsets[t + 1]].

    Log-probabilities and entropies are those of the softmax over a token's ids alone. A (B, T) call has N = B T rows,
    in the order of its flattened tokens. An empty row stands for the whole vocabulary. Ids may be in any order. A
    repeated id counts once, but see `distinct`. The rows of tokens that do not count are not used, but their ids are
    checked.

    What a call finds out from these tensors, the targets and the mask is kept here for the next call with the same
    ones, unless it has over a million ids or fixed_shape. Writes that PyTorch counts are noticed: those of operators,
    through views too. After any other write to the memory of these tensors, make a new Support: by a collective such as
    `torch.distributed.broadcast`, through `tensor.data` or an array of NumPy, by a kernel of your own, or when a CUDA
    graph is replayed.

    Attributes:
        token_ids: (P,) int32 or int64, ids of the whole vocabulary.
        offsets: (N + 1,) int32 or int64, from 0 to P, never decreasing.
        missing_target: what becomes of a token whose row lists ids but not its target: "add" adds it to them, and
            `LogProbs.missing_target` says so; "error" raises a ValueError.
        may_be_empty: False promises that no token that counts has an empty row, which `fixed_shape` needs to know. An
            empty row then raises, or masks its token with fixed_shape.
        distinct: True promises that no row lists an id twice. Then the first call does not sort the ids to find
            repeated ones. If the promise is broken, the repeated id counts twice.

    Raises:
        TypeError, ValueError: what is not such a tensor. On CPU, offsets and negative ids raise here, too. On other
            devices, whose values the host would have to wait for, the call raises that uses the support. With
            fixed_shape no value raises: ids outside of the vocabulary are left out, and a missing target is added
            whatever missing_target says.
    """

    token_ids: Tensor
    offsets: Tensor
    missing_target: MissingTarget = "add"
    may_be_empty: bool = True
    distinct: bool = False

    def __post_init__(self) -> None:
        check_missing_target(self.missing_target)
        check_flag("may_be_empty", self.may_be_empty)
        check_flag("distinct", self.distinct)
        for name in ("token_ids", "offsets"):
            tensor = check_dense(name, getattr(self, name))
            if tensor.dtype not in (torch.int32, torch.int64):
                raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
            if tensor.dim() != 1:
                expected = "(P,)" if name == "token_ids" else "(N + 1,)"
                raise ValueError(f"{name} must be {expected}, got {tuple(tensor.shape)}")
        check_device("offsets", self.offsets, self.token_ids, "token_ids")
        if self.offsets.numel() == 0:
            raise ValueError("offsets must be (N + 1,) with at least the 0 that it starts with, got (0,)")
        if self.offsets.device.type == "cpu" and not torch.compiler.is_compiling():
            self._raise_for_values(None)

    def __getstate__(self) -> dict[str, Any]:
        """Its fields alone: what a call kept goes by addresses, which mean nothing to a copy."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_padded(cls, ids: Tensor, **rules: Any) -> "Support":
        """From (N, K) or (B, T, K) integers, where -1 stands for no id. Waits for the device, which counts the ids.

        `rules` are missing_target, may_be_empty and distinct, here and below.
        """
        if check_dense("ids", ids).dtype not in (torch.int32, torch.int64):
            raise TypeError(f"ids must be int32 or int64, got {ids.dtype}")
        if ids.dim() not in (2, 3):
            raise ValueError(f"ids must be (N, K) or (B, T, K), got {tuple(ids.shape)}")
        rows = ids.reshape(ids.shape[:-1].numel(), ids.shape[-1])
        return cls(rows[rows != -1], _offsets((rows != -1).sum(1)), **rules)

    @classmethod
    def from_vllm(
        cls, mask: Any, *, length: int | None = None, device: torch.device | str | int | None = None, **rules: Any
    ) -> "Support":
        """From what an engine returns: a mask, one row of ids per token, or one mask per sequence.

        Args:
            mask: an object with `token_ids` and `offsets`, such as vLLM's `SamplingMask`, as lists, arrays or tensors;
                or a list of rows, one per token, of ids or None for a row without ids; or a list of such objects.
            length: T of a (B, T) call, for a list of such objects alone: each is filled up with empty rows.
            device: where the support is needed.
            rules: other fields of the support. A mask of a sampler is `distinct` as a rule, rows of ids are not.
        """
        if _is_mask(mask):
            if length is not None:
                raise ValueError(f"length must be None for the mask of one sequence, got {length}")
            rules.setdefault("distinct", getattr(mask, "distinct", True))  # it may be a Support
            return cls(
                _integers("token_ids", mask.token_ids, device), _integers("offsets", mask.offsets, device), **rules
            )
        if not isinstance(mask, (list, tuple)):
            raise TypeError(
                "mask must have token_ids and offsets, or be a list of such objects or of rows of ids, "
                f"got {type(mask).__name__}"
            )
        if mask and all(_is_mask(part) for part in mask):
            return replace(_joined([cls.from_vllm(part) for part in mask], length, device), **rules)
        if length is not None:
            raise ValueError(f"length must be None for rows of ids, got {length}")
        rows = [[] if row is None else list(row) for row in mask]
        listed = _integers("mask", [number for row in rows for number in row], device)
        offsets = _offsets(torch.tensor([len(row) for row in rows], dtype=torch.int64, device=device))
        return cls(listed, offsets, **rules)

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
        **rules: Any,
    ) -> "Support":
        """From (N, V) or (B, T, V) logits, by the rules of Hugging Face's sampling: waits for the device, sorts V ids.

        In its order: the temperature, then the `top_k` largest logits (an equal logit stays), then the smallest set of
        these with a mass of at least `top_p` of theirs, then those with at least `min_p` times the largest
        probability. The most likely id always stays. vLLM applies min_p before top_k and top_p, so a top_p then is a
        share of what min_p leaves; without both the sets are the same.

        Args:
            logits: float, of the last dimension V.
            top_p: in (0, 1].
            top_k: at least 1.
            min_p: in [0, 1].
            temperature: above 0.
            rules: other fields of the support; `distinct` is True as a rule.
        """
        check_floating("logits", logits)
        if logits.dim() not in (2, 3) or logits.shape[-1] == 0:
            raise ValueError(f"logits must be (N, V) or (B, T, V) with V of at least 1, got {tuple(logits.shape)}")
        _check_number("temperature", temperature, above=0.0, most=float("inf"))
        if top_k is not None:
            check_count("top_k", top_k, least=1)
        if top_p is not None:
            _check_number("top_p", top_p, above=0.0, most=1.0)
        if min_p is not None and min_p != 0:
            _check_number("min_p", min_p, above=0.0, most=1.0)
        z = logits.reshape(-1, logits.shape[-1]).float() / temperature
        ordered, ids = z.sort(dim=-1, descending=True, stable=True)
        kept = torch.isfinite(ordered)
        if top_k is not None:
            kept &= ordered >= ordered[:, min(top_k, z.shape[1]) - 1 :][:, :1]
        if top_p is not None:
            p = ordered.masked_fill(~kept, -torch.inf).softmax(-1)
            kept &= p.cumsum(-1) - p < top_p  # what is more likely does not suffice
        if min_p is not None:
            kept &= (ordered - ordered[:, :1]).exp() >= min_p
        kept[:, 0] = True
        rules.setdefault("distinct", True)
        return cls(ids[kept], _offsets(kept.sum(1)), **rules)

    @property
    def tokens(self) -> int:
        """N, rows."""
        return self.offsets.numel() - 1

    def to(self, device: torch.device | str | int) -> "Support":
        """The same on another device; itself where it is there."""
        token_ids, offsets = self.token_ids.to(device), self.offsets.to(device)
        if token_ids is self.token_ids and offsets is self.offsets:
            return self
        return replace(self, token_ids=token_ids, offsets=offsets)

    def take(self, sequences: slice | Tensor, *, batch: int) -> "Support":
        """The rows of some of `batch` sequences of equal length, such as those of a micro-batch.

        On CPU nothing waits. On another device the host waits once, for the number of ids. So keep the support of many
        micro-batches on CPU: the fused call of a swapped model, and with it `policy_step`, brings a part to its device.

        Args:
            sequences: a slice of the (B, T) call's sequences, an index (b,) of them in any order, or a mask (B,) bool.
            batch: B.
        """
        check_count("batch", batch, least=1)
        if self.tokens % batch != 0:
            raise ValueError(f"batch must divide the {self.tokens} rows of the support, got {batch}")
        device = self.offsets.device
        if isinstance(sequences, Tensor):
            sequences = sequences.to(device)
        elif not isinstance(sequences, slice):
            raise TypeError(f"sequences must be a slice or a tensor, got {type(sequences).__name__}")
        rows = torch.arange(self.tokens, device=device).view(batch, -1)[sequences].reshape(-1)
        offsets = _offsets(self.offsets.diff()[rows])
        moved = torch.repeat_interleave(self.offsets[rows] - offsets[:-1], offsets.diff())
        places = torch.arange(moved.numel(), device=device) + moved
        return replace(self, token_ids=self.token_ids[places], offsets=offsets)

    def placed(self, mask: Tensor) -> "Support":
        """Its rows at the True positions of `mask`, in order, and empty rows elsewhere; waits for nothing.

        For what covers sampled tokens alone, where the call also has prompts and padding.

        Args:
            mask: (B, T) or (N,) bool, True at as many tokens as the support has rows. A number that is too small or too
                large raises on CPU, and mostly where the support is used on other devices.
        """
        if check_dense("mask", mask).dtype != torch.bool:
            raise TypeError(f"mask must be bool, got {mask.dtype}")
        check_device("mask", mask, self.token_ids, "token_ids")
        flat, counts = mask.reshape(-1), self.offsets.diff()
        if flat.device.type == "cpu" and int(flat.sum()) != self.tokens:
            raise ValueError(
                f"mask must be True at {self.tokens} tokens, the rows of the support, got {int(flat.sum())}"
            )
        if self.tokens == 0:
            return replace(self, offsets=self.offsets.new_zeros(flat.numel() + 1))
        place = (flat.cumsum(0) - 1).clamp(0, self.tokens - 1)
        return replace(self, offsets=_offsets(torch.where(flat, counts[place], 0)))

    def check_together(self, targets: Tensor, targets_name: str = "targets") -> None:
        """Raise for what can be seen without reading a value: another number of tokens, another device."""
        if self.tokens != targets.numel():
            raise ValueError(
                f"support must have a row for each of the {targets.numel()} tokens of {targets_name}, "
                f"got {self.tokens} rows"
            )
        check_device("support", self.token_ids, targets, targets_name)

    def check_values(self, numbers: Sequence[int], *, vocab: int, targets_name: str = "targets") -> int:
        """Raise ValueError for what the device found in the values; -> tokens that count and whose row is empty.

        Args:
            numbers: `Slots.numbers`, read by the caller. If they are fine, nothing here waits for the device.
        """
        if any(numbers[problem] for problem in (BAD_STARTS, BAD_ORDERS, BAD_ENDS, BAD_IDS)):
            self._raise_for_values(vocab)
        missing, empty = numbers[MISSING_TARGETS], numbers[FULL_ROWS]
        if missing and self.missing_target == "error":
            raise ValueError(
                f"{targets_name} must be among their row's ids with missing_target='error'; {missing} of them are not"
            )
        if empty and not self.may_be_empty:
            raise ValueError(f"support must have no empty row with may_be_empty=False; {empty} tokens that count have")
        return empty

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


def check_usable(support: Any, *, fixed_shape: bool) -> None:
    """Raise for what is no support, and for what none goes together with."""
    if not isinstance(support, Support):
        raise TypeError(f"support must be a Support or None, got {type(support).__name__}")
    if fixed_shape and support.may_be_empty:
        raise ValueError(
            "support must be made with may_be_empty=False for fixed_shape: an empty row stands for the whole "
            "vocabulary, and which rows are empty only the device knows"
        )


def check_missing_target(missing_target: str) -> None:
    if missing_target not in get_args(MissingTarget):
        raise ValueError(f"missing_target must be one of {list(get_args(MissingTarget))}, got {missing_target!r}")


def _is_mask(given: Any) -> bool:
    return hasattr(given, "token_ids") and hasattr(given, "offsets")


def _integers(name: str, values: Any, device: torch.device | str | int | None) -> Tensor:
    try:
        tensor = torch.as_tensor(values, device=device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} must be integers: {error}") from error
    # An empty list becomes floating-point numbers.
    return tensor.long() if tensor.numel() == 0 else tensor


def _offsets(counts: Tensor) -> Tensor:
    """(N,) -> (N + 1,) int64."""
    return torch.cat([counts.new_zeros(1, dtype=torch.int64), counts.cumsum(0)])


def _joined(masks: Sequence[Support], length: int | None, device: torch.device | str | int | None) -> Support:
    counts = []
    for place, mask in enumerate(masks):
        rows = mask.offsets.long().diff()
        if length is not None:
            if rows.numel() > length:
                raise ValueError(f"length must be at least {rows.numel()} from mask[{place}], got {length}")
            rows = torch.cat([rows, rows.new_zeros(length - rows.numel())])
        counts.append(rows)
    token_ids = torch.cat([mask.token_ids.long() for mask in masks])
    distinct = all(mask.distinct for mask in masks)
    return Support(token_ids.to(device), _offsets(torch.cat(counts)).to(device), distinct=distinct)


def _check_number(name: str, value: float, *, above: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if not above < value <= most:
        expected = f"above {above:g}" if most == float("inf") else f"above {above:g} and at most {most:g}"
        raise ValueError(f"{name} must be {expected}, got {value}")


def kept(support: Support, values: Sequence[Tensor | None], rest: Any, make: Callable[[], ListedIds]) -> ListedIds:
    """`make()`, or what it made at the last call with this support, if nothing has been written to any of the tensors.

    Args:
        values: the tensors whose values it depends on, beside the support's.
        rest: all else that it depends on.
    """
    tensors = (support.token_ids, support.offsets, *values)
    if any(tensor is not None and tensor.is_inference() for tensor in tensors):  # nothing says what is written to them
        return make()
    device, key = support.token_ids.device, (rest, *map(_state, tensors))
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():  # a replay has other values
            return make()
        key = (torch.cuda.current_stream(device.index).cuda_stream, *key)
    last = support.__dict__.get("_last")
    if last is not None and last[0] == key:
        return last[1]
    found = make()
    if found.slots.ids.numel() <= MOST_KEPT:
        # With the tensors, so that no other one gets their address.
        found.when_checked = lambda: object.__setattr__(support, "_last", (key, found, tensors))
    return found


def _state(tensor: Tensor | None) -> tuple[Any, ...] | None:
    """What changes with a tensor's values, as far as PyTorch is told."""
    if tensor is None:
        return None
    return tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride()
