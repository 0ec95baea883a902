"""Per-token log-probabilities from an lm_head or from logits: checks, mask compaction, scatter back."""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from liger_rl.distributed import VocabParallel
from liger_rl.given_logits.operator import logits_op
from liger_rl.given_logits.rows import LogitRows, LogitRowsOptions
from liger_rl.head.checks import (
    FLOAT_DTYPES,
    check_apart,
    check_budget,
    check_chunk,
    check_dense,
    check_extras,
    check_flag,
    check_invariant,
    check_tolerance,
    overlaps_itself,
)
from liger_rl.head.dtensors import CallInputs, is_dtensor, localized, low_rank_tensors
from liger_rl.head.engines.choose import plan_linear_logprobs
from liger_rl.head.engines.two_pass import Gather, ProjectionOptions, whole_head
from liger_rl.head.function import HeadInputs, Values, keeps_shape, linear_values
from liger_rl.head.low_rank import LowRank
from liger_rl.head.operator import linear_op, low_rank_inputs_op
from liger_rl.head.tokens import LiveTokens, ask_vocabulary, counted_tokens, live_tokens
from liger_rl.kernels import gemm
from liger_rl.kernels.devices import aligned
from liger_rl.kernels.transform import LogitTransform, fits_float32

INTEGER_DTYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
IDENTITY = LogitTransform()


