"""The batch of one's own loop: what it has, checked before the model runs."""

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask

from liger_rl.fused_linear.loss_module import FusedLinearLoss
from liger_rl.head.checks import check_dense, check_integers, check_shape
from liger_rl.hints import hint
from liger_rl.kernels.argument_checks import check_type
from liger_rl.losses.batch import AlignedBatch, check_column
from liger_rl.models.project import read_transform
from liger_rl.models.swap import FUSED_OPTIONS, PLAIN_ARGUMENTS, find_swapped, swap_lm_head
from liger_rl.step.facts import iterate_wrappers

# Arguments of the forward that the fused head reads itself, or that come from the loss.
RESERVED = {*FUSED_OPTIONS, *PLAIN_ARGUMENTS, "fused", "num_logits_to_keep"}


def get_swapped_model(model: Any) -> Any:
    """The model with a swapped head inside `model`. The first call swaps the head."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a causal LM of transformers, got {type(model).__name__}")
    if isinstance(model, nn.DataParallel):
        raise TypeError("model must not be in a DataParallel, which splits a step's rows; use DistributedDataParallel")
    swapped = find_swapped(model)
    return find_swapped(swap_lm_head(model)) if swapped is None else swapped


def read_model_inputs(
    model: nn.Module,
    swapped: Any,
    batch: Mapping[str, Any],
    loss: FusedLinearLoss,
    extra: Mapping[str, Any],
    options: Collection[str],  # names of the step's own keywords
) -> dict[str, Any]:
    """The model's inputs except the token ids.

    ValueError for a column that the forward does not name, TypeError for an extra input that neither the model nor a
    wrapper around it reads.
    """
    name, columns = type(swapped).__name__, ("mask", *loss.COLUMNS)
    accepted = inspect.signature(swapped.forward).parameters
    known = {"input_ids", *columns}
    inputs = {name for name in accepted if name not in RESERVED}
    unknown = [name for name in batch if name not in known and name not in inputs]
    unknown += [name for name in extra if name in known or name in RESERVED]
    if unknown:
        raise ValueError(
            f"batch has no column {', '.join(map(repr, unknown))}{_hint_input(unknown[0], loss, columns)}; it has "
            f"input_ids, {', '.join(columns)} and the other arguments of the forward of {name}, without "
            "labels and what follows the head"
        )
    read = {name for module in iterate_wrappers(model) for name in inspect.signature(module.forward).parameters}
    # What PEFT's wrappers read of their keywords.
    read |= {name for module in iterate_wrappers(model) for name in getattr(module, "special_peft_forward_args", ())}
    unread = [key for key in extra if key not in {*read, *FUSED_OPTIONS, *swapped._fused_arguments}]
    if unread:
        raise TypeError(
            f"{name} takes no {', '.join(unread)} with fused=True{_hint_input(unread[0], loss, options)}; a step takes "
            f"{', '.join(options)} and the arguments of the model's forward"
        )
    arguments = {name: value for name, value in batch.items() if name not in known} | dict(extra)
    if "use_cache" in swapped._fused_arguments:  # some models pass it on without naming it
        arguments.setdefault("use_cache", False)
    return arguments


def _hint_input(name: str, loss: FusedLinearLoss, known: Collection[str]) -> str:
    """What a name may stand for that is neither a column nor a keyword of a step."""
    kind, settings = type(loss), loss.list_options()
    if name == "labels":
        return " (mask says which of the input_ids count)"
    if name in settings:
        return f" ({name} is an option of {kind.__name__})"
    return hint(name, list(known)) or hint(name, settings).replace("?", f" of {kind.__name__}?")


def align_batch(batch: Mapping[str, Any], loss: FusedLinearLoss, ids: Tensor, mask: Tensor) -> AlignedBatch:
    """The loss's columns of a batch, checked."""
    columns: dict[str, Any] = {name: batch.get(name) for name in loss.COLUMNS}
    if columns.get("nll_mask") is not None:
        nll_mask = check_dense("nll_mask", columns["nll_mask"], ids, "input_ids")
        check_shape("nll_mask", nll_mask, ids.shape, f"(B, T) = {tuple(ids.shape)} from input_ids")
        _check_mask_values("nll_mask", nll_mask)
        columns["nll_mask"] = nn.functional.pad(nll_mask[:, 1:] != 0, (1, 0))
    if columns["segments"] is not None:
        if ids.shape[0] != 1:
            raise ValueError(f"input_ids must be one packed row, (1, T), with segments, got {tuple(ids.shape)}")
        per_token = [name for name, x in columns.items() if isinstance(x, Tensor) and x.shape == ids.shape]
        columns |= {name: columns[name].reshape(-1) for name in per_token}
        ids, mask = ids.reshape(-1), mask.reshape(-1)
    return loss.terms.check(loss.batch(ids, mask, source="input_ids", **columns), mask.shape, ids.device)


