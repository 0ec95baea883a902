"""The lm_head and a preference loss in one module: pairs of chosen and rejected sequences, or single judged ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from liger_rl.distributed import VocabParallel
from liger_rl.fused_linear.loss_module import FusedLinearLoss, build_terms
from liger_rl.head.checks import check_constant, check_dense, check_head, check_integers, check_shape
from liger_rl.head.live_tokens import find_counted
from liger_rl.head.record import Head
from liger_rl.kernels.argument_checks import check_choice, check_type
from liger_rl.kernels.public_call import public
from liger_rl.kernels.transform import LogitTransform
from liger_rl.losses.batch import PreferenceBatch, check_column
from liger_rl.losses.levels import MetricsLevel
from liger_rl.losses.loss import PolicyLoss, PolicyTerms
from liger_rl.losses.objectives import Objective
from liger_rl.losses.options import check_interval
from liger_rl.losses.preference import PAIR_LOSSES, JudgedObjective
from liger_rl.losses.presets import PREFERENCES, UNPAIRED
from liger_rl.losses.reductions import Reduction, SequenceMean, check_divisors
from liger_rl.losses.segments import Segments


@dataclass(frozen=True, kw_only=True)
class ReferenceHead:
    """A reference policy's last hidden states and lm_head. H' and the dtype may differ from the policy's.

    With a sharded policy head, weight and bias are this rank's rows of the same token ids.
    """

    hidden: Tensor  # (B, T, H') or (N, H'), for the policy's tokens
    weight: Tensor  # (V, H'), in hidden's dtype, or in any dtype under autocast
    bias: Tensor | None = None  # (V,)
    transform: LogitTransform | None = None  # of the reference's logits; None takes the loss's transform


class _Judged(FusedLinearLoss):
    """What the losses of pairs and of single sequences share: the reference, and the call of the head."""

    def __init__(self, terms: PolicyTerms, head: dict[str, Any]) -> None:
        if isinstance(terms.objective, JudgedObjective):
            check_choice("metrics", terms.metrics, ("none", "loss"))
        super().__init__(terms, head)

    def _judged_loss(self, head: Head, reference: ReferenceHead | None, **columns: Any) -> PolicyLoss:
        ids = head.ids
        if reference is not None:
            if columns["ref_logps"] is not None:
                raise ValueError("ref_logps must be None with a reference, whose head gives them")
            check_type("reference", reference, ReferenceHead, "a ReferenceHead or None")
            tensors = reference.hidden, reference.weight, reference.bias
            check_head(*tensors, self.options.compute_dtype, "reference.")
            check_dense("reference.hidden", reference.hidden, head.hidden, "hidden")
            shape = (*head.shape, reference.hidden.shape[-1])
            check_shape(
                "reference.hidden", reference.hidden, shape, f"({', '.join(map(str, head.shape))}, H) from hidden"
            )
            for name, tensor in zip(("hidden", "weight", "bias"), tensors, strict=True):
                check_constant(f"reference.{name}", tensor)
            reference_head = Head.of(
                reference.hidden, reference.weight, ids, self.options, mask=head.mask, bias=reference.bias,
                vocab_parallel=head.vocab_parallel, targets_name=f"with reference.weight, {head.targets_name}",
            )  # fmt: skip
            columns["ref_logps"] = ids.new_zeros(ids.shape, dtype=torch.float32)
            # A column that does not fit raises before the reference runs.
            self.terms.check(self.batch(ids, head.mask, **columns), head.shape, ids.device)
            columns["ref_logps"] = self._logps(reference_head, reference.transform)
        batch = self.batch(ids, head.mask, **columns)
        # The head checks the values of the caller's mask.
        return self._loss(head if columns.get("nll_mask") is None else head._replace(mask=batch.mask), batch)


class FusedLinearPreferenceLoss(_Judged):
    """A loss of pairs: TRL's DPO, CPO and ORPO, liger-kernel's DPO, CPO, SimPO and ORPO.

    Args:
        loss_type: a key of `PREFERENCES`: "dpo" (also under each name that TRL's DPOTrainer has: "sigmoid", "hinge",
            "ipo", "exo_pair", ...), "cpo", "simpo", "orpo". A list of TRL's names is their sum with `loss_weights`. Or
            your own objective, a callable (logps, batch) -> TokenLoss.
        reduction: a callable (batch) -> weights, instead of the mean over pairs.
        metrics: "none" or "loss": `chosen_rewards`, `rejected_rewards`, `reward_margins`, `reward_accuracy`,
            `chosen_logps`, `rejected_logps` and `nll`.
        options: the fields of the objective (`DPO`, `CPO`, `ORPO`), such as beta; and temperature, softcap, scale,
            as in `FusedLinearGRPOLoss`.

    Raises:
        TypeError, ValueError: an unknown loss_type or option, with the known ones; a bad value.
    """

    COLUMNS = ("ref_logps", "nll_mask", "segments", "num_sequences")

    def __init__(
        self,
        loss_type: str | Sequence[str] | Objective = "dpo",
        *,
        reduction: Reduction | None = None,
        metrics: MetricsLevel = "loss",
        **options: Any,
    ) -> None:
        if "loss_types" in options and (not isinstance(loss_type, str) or loss_type in PAIR_LOSSES):
            raise TypeError(f"loss_types must be left out, as loss_type={loss_type!r} says which losses are summed")
        if isinstance(loss_type, (list, tuple)):
            options["loss_types"], loss_type = tuple(loss_type), "dpo"
        terms, head = build_terms(
            loss_type, options, PREFERENCES, SequenceMean(), reduction=reduction, metrics=metrics,
            loss=FusedLinearPreferenceLoss,
        )  # fmt: skip
        super().__init__(terms, head)

    def batch(
        self,
        ids: Tensor,
        mask: Tensor | None,
        *,
        source: str = "targets",
        ref_logps: Tensor | None = None,
        nll_mask: Tensor | None = None,
        segments: Segments | None = None,
        num_sequences: int | Tensor | None = None,
        **_: Any,
    ) -> PreferenceBatch:
        check_divisors(self.terms.reduction, num_sequences=num_sequences)
        counted = find_counted(ids, mask)
        sequences = ids.shape[0] if ids.dim() == 2 else _segments(segments).count
        if sequences % 2:
            what = "rows" if ids.dim() == 2 else "segments"
            raise ValueError(f"{source} must have an even number of {what}, first the chosen ones, got {sequences}")
        pairs = sequences // 2
        if ids.dim() == 2:
            side = torch.ones(sequences, device=ids.device)
            side[pairs:] = -1
            side = side[:, None].expand(ids.shape)
        else:
            index = _segments(segments).index
            side = torch.where(index < pairs, 1.0, -1.0)
            of_pair = torch.where((index >= 0) & (index < sequences), index % max(pairs, 1), -1)
            segments = replace(_segments(segments), index=of_pair, count=pairs)
        if nll_mask is not None:
            nll_mask = (nll_mask != 0) & (ids >= 0) & (side > 0)
            side = torch.where(counted, side, 0.0)
            counted = counted | nll_mask
        ref_logps = _per_token(
            ref_logps, counted & (side != 0), source, getattr(self.terms.objective, "ld_alpha", None)
        )
        return PreferenceBatch(
            advantages=side, mask=counted, ref_per_token_logps=ref_logps,
            segments=segments, num_sequences=max(pairs, 1) if num_sequences is None else num_sequences,
            pairs=ids.dim() == 2, nll_mask=nll_mask,
        )  # fmt: skip

    @public
    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        mask: Tensor | None = None,
        ref_logps: Tensor | None = None,
        reference: ReferenceHead | None = None,
        nll_targets: Tensor | None = None,
        bias: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
        segments: Segments | None = None,
        num_sequences: int | Tensor | None = None,
    ) -> PolicyLoss:
        """The loss of B / 2 pairs.

        Args:
            hidden: (B, T, H) last hidden states; position t predicts targets[:, t]. Row r < B / 2 is a chosen sequence,
                row B / 2 + r the rejected one of its pair. Or packed (N, H), with segments in the same order.
            weight: (V, H) of the lm_head.
            targets: (B, T) or (N,) token ids, negative where a token does not count, such as those of the prompt.
            mask: (B, T) or (N,), bool or 0/1, the tokens that count; None: those with an id.
            ref_logps: (B,) the reference's sums of log-probabilities over the tokens that count, or (B, T) / (N,) per
                token, in nats. With ld_alpha, sums are weighted with it, as TRL precomputes them.
            reference: the reference model's hidden states and head, in place of ref_logps. H may be another one.
            nll_targets: (B / 2, T), or packed (N,), the ids of the NLL term of the chosen sequences, negative
                elsewhere: those of their targets, and others that count only in it, such as the prompts'. The host
                reads whether they agree. None: chosen targets.
            bias, vocab_parallel: as in `linear_logprobs`.
            segments: 2 P sequences of packed tokens, first the chosen ones.
            num_sequences: divisor of the mean over pairs; None is their number.

        Returns:
            A `PolicyLoss`, with `.loss` () in float32 and `.metrics`, a dict of `Metric` by name.

        Raises:
            TypeError, ValueError: before anything is computed; the message names the argument.
        """
        head = Head.of(hidden, weight, targets, self.options, mask=mask, bias=bias, vocab_parallel=vocab_parallel)
        nll_mask = None
        if nll_targets is not None:
            head, nll_mask = _add_nll_targets(head, nll_targets)
        return self._judged_loss(
            head, reference, ref_logps=ref_logps, nll_mask=nll_mask, segments=segments, num_sequences=num_sequences
        )

    if TYPE_CHECKING:  # the signature of a call of the module
        __call__ = forward


class FusedLinearUnpairedLoss(_Judged):
    """A loss of single sequences that were judged: KTO, APO-zero unpaired, BCO.

    Args:
        loss_type: a key of `UNPAIRED`: "kto", "apo_zero_unpaired" or "bco". Or your own objective.
        reduction: as in `FusedLinearPreferenceLoss`; the mean is over sequences.
        metrics: "none" or "loss": `chosen_rewards`, `rejected_rewards`, `chosen_logps` and `rejected_logps`, each the
            mean over the sequences with that label.
        options: the fields of the objective (`KTO`, `BCO`), and of the head, as in `FusedLinearPreferenceLoss`.

    Raises:
        TypeError, ValueError: an unknown loss_type or option, with the known ones; a bad value.
    """

    COLUMNS = ("labels", "ref_logps", "kl", "delta", "segments", "num_sequences")

    def __init__(
        self,
        loss_type: str | Objective = "kto",
        *,
        reduction: Reduction | None = None,
        metrics: MetricsLevel = "loss",
        **options: Any,
    ) -> None:
        terms, head = build_terms(
            loss_type, options, UNPAIRED, SequenceMean(), reduction=reduction, metrics=metrics,
            loss=FusedLinearUnpairedLoss,
        )  # fmt: skip
        super().__init__(terms, head)

    def batch(
        self,
        ids: Tensor,
        mask: Tensor | None,
        *,
        source: str = "targets",
        labels: Tensor | None = None,
        ref_logps: Tensor | None = None,
        kl: float | Tensor | None = None,
        delta: float | Tensor | None = None,
        segments: Segments | None = None,
        num_sequences: int | Tensor | None = None,
        **_: Any,
    ) -> PreferenceBatch:
        check_divisors(self.terms.reduction, num_sequences=num_sequences)
        counted = find_counted(ids, mask)
        if not isinstance(labels, Tensor) or labels.dtype != torch.bool:
            found = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
            raise TypeError(f"labels must be a bool tensor, True for desirable sequences, got {found}")
        labels = _of_sequences("labels", check_dense("labels", labels, ids, source), ids, segments, source)
        shifts, named = {"kl": kl, "delta": delta}, getattr(self.terms.objective, "shift", None) or ""
        shift = shifts.pop(named, None)
        unread = [name for name, value in shifts.items() if value is not None]
        if unread:
            raise ValueError(f"{unread[0]} must be None, because {self.terms.objective!r} does not read it")
        if shift is not None:
            shift = _read_shift(named, shift, self.terms.objective, ids, source)
            one = shift.numel() == 1
            shift = (
                shift.reshape(()).expand(ids.shape[:1]) if one else _of_sequences(named, shift, ids, segments, source)
            )
        return PreferenceBatch(
            advantages=torch.where(labels, 1.0, -1.0), mask=counted, shift=shift, segments=segments,
            ref_per_token_logps=_per_token(ref_logps, counted, source), num_sequences=num_sequences,
        )  # fmt: skip

    @public
    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        labels: Tensor,
        *,
        mask: Tensor | None = None,
        ref_logps: Tensor | None = None,
        reference: ReferenceHead | None = None,
        kl: float | Tensor | None = None,
        delta: float | Tensor | None = None,
        bias: Tensor | None = None,
        vocab_parallel: VocabParallel | None = None,
        segments: Segments | None = None,
        num_sequences: int | Tensor | None = None,
    ) -> PolicyLoss:
        """The loss of B judged sequences.

        Args:
            hidden, weight, targets, mask, ref_logps, reference: as in `FusedLinearPreferenceLoss`, for any B.
            labels: (B,) bool, or one for each of segments: True for a desirable sequence.
            kl: for "kto", the KL term in nats, a number, () or as labels, at least 0; 0.0 leaves it out. TRL's is the
                mean of the policy's log-probabilities minus the reference's, of completions of other prompts.
            delta: for "bco", the running mean of the rewards beta (logp - ref), a number, () or as labels.
            bias, vocab_parallel, segments: as in `FusedLinearPreferenceLoss`.
            num_sequences: divisor of the mean over sequences; None is their number.

        Returns, raises: as `FusedLinearPreferenceLoss`.
        """
        head = Head.of(hidden, weight, targets, self.options, mask=mask, bias=bias, vocab_parallel=vocab_parallel)
        return self._judged_loss(
            head, reference, labels=labels, ref_logps=ref_logps, kl=kl, delta=delta, segments=segments,
            num_sequences=num_sequences,
        )  # fmt: skip

    if TYPE_CHECKING:  # the signature of a call of the module
        __call__ = forward


def _segments(segments: Any) -> Segments:
    check_type("segments", segments, Segments, "Segments for packed (N,) targets")
    return segments


def _add_nll_targets(head: Head, nll_targets: Tensor) -> tuple[Head, Tensor]:
    """The head with the ids of the NLL term, too, and where these are, shaped like the targets. One host sync."""
    ids, shape = head.ids, head.shape
    check_integers("nll_targets", check_dense("nll_targets", nll_targets, ids, "targets"))
    if len(shape) == 2:
        half = (shape[0] // 2, shape[1])
        check_shape("nll_targets", nll_targets, half, f"(B / 2, T) = {half} from targets")
        nll_targets = torch.cat([nll_targets, torch.full_like(nll_targets, -1)])
    check_shape("nll_targets", nll_targets, shape, f"{tuple(shape)} from targets")
    counted, nll_mask = find_counted(ids, head.mask), nll_targets >= 0
    others = (counted & nll_mask & (ids != nll_targets)).sum()
    improper = others.new_zeros(()) if head.mask is None else ((head.mask != 0) & (head.mask != 1)).sum()
    differing, wrong = torch.stack([others, improper]).tolist()
    if wrong:
        raise ValueError(f"mask must be 0 or 1 at each token; {wrong} of its values are neither")
    if differing:
        raise ValueError(f"nll_targets must be the ids of targets where both count; {differing} of them are others")
    targets = torch.where(counted, ids, nll_targets.long())
    return head._replace(targets=targets.flatten(), mask=counted, targets_name="targets and nll_targets"), nll_mask


def _read_shift(name: str, shift: Any, objective: Any, ids: Tensor, source: str) -> Tensor:
    """The objective's kl or delta as a float32 tensor. The values of one in a GPU's memory are not read."""
    if not isinstance(shift, Tensor):
        check_interval(name, shift, objective.shift_bounds)
    elif check_dense(name, shift).device not in (ids.device, torch.device("cpu")):
        raise ValueError(f"{name} must be on {ids.device} from {source}, or on the CPU, got {shift.device}")
    else:
        check_constant(name, check_column(name, shift))
        if shift.device.type == "cpu":
            for value in {float(shift.min()), float(shift.max())} if shift.numel() else ():
                check_interval(name, value, objective.shift_bounds)
    return torch.as_tensor(shift, dtype=torch.float32, device=ids.device).detach()


def _of_sequences(name: str, values: Tensor, ids: Tensor, segments: Any, source: str) -> Tensor:
    """One value for each sequence: (B,), or of packed tokens (S,) -> (N,)."""
    if ids.dim() == 2:
        check_shape(name, values, ids.shape[:1], f"(B,) = ({ids.shape[0]},) from {source}")
        return values
    segments = _segments(segments)
    check_shape(name, values, (segments.count,), f"({segments.count},), one for each of segments")
    return values[segments.index.clamp(0, max(values.numel() - 1, 0)).long()]


def _per_token(ref_logps: Tensor | None, counted: Tensor, source: str, ld_alpha: float | None = None) -> Tensor | None:
    """Sums (B,) -> (B, T): each sum stands at its sequence's first token that counts."""
    if ref_logps is None:
        return None
    check_constant("ref_logps", check_column("ref_logps", check_dense("ref_logps", ref_logps, counted, source)))
    if ref_logps.shape == counted.shape:
        return ref_logps
    shapes = f"({counted.shape[0]},) or {tuple(counted.shape)}" if counted.dim() == 2 else str(tuple(counted.shape))
    check_shape("ref_logps", ref_logps, counted.shape[:1], f"{shapes} from {source}")
    if ld_alpha:  # sums are weighted already; beside an empty sequence the objective weights the first token, too
        ref_logps = torch.where(counted.any(1).view(2, -1).all(0).repeat(2), ref_logps, ref_logps / ld_alpha)
    return torch.where(counted & (counted.cumsum(-1) == 1), ref_logps[:, None], 0.0)