class LogProbs(NamedTuple):
    """Per-token results, float32, shaped like `targets`, 0 at masked tokens."""

    logps: Tensor
    """log-probability of the target in nats, <= 0, differentiable."""
    entropy: Tensor | None
    """Entropy of the token's distribution in nats, >= 0, differentiable; None unless asked for."""
    log_sum_sq_probs: Tensor | None = None
    """log sum_v p_v^2, <= 0, no gradient; None unless among `extras`, as the next two."""
    mean_logits: Tensor | None = None
    """Mean over the vocabulary of the transformed logits, no gradient."""
    is_top1: Tensor | None = None
    """bool: no word has a larger logit than the target, and no word of a smaller id the same. False at masked tokens.
    """


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    low_rank: Sequence[LowRank] = (),
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    extras: Collection[str] = (),
    grad_tolerance: float = 0.0,
    compute_dtype: torch.dtype | None = None,
    gather: Gather | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    max_extra_bytes: int | None = None,
    fixed_shape: bool = False,
    batch_invariant: bool = False,
    weight_grad: Tensor | None = None,
    vocab_parallel: VocabParallel | None = None,
) -> LogProbs:
    """log_softmax(transform(hidden @ weight.T + bias)) at the targets, without the logits in memory.

    Equal to

        z = transform(hidden @ weight.T + bias)
        logps = torch.log_softmax(z.float(), -1).gather(-1, targets[..., None]).squeeze(-1)

    except that the logits stay float32 from the product's accumulators on, exist one tile at a time, and masked
    tokens are dropped before the first product. The backward recomputes them, for tokens with a non-zero gradient
    only. Under autocast the products run in autocast's dtype. Two host syncs on CUDA: one counts the live tokens
    here, one the tokens with a gradient in the backward.

    Args:
        hidden: (B, T, H) or packed (N, H), float32, bfloat16 or float16; position t predicts targets[t].
        weight: (V, H), the lm_head's; dtype and device of `hidden` (any float dtype under autocast or with a
            compute_dtype).
        targets: (B, T) or (N,) integer token ids in [0, V); a negative one (-100) masks its token.
        mask: shaped like targets, bool or 0/1; tokens at 0 get 0, and whatever they hold changes nothing. Other values
            raise, but count as 1 with fixed_shape and under torch.compile, where nothing reads them.
        bias: (V,), added to the head's output before the transform; of the dtype of `hidden`, or float32.
        low_rank: terms scaling * (hidden @ a.T) @ b.T that are added like the bias: adapters on the head, several at
            once if need be, tile by tile. Neither they nor their gradients ever take the shape (V, H).
        transform: temperature, softcap and scale of the logits.
        entropy: also return each token's entropy, from the same pass.
        extras: names of further statistics wanted from it, among "log_sum_sq_probs", "mean_logits" and "is_top1".
        grad_tolerance: largest error of dL/dlogits relative to it, both in the Frobenius norm, in [0, 1); 0 is exact.
            Blocks of 128 tokens x 256 words whose bounds are small enough together are left out of the backward's three
            products, each token's sum over a tile in their place, shared among its words as some tokens' own
            probabilities are, whatever the loss; 1e-3 is under half of what rounding the gradient to bfloat16 does to
            it. The gradient of weight follows; that of hidden may be several times further off, see
            docs/choosing.md. The backward stays exact where blocks cannot be told apart: on GPUs other than NVIDIA's
            of compute capability 9.0 and 10.x, in float32 or mixed dtypes, with rows of the weight that do not start at
            multiples of 16 bytes, with under 512 live tokens, where a chunk is named, or beside a low-rank term; the
            `reason` of `plan_linear_logprobs` says which.
        compute_dtype: dtype of the products' factors, whatever autocast says: float32 runs a bfloat16 head in float32
            without a float32 copy of it. None takes autocast's, or the inputs' own.
        gather: for a weight that is whole only now and then (DeepSpeed ZeRO-3): `gather(weight)`, or
            `gather(weight, bias)`, returns a context in which they are. Entered once here, and once in the backward.
        chunk_tokens, chunk_vocab: upper bounds of a tile's sides; None chooses them.
        max_extra_bytes: what both directions may take beside inputs, results and gradients, from which the chunks and
            kernels follow as `plan_linear_logprobs` says and shows; None takes a default workspace.
        fixed_shape: never wait for the device, so that a CUDA graph can capture forward and backward: every token goes
            through every product, masked ones and those without a gradient as zeros. Values and gradients are the same
            up to rounding, except that a live target outside [0, V) cannot raise: its token is masked.
        batch_invariant: a token's log-probability, entropy and extras are a function of its own row, its target and the
            head alone, bit for bit, however tokens are packed, masked and split over calls, on one device with one
            version of torch. Products are made up to fixed shapes with zeros, to multiples of 512 tokens where the
            product of our own applies and of 128 elsewhere, where it rests on the library treating all rows
            of a product alike (see `liger_rl.head.engines.invariant`). For gradients nothing is promised.
        weight_grad: (V, H) float32, contiguous, on the weight's device, of memory that no input shares: `weight.grad`
            of a float32 weight, or the `main_grad` of a mixed-precision optimiser; with vocab_parallel, of this rank's
            rows. Each backward adds the weight's gradient to it, in float32 and without a (V, H) tensor of its own, and
            the weight itself gets none from this call. Not with a grad_tolerance, nor with a DTensor weight. Its
            reduction over data-parallel ranks is yours, but for `weight.grad` under DistributedDataParallel; within
            that one's forward, unless in `no_sync()`, any other tensor is refused.
        vocab_parallel: where weight, bias and the `b` of low_rank are this rank's rows of a head that is sharded over
            the vocabulary; targets stay ids of the whole of it, and everything else is the same on every rank of the
            group. Two collectives of (N,) statistics in the forward, one of the gradient of hidden in the backward.
            Whether the ranks fit together is checked at the first call with a weight, which waits for the device even
            with fixed_shape. Not with grad_tolerance, batch_invariant or max_extra_bytes, nor under torch.compile. The
            mesh of a DTensor says all this by itself: `liger_rl.head.dtensors` has the rules.

    Returns:
        LogProbs(logps, entropy, log_sum_sq_probs, mean_logits, is_top1), None where not asked for.

    Raises:
        TypeError: an argument of a type or dtype that is not listed above.
        ValueError: shapes, devices or values that do not fit, a live target outside [0, V) included.
        NotImplementedError: a tensor with a forward-mode tangent.
        RuntimeError: in the backward of a gradient that `create_graph=True` made: there is no second derivative.
    """
    inputs = CallInputs(hidden, weight, targets, mask, bias, low_rank, vocab_parallel)
    options = LinearOptions(
        transform=transform,
        entropy=entropy,
        extras=extras,
        grad_tolerance=grad_tolerance,
        compute_dtype=compute_dtype,
        gather=gather,
        chunk_tokens=chunk_tokens,
        chunk_vocab=chunk_vocab,
        max_extra_bytes=max_extra_bytes,
        fixed_shape=fixed_shape,
        batch_invariant=batch_invariant,
        weight_grad=weight_grad,
    )
    return wanted_logprobs(inputs, options)