def read_tokens(batch: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """input_ids (B, T), and their mask as bool, False in the first column."""
    for name in ("input_ids", "mask"):
        check_type(name, batch.get(name), Tensor, "a tensor in the batch")
    ids, mask = batch["input_ids"], batch["mask"]
    if check_dense("input_ids", ids).dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input_ids must be integers, int32 or int64, got {ids.dtype}")
    if ids.dim() != 2 or not ids.numel():
        raise ValueError(f"input_ids must be (B, T) with at least one token, got {tuple(ids.shape)}")
    check_column("mask", mask)
    if mask.shape != ids.shape or mask.device != ids.device:
        raise ValueError(
            f"mask must be (B, T) = {tuple(ids.shape)} on {ids.device} from input_ids, "
            f"got {tuple(mask.shape)} on {mask.device}"
        )
    _check_mask_values("mask", mask)
    return ids, nn.functional.pad(mask[:, 1:] != 0, (1, 0))


def _check_mask_values(name: str, mask: Tensor) -> None:
    """The host reads a mask that is not bool."""
    wrong = 0 if mask.dtype == torch.bool else int(((mask != 0) & (mask != 1)).sum())
    if wrong:
        raise ValueError(f"{name} must be 0 or 1 at each token; {wrong} of its values are neither")


def check_inputs(inputs: Mapping[str, Any], ids: Tensor) -> None:
    """TypeError or ValueError for a mask or positions of other tokens. Other dimensions or masks are the model's."""
    shapes: dict[str, list[tuple]] = {"attention_mask": [ids.shape], "position_ids": [ids.shape, (1, ids.shape[1])]}
    for name, allowed in shapes.items():
        column = inputs.get(name)
        if column is None or (name == "attention_mask" and isinstance(column, (Mapping, BlockMask))):
            continue
        (check_integers if name == "position_ids" else check_dense)(name, column)
        if column.dim() <= 2 and column.shape not in allowed:
            raise ValueError(f"{name} must be (B, T) = {tuple(ids.shape)} from input_ids, got {tuple(column.shape)}")


def check_loss(loss: Any, swapped: Any) -> None:
    """TypeError or ValueError for a loss that does not fit the model."""
    check_type("loss", loss, FusedLinearLoss, "a fused loss, such as FusedLinearGRPOLoss")
    transform = read_transform(swapped)
    for name, unset in (("softcap", None), ("scale", 1.0)):
        value, model_value = getattr(loss.transform, name), getattr(transform, name)
        if value not in (unset, model_value):
            raise ValueError(
                f"{name} must be left out of the loss, the model's own is used: {model_value} for "
                f"{type(swapped).__name__}, got {value}"
            )


def check_world_size(loss: FusedLinearLoss, ranks: int) -> None:
    """ValueError if the average over the ranks would not be the gradient of all ranks' tokens."""
    size = getattr(loss.terms.reduction, "world_size", ranks)
    if ranks > 1 and size != ranks:
        raise ValueError(
            f"world_size must be {ranks} in the loss, the number of ranks whose gradients are averaged, because "
            f"num_items_in_batch counts the tokens of all ranks, got {size}"
        )
