"""Runs a model to find out what its config does not say: whether sequences of one row see each other."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from liger_rl.step.attention import BLOCK, DENSE_ATTENTION, make_masks
from liger_rl.step.body import Body, no_graph
from liger_rl.step.layout import MicroBatch
from liger_rl.step.prefix_tree import build_prefix_tree, sort_sequences
from liger_rl.step.reason import Reason
from liger_rl.step.run import make_inputs
from liger_rl.step.sequences import TokenBatch

TRIAL_TOKENS = 16  # of each packed sequence
TREE_TOKENS = (20, 8)  # shared by two sequences, and of each alone

RunModel = Callable[[dict[str, Any]], Tensor]  # inputs, as `make_inputs` makes them -> log-probabilities (b, n)


_lock = threading.Lock()
# For each model: (kind of attention, kind of device, "packing" or "trees") -> the reason against it, and whether
# positions may be shifted. There is no reason if sequences have the log-probabilities that they have alone.
_trials: WeakKeyDictionary[Any, dict[tuple[str, str, str], tuple[Reason | None, bool]]] = WeakKeyDictionary()


def _trial_key(model: Any, body: Body, layout: str) -> tuple[str, str, str]:
    return body.config._attn_implementation, next(model.parameters()).device.type, layout


def needs_trial(model: Any, body: Body, layout: str) -> bool:
    """Whether `apply_trial` would run the model, as it does once for each kind of attention."""
    return _trial_key(model, body, layout) not in _trials.get(model, {})


@no_graph()
def apply_trial(run: RunModel, model: Any, body: Body, device: Any, layout: str, *, again: bool) -> Body:
    """The body with the result of a trial: a reason against packing or trees if sequences of one row see each other.

    `layout` is "packing", six forwards, or "trees", four, of at most 56 tokens. A trial runs once for a model and its
    kind of attention, or `again`. `rotary` becomes False if shifted positions change log-probabilities.
    """
    reason, shifts = _run_trial_once(run, model, body, device, layout, again=again)
    body = replace(body, rotary=body.rotary and shifts)
    # A rank that has a reason already runs the trial only because other ranks do.
    if layout == "packing":
        return replace(body, no_packing=body.no_packing or reason)
    return replace(body, no_tree=body.no_tree or reason)


def _run_trial_once(
    run: RunModel, model: Any, body: Body, device: Any, layout: str, *, again: bool
) -> tuple[Reason | None, bool]:
    with _lock:
        trials = _trials.setdefault(model, {})
        key, name = _trial_key(model, body, layout), type(model).__name__
        if again or key not in trials:
            training = {module: module.training for module in model.modules()}
            try:
                model.eval()  # without dropout
                independent, shifts = (_try_packing if layout == "packing" else _try_trees)(run, body, device)
                trials[key] = None if independent else Reason(f"sequences in one row of {name} see each other"), shifts
            except Exception as error:
                if layout == "packing" or isinstance(error, torch.OutOfMemoryError):
                    raise
                # Nobody asked for trees, so this is no error. Some models take no mask of four dimensions.
                trials[key] = Reason(f"the forward of {name} fails with a tree: {error}"), True
            finally:
                for module, mode in training.items():
                    module.training = mode
        return trials[key]


def _are_close(values: Tensor, expected: Tensor, effect: Tensor) -> bool:
    # Kernels and experts may round differently, by far less than the effect of another context.
    return bool((values - expected).abs().max() <= effect.abs().max() / 16)


def _try_packing(run: RunModel, body: Body, device: Any) -> tuple[bool, bool]:
    """(whether packed sequences are as alone, whether positions may be shifted).

    Runs the second of two sequences packed, packed behind another first sequence, alone, and in one row with the first.
    Some models do not pass positions to their attention, carry a state from one sequence to the next, or use positions
    for more than a rotary embedding.
    """
    length = min(TRIAL_TOKENS, body.positions // 2 or TRIAL_TOKENS)
    ids = torch.arange(3, 3 + 2 * length, device=device).view(2, length) % body.config.vocab_size
    changed = torch.stack([(ids[0] + 2 * length) % body.config.vocab_size, ids[1]])
    counted = torch.arange(length, device=device).expand(2, length) != 0
    micro = MicroBatch(torch.arange(2 * length)[None], (length, length), packed=True)
    last = torch.arange(length, device=device)[None] + max(body.positions - length, length)
    batches = (TokenBatch(x, counted, {}) for x in (ids, changed))
    packed, packed_changed = (run(make_inputs(micro, batch, body))[:, length:] for batch in batches)
    alone = run({"input_ids": ids[1:], "counted": counted[1:]})
    joined, joined_changed = (
        run({"input_ids": x.view(1, -1), "counted": counted.reshape(1, -1)})[:, length:] for x in (ids, changed)
    )
    moved = run({"input_ids": ids[1:], "counted": counted[1:], "position_ids": last})
    # Compared with another first sequence and not with its length: learned positions may have a larger effect.
    same = _are_close(packed, alone, joined - alone)
    independent = same and _are_close(packed, packed_changed, joined - joined_changed)
    return independent, _are_close(moved, alone, joined - alone)


def _try_trees(run: RunModel, body: Body, device: Any) -> tuple[bool, bool]:
    """(whether two sequences with one prefix are the same in a tree and alone, whether positions may be shifted).

    A third forward has both in one row without a mask, to measure how much they change each other.
    """
    shared, tail = TREE_TOKENS
    length = shared + tail
    if 0 < body.positions < 2 * length:
        raise ValueError(f"a trial takes {2 * length} positions, the model has {body.positions}")
    ids = torch.arange(3, 3 + 2 * length) % body.config.vocab_size
    ids = torch.stack([ids[:length], torch.cat([ids[:shared], ids[length : length + tail]])])
    multiple = BLOCK if torch.device(device).type == "cuda" else 1
    tree = build_prefix_tree((length, length), sort_sequences([ids[0], ids[1]], (0, 0)), multiple)
    dense = body.config._attn_implementation in DENSE_ATTENTION
    mask = make_masks(body.config, tree.ends, tree.offsets, device, body.dtype, dense=dense)
    row = ids[tree.sequences, tree.offsets][None].to(device)
    counted = torch.arange(length, device=device).expand(2, length) != 0
    predicted = tree.follows[None].to(device)
    inputs = {"input_ids": row, "counted": predicted, "position_ids": tree.offsets[None].to(device)}
    in_tree = run(inputs | {"attention_mask": mask})[0][torch.stack(tree.places).to(device)]
    alone = run({"input_ids": ids.to(device), "counted": counted})
    joined = run({"input_ids": ids.reshape(1, -1).to(device), "counted": counted.reshape(1, -1)}).view(2, -1)
    effect = (joined - alone)[1, shared:]
    last = torch.arange(length, device=device)[None] + max(body.positions - length, length)
    moved = alone[:1]
    if body.rotary:
        moved = run({"input_ids": ids[:1].to(device), "counted": counted[:1], "position_ids": last})
    return _are_close(in_tree[:, 1:], alone[:, 1:], effect), _are_close(moved, alone[:1], effect)