class LinearOptions(NamedTuple):
    """What `linear_logprobs` takes beside the inputs."""

    transform: LogitTransform
    entropy: bool
    grad_tolerance: float
    chunk_tokens: int | None
    chunk_vocab: int | None
    max_extra_bytes: int | None
    fixed_shape: bool
    batch_invariant: bool
    weight_grad: Tensor | None
    extras: Collection[str] = ()
    compute_dtype: torch.dtype | None = None
    gather: Gather | None = None


def wanted_logprobs(
    given: CallInputs,
    options: LinearOptions,
    dtype: torch.dtype | None = None,
    counted: LiveTokens | None = None,
    *,
    targets_name: str = "targets",
) -> LogProbs:
    """`linear_logprobs` of the wanted tokens alone: the others get 0 as masked ones do, but their ids are looked at.

    `dtype` is what `check_linear` said of these inputs, where they have been checked before, and `counted` what
    `live_tokens` said, where it has been asked. `targets_name` is what the caller's argument is called.
    """
    check_eager(given.vocab_parallel, *given, *low_rank_tensors(given.low_rank))
    original = given.weight
    inputs = localized(given)
    hidden, weight, targets, mask, bias, low_rank, vocab_parallel, wanted = inputs
    transform, entropy, fixed_shape = options.transform, options.entropy, options.fixed_shape
    grad_tolerance, weight_grad = options.grad_tolerance, options.weight_grad
    chunk_tokens, chunk_vocab, batch_invariant = options.chunk_tokens, options.chunk_vocab, options.batch_invariant
    with nullcontext() if vocab_parallel is None else vocab_parallel.shared_errors(original):
        if not isinstance(transform, LogitTransform):
            raise TypeError(f"transform must be a LogitTransform, got {type(transform).__name__}")
        for name, value in (("chunk_tokens", chunk_tokens), ("chunk_vocab", chunk_vocab)):
            check_chunk(name, value)
        check_flag("entropy", entropy)
        extras = check_extras(options.extras)
        if options.gather is not None and not callable(options.gather):
            raise TypeError(f"gather must be callable or None, got {type(options.gather).__name__}")
        check_tolerance(grad_tolerance, fixed_shape)
        check_invariant(batch_invariant, chunk_tokens, chunk_vocab, grad_tolerance)
        check_budget(options.max_extra_bytes, chunk_tokens, chunk_vocab)
        if batch_invariant and low_rank:
            raise ValueError("low_rank must be empty with batch_invariant: the term's products have no fixed shape")
        if vocab_parallel is not None:
            _check_sharded(grad_tolerance, batch_invariant, options.max_extra_bytes)

    def check_written() -> None:
        check_weight_grad(weight_grad, original, grad_tolerance, hidden=hidden, bias=bias)

    def facts() -> dict[str, object]:
        check_written()
        shared = {"transform": transform, "entropy": entropy, "extras": sorted(extras), "fixed_shape": fixed_shape}
        return shared | _facts(inputs, compute_dtype=options.compute_dtype, targets_name=targets_name)

    compiled = torch.compiler.is_compiling()
    if compiled and options.gather is not None:
        raise ValueError("gather must be None under torch.compile, whose graphs hold no callables")
    if compiled and weight_grad is not None:
        raise ValueError("weight_grad must be None under torch.compile, whose graphs write to no tensor from outside")
    with whole_head(options.gather, weight, bias):
        shard = None if vocab_parallel is None else vocab_parallel.shard_of(weight, facts, known_by=original)
        if dtype is None or inputs is not given:
            dtype = check_linear(
                hidden, weight, targets, mask, bias, low_rank,
                targets_name=targets_name, compute_dtype=options.compute_dtype,
            )  # fmt: skip
        check_written()
        kernels_fit = False
        if options.max_extra_bytes is not None:
            plan = plan_linear_logprobs(
                targets.numel(),
                *weight.shape,
                dtype=hidden.dtype,
                weight_dtype=weight.dtype,
                compute_dtype=dtype,
                device=hidden.device,
                needs=_needs(hidden, weight, bias, low_rank),
                contiguous=(hidden.is_contiguous(), weight.is_contiguous()),
                bias=bias is not None,
                rank=sum(term.a.shape[0] for term in low_rank),
                weight_grad=weight_grad is not None,
                transform=transform,
                entropy=entropy,
                extras=extras,
                grad_tolerance=grad_tolerance,
                fixed_shape=fixed_shape,
                batch_invariant=batch_invariant,
                aligned=aligned(weight),
                max_extra_bytes=options.max_extra_bytes,
            )
            (chunk_tokens, chunk_vocab), kernels_fit = plan.tiles, plan.kernels_fit
        ids = targets.long().contiguous()  # a narrow dtype would wrap the vocabulary's size in comparisons
        vocab = weight.shape[0] if shard is None else shard.vocab
        known_shape = fixed_shape or compiled
        selected = None
        if not known_shape and counted is None:
            selected = live_tokens(ids, mask, vocab, "weight", wanted=wanted, targets_name=targets_name)
        flat_hidden, flat_targets = hidden.reshape(-1, hidden.shape[-1]), ids.view(-1)
        if shard is not None:
            flat_targets = shard.local(flat_targets)
        projection = ProjectionOptions(
            transform=transform,
            entropy=entropy,
            extras=extras,
            compute_dtype=dtype,
            gather=options.gather,
            chunk_tokens=chunk_tokens,
            chunk_vocab=chunk_vocab,
            # Bounds are not free, and only a backward needs them.
            tolerance=float(grad_tolerance) if torch.is_grad_enabled() else 0.0,
            weight_grad=weight_grad,
            batch_invariant=batch_invariant,
            kernels_fit=kernels_fit,
            shard=shard,
        )
        live: Tensor | None  # mask, index or None, see `rows_of`
        if counted is not None:
            live = counted.selection
        elif selected is not None:
            # As late as possible: from this sync on the device waits for the host to launch the product.
            live = selected().selection
        elif fixed_shape:
            live = (counted_tokens(ids, mask, wanted) & (ids < vocab)).reshape(-1)
        else:
            # The operator raises for an id outside of the vocabulary, so those are wanted too.
            wanted = None if wanted is None else torch.logical_or(ids >= vocab, wanted)
            live = counted_tokens(ids, mask, wanted).reshape(-1)
        low_inputs = low_weight = None
        if low_rank:
            product = low_rank_inputs_op if compiled else None
            inputs_of = [term.inputs(hidden, live, function=product) for term in low_rank]
            # Autocast would refuse to join factors of two 16-bit dtypes, which become float32 here.
            with gemm.without_autocast(hidden.device):
                low_inputs, low_weight = (_joined(parts) for parts in (inputs_of, [term.b for term in low_rank]))
        head = HeadInputs(flat_hidden, weight, bias, flat_targets, live, low_inputs, low_weight)
        if compiled:
            outputs = linear_op(head, projection, fixed_shape=fixed_shape, targets_name=targets_name)
            return _spread(outputs, live if fixed_shape else None, targets.shape)
        outputs = linear_values(head, projection)
    return _spread(outputs, live, targets.shape)


def logits_logprobs(
    logits: Tensor,
    targets: Tensor,
    *,
    mask: Tensor | None = None,
    transform: LogitTransform = IDENTITY,
    entropy: bool = False,
    in_place: bool = False,
    grad_buffer: Tensor | None = None,
    fixed_shape: bool = False,
) -> LogProbs:
    """log_softmax(transform(logits)) at the targets, in float32, without a float32 copy of the logits.

    For callers who already hold logits; the gradient comes back in the logits' dtype, exactly 0 at masked tokens.

    Args:
        logits: (B, T, V) or (N, V), float32, bfloat16 or float16; leading dimensions may have any strides, so a
            slice such as `logits[:, :-1]` is not copied.
        targets: (B, T) or (N,) integer token ids in [0, V); a negative one masks its token.
        mask: shaped like targets, bool or 0/1. Other values raise, but count as 1 with fixed_shape.
        transform, entropy: as in `linear_logprobs`.
        in_place: write the gradient over the logits, which saves a tensor of their size; nothing may need them after
            the backward, which then runs only once.
        grad_buffer: shaped like logits, of memory apart from theirs, any of the dtypes above: the gradient is added to
            it, in float32 arithmetic, and the logits themselves get none.
        fixed_shape: as in `linear_logprobs`.

    Returns, raises: as `linear_logprobs`.
    """
    check_logits(logits, targets, mask, in_place=in_place, grad_buffer=grad_buffer)
    if not isinstance(transform, LogitTransform):
        raise TypeError(f"transform must be a LogitTransform, got {type(transform).__name__}")
    for name, flag in (("entropy", entropy), ("fixed_shape", fixed_shape)):
        check_flag(name, flag)
    options = LogitRowsOptions(transform=transform, entropy=entropy, in_place=in_place, grad_buffer=grad_buffer)
    return row_logprobs(logits, targets, mask, options, fixed_shape=fixed_shape)


def row_logprobs(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    options: LogitRowsOptions,
    *,
    fixed_shape: bool,
    targets_name: str = "targets",
) -> LogProbs:
    """`logits_logprobs` of what is already checked; logits may be (B, P, V) with P > T, further positions unused."""
    if torch.compiler.is_compiling():
        if options.in_place or options.grad_buffer is not None:
            raise ValueError("in_place and grad_buffer must be left out under torch.compile, which writes for itself")
        logps, entropies = logits_op(
            logits, targets, mask, options.transform, entropy=options.entropy, fixed_shape=fixed_shape,
            targets_name=targets_name,
        )  # fmt: skip
    else:
        raise_if_outside = ask_vocabulary(
            targets, mask, logits.shape[-1], "logits", fixed_shape=fixed_shape, targets_name=targets_name
        )
        logps, entropies = LogitRows.apply(logits, targets, mask, options)
        raise_if_outside()
    return LogProbs(logps.view(targets.shape), None if entropies is None else entropies.view(targets.shape))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _needs(hidden: Tensor, weight: Tensor, bias: Tensor | None, low_rank: Sequence[LowRank]) -> tuple[bool, bool]:
    """Whether gradients of the rows, and of anything of the head's, are wanted."""
    if not torch.is_grad_enabled():
        return False, False
    factors = [factor for term in low_rank for factor in (term.a, term.b)]
    head = any(part is not None and part.requires_grad for part in (weight, bias, *factors))
    return hidden.requires_grad, head


def spread(values: Tensor, live: Tensor | None, shape: torch.Size) -> Tensor:
    """Values by mask (N,), or of the tokens of an index (n,) -> `shape`, 0 elsewhere."""
    if keeps_shape(live):
        values = values.masked_fill(~live, 0)
    elif live is not None:
        values = values.new_zeros(shape.numel()).index_copy(0, live, values)
    return values.view(shape)


def _spread(outputs: Values, live: Tensor | None, shape: torch.Size) -> LogProbs:
    logps, *others = outputs
    rest = (None if values is None else spread(values, live, shape) for values in others)
    return LogProbs(spread(logps, live, shape), *rest)


def check_linear(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    bias: Tensor | None,
    low_rank: Sequence[LowRank] = (),
    *,
    targets_name: str = "targets",
    compute_dtype: torch.dtype | None = None,
) -> torch.dtype:
    """Raise as `linear_logprobs` says for what can be seen without reading values; -> dtype of the products."""
    _check_floating("hidden", hidden)
    _check_floating("weight", weight)
    if hidden.dim() not in (2, 3) or hidden.shape[-1] == 0:
        raise ValueError(f"hidden must be (B, T, H) or (N, H) with H of at least 1, got {tuple(hidden.shape)}")
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or weight.shape[0] == 0:
        raise ValueError(
            f"weight must be (V, H) with H = {hidden.shape[-1]} from hidden and V of at least 1, "
            f"got {tuple(weight.shape)}"
        )
    _check_device("weight", weight, hidden, "hidden")
    if bias is not None:
        _check_floating("bias", bias)
        if bias.shape != weight.shape[:1]:
            raise ValueError(f"bias must be (V,) = ({weight.shape[0]},) from weight, got {tuple(bias.shape)}")
        _check_device("bias", bias, hidden, "hidden")
    _check_low_rank(low_rank, hidden, weight)
    _check_tokens(targets, mask, hidden.shape[:-1], hidden, "hidden", targets_name)
    if compute_dtype is None:
        return _compute_dtype(hidden, weight, bias)
    if compute_dtype not in FLOAT_DTYPES:
        raise TypeError(f"compute_dtype must be float32, bfloat16, float16 or None, got {compute_dtype}")
    return compute_dtype


def _facts(inputs: CallInputs, *, compute_dtype: torch.dtype | None, targets_name: str) -> dict[str, object]:
    """What ranks that share a vocabulary must agree on, by name; waits for the device. Raises as `check_linear`."""
    hidden, weight, targets, mask, bias, low_rank, _, wanted = inputs
    dtype = check_linear(
        hidden, weight, targets, mask, bias, low_rank, targets_name=targets_name, compute_dtype=compute_dtype
    )
    live = counted_tokens(targets, mask, wanted)
    return {
        "hidden": f"{tuple(hidden.shape)} in {hidden.dtype}",
        "the dtype of weight": weight.dtype,
        "compute_dtype": dtype,
        "bias": None if bias is None else bias.dtype,
        "low_rank": [term.a.shape[0] for term in low_rank],
        "the number of tokens that count": int(live.sum()),
        "the sum of targets": int(torch.where(live, targets, 0).sum()),
        "requires_grad of hidden": hidden.requires_grad,
    }


def _check_low_rank(low_rank: Sequence[LowRank], hidden: Tensor, weight: Tensor) -> None:
    if not isinstance(low_rank, (list, tuple)):
        raise TypeError(f"low_rank must be a list or tuple of LowRank, got {type(low_rank).__name__}")
    for place, term in enumerate(low_rank):
        name = f"low_rank[{place}]"
        if not isinstance(term, LowRank):
            raise TypeError(f"{name} must be a LowRank, got {type(term).__name__}")
        if isinstance(term.scaling, bool) or not isinstance(term.scaling, (int, float)):
            raise TypeError(f"{name}.scaling must be a number, got {type(term.scaling).__name__}")
        if not fits_float32(term.scaling):
            raise ValueError(f"{name}.scaling must be finite in float32, got {term.scaling}")
        for part in ("a", "b", "hidden"):
            tensor = getattr(term, part)
            if part == "hidden" and tensor is None:
                continue
            _check_floating(f"{name}.{part}", tensor)
            _check_device(f"{name}.{part}", tensor, hidden, "hidden")
        size, vocab = hidden.shape[-1], weight.shape[0]
        if term.a.dim() != 2 or term.a.shape[1] != size or term.a.shape[0] == 0:
            raise ValueError(f"{name}.a must be (r, H) with H = {size} from hidden, got {tuple(term.a.shape)}")
        rank = term.a.shape[0]
        if term.b.shape != (vocab, rank):
            raise ValueError(
                f"{name}.b must be (V, r) = ({vocab}, {rank}) from weight and {name}.a, got {tuple(term.b.shape)}"
            )
        if term.hidden is not None and term.hidden.shape != hidden.shape:
            raise ValueError(f"{name}.hidden must be {tuple(hidden.shape)} from hidden, got {tuple(term.hidden.shape)}")


def _check_floating(name: str, tensor: Tensor) -> None:
    check_dense(name, tensor)
    if tensor.dtype not in FLOAT_DTYPES:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
    # The level is asked first because it costs nothing. Tensors that torch.compile traces show no tangents.
    if forward_ad._current_level >= 0 and (
        torch.compiler.is_compiling() or forward_ad.unpack_dual(tensor).tangent is not None
    ):
        raise NotImplementedError(f"{name} must have no tangent: there is no forward-mode derivative, only a backward")


def check_weight_grad(
    weight_grad: Tensor | None, weight: Tensor, grad_tolerance: float, **others: Tensor | None
) -> None:
    """`others` are the call's further tensors by name, whose memory has to be another."""
    if weight_grad is None:
        return
    check_dense("weight_grad", weight_grad)
    if is_dtensor(weight) or is_dtensor(weight_grad):
        raise ValueError(
            "weight_grad must be None with a DTensor weight, whose gradient autograd brings to its mesh, and be no "
            "DTensor itself; with a VocabParallel both are plain tensors, of this rank's rows"
        )
    if weight_grad.dtype != torch.float32:
        raise TypeError(f"weight_grad must be float32, in which gradients are summed, got {weight_grad.dtype}")
    if weight_grad.shape != weight.shape:
        raise ValueError(
            f"weight_grad must be (V, H) = {tuple(weight.shape)} from weight, got {tuple(weight_grad.shape)}"
        )
    _check_device("weight_grad", weight_grad, weight, "weight")
    if not weight_grad.is_contiguous():
        raise ValueError(f"weight_grad must be contiguous, got strides {weight_grad.stride()}")
    if weight_grad.requires_grad:
        raise ValueError("weight_grad must require no gradient, because it is added to in place")
    if not weight.requires_grad:
        raise ValueError("weight must require a gradient for weight_grad, got a frozen one")
    if grad_tolerance != 0.0:
        raise ValueError(
            f"grad_tolerance must be 0.0 with weight_grad, got {grad_tolerance}: the block-sparse backward makes a "
            "(V, H) gradient of its own"
        )
    plain = {name: tensor for name, tensor in others.items() if not is_dtensor(tensor)}
    check_apart("weight_grad", weight_grad, weight=weight, **plain)
    _check_reduced(weight_grad, weight)


def _check_reduced(weight_grad: Tensor, weight: Tensor) -> None:
    """ValueError where a DistributedDataParallel in its forward would reduce `weight.grad` and not weight_grad."""
    wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if wrapper is None or not wrapper.require_backward_grad_sync or weight_grad is weight.grad:
        return
    if any(weight is parameter for parameter in wrapper.parameters()):
        raise ValueError(
            "weight_grad must be weight.grad within DistributedDataParallel, which reduces no other tensor over its "
            "ranks, got another; where you reduce it, call the model in no_sync()"
        )


def _check_device(name: str, tensor: Tensor, like: Tensor, source: str) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} must be on {like.device} from {source}, got {tensor.device}")


def check_logits(
    logits: Tensor,
    targets: Tensor,
    mask: Tensor | None,
    *,
    in_place: bool,
    grad_buffer: Tensor | None,
    targets_name: str = "targets",
    spare_position: bool = False,
) -> None:
    """Raise for what can be seen without reading values; `spare_position` allows (B, T + 1, V) beside (B, T)."""
    check_flag("in_place", in_place)
    _check_floating("logits", logits)
    if logits.dim() not in (2, 3) or logits.shape[-1] == 0:
        raise ValueError(f"logits must be (B, T, V) or (N, V), got {tuple(logits.shape)}")
    shape: torch.Size = logits.shape[:-1]
    if spare_position and len(shape) == 2 and isinstance(targets, Tensor) and targets.shape == (shape[0], shape[1] - 1):
        shape = torch.Size(targets.shape)
    _check_tokens(targets, mask, shape, logits, "logits", targets_name)
    if grad_buffer is not None:
        _check_floating("grad_buffer", grad_buffer)
        if grad_buffer.shape != logits.shape:
            raise ValueError(f"grad_buffer must be {tuple(logits.shape)} from logits, got {tuple(grad_buffer.shape)}")
        _check_device("grad_buffer", grad_buffer, logits, "logits")
        if in_place:
            raise ValueError("in_place and grad_buffer are two places for one gradient; give one of them")
        check_apart("grad_buffer", grad_buffer, logits=logits)
    for name, place in (("logits", logits if in_place else None), ("grad_buffer", grad_buffer)):
        if place is not None and (place.stride(-1) != 1 or overlaps_itself(place)):
            raise ValueError(
                f"{name} must have rows of its own and a contiguous last dimension for the gradient, "
                f"got strides {place.stride()}"
            )


def _check_tokens(
    targets: Tensor,
    mask: Tensor | None,
    shape: torch.Size,
    like: Tensor,
    source: str,
    targets_name: str = "targets",
) -> None:
    expected = "(B, T)" if len(shape) == 2 else "(N,)"
    for name, given, dtypes in (
        (targets_name, targets, INTEGER_DTYPES),
        ("mask", mask, (torch.bool, *INTEGER_DTYPES, *FLOAT_DTYPES)),
    ):
        if name == "mask" and given is None:
            continue
        tensor = check_dense(name, given)
        if tensor.dtype not in dtypes:
            kinds = "integers" if dtypes is INTEGER_DTYPES else "bool, integer or float 0/1"
            raise TypeError(f"{name} must be {kinds}, got {tensor.dtype}")
        if tensor.shape != shape:
            raise ValueError(f"{name} must be {expected} = {tuple(shape)} from {source}, got {tuple(tensor.shape)}")
        _check_device(name, tensor, like, source)


def check_eager(vocab_parallel: VocabParallel | None, *tensors: object) -> None:
    """TypeError for what is not a sharded head, ValueError for one under torch.compile."""
    if vocab_parallel is not None and not isinstance(vocab_parallel, VocabParallel):
        raise TypeError(f"vocab_parallel must be a VocabParallel or None, got {type(vocab_parallel).__name__}")
    if torch.compiler.is_compiling() and (vocab_parallel is not None or any(map(is_dtensor, tensors))):
        raise ValueError(
            "vocab_parallel must be None under torch.compile, and no tensor a DTensor: its graphs do not hold the "
            "collectives of a sharded head"
        )


def _check_sharded(grad_tolerance: float, batch_invariant: bool, max_extra_bytes: int | None) -> None:
    """What a head whose vocabulary is sharded cannot have."""
    if grad_tolerance != 0.0:
        raise ValueError(
            "grad_tolerance must be 0 with vocab_parallel: what may be left out is a share of the whole vocabulary's "
            f"gradient, which no rank has; got {grad_tolerance}"
        )
    if batch_invariant:
        raise ValueError(
            "batch_invariant must be False with vocab_parallel: the order of a sum over ranks is the communication "
            "library's, and may change with the number of tokens"
        )
    if max_extra_bytes is not None:
        raise ValueError(
            "max_extra_bytes must be None with vocab_parallel: the memory of its collectives is not planned; "
            f"got {max_extra_bytes}"
        )


def _compute_dtype(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if name == "bias" and tensor is not None and tensor.dtype == torch.float32:
            continue  # it is added in float32 anyway
        if tensor is not None and tensor.dtype != hidden.dtype:
            raise TypeError(f"{name} must be {hidden.dtype} from hidden (or run under autocast), got {tensor.dtype}")
    return hidden.dtype
