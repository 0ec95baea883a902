"""Tries out what a model's config does not say: whether its attention keeps packed sequences and trees apart."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from liger_rl.step.live_rows import MicroBatch, inputs_of
from liger_rl.step.model_body import Body, no_graph
from liger_rl.step.prefix_tree import ordered, prefix_tree
from liger_rl.step.tree_attention import DENSE, masks

TRIAL_TOKENS = 16  # of each packed sequence
TREE_TOKENS = (20, 8)  # shared by two sequences, and of each alone

Run = Callable[[dict[str, Any]], Tensor]  # inputs, as `inputs_of` makes them -> log-probabilities (b, n)


_lock = threading.Lock()
# By a model, its kind of attention and of device, and what was tried. "packing": whether packed sequences have the
# log-probabilities that they have alone. "trees": whether sequences of a tree have. Each is stored as the reason
# against it, or None, and whether positions may be shifted.
_trials: WeakKeyDictionary[Any, dict[tuple[str, str, str], tuple[str | None, bool]]] = WeakKeyDictionary()


def _key(model: Any, body: Body, what: str) -> tuple[str, str, str]:
    return body.config._attn_implementation, next(model.parameters()).device.type, what


def needs_trial(model: Any, body: Body, what: str) -> bool:
    """Whether `after_trial` has to run the model: the first time with this kind of attention."""
    return _key(model, body, what) not in _trials.get(model, {})


@no_graph()
def after_trial(run: Run, model: Any, body: Body, device: Any, what: str, *, again: bool) -> Body:
    """The body without packing or trees where sequences of one row see each other. `what`: "packing" or "trees".

    Six forwards for packing and four for trees, of at most 56 tokens, once for a model and its kind of attention, or
    `again`. `rotary` stays only if positions may be shifted.
    """
    reason, shifts = _tried(run, model, body, device, what, again=again)
    body = replace(body, rotary=body.rotary and shifts)
    # A rank that takes part for others has a reason of its own.
    if what == "packing":
        return replace(body, no_packing=body.no_packing or reason)
    return replace(body, no_tree=body.no_tree or reason)


def _tried(run: Run, model: Any, body: Body, device: Any, what: str, *, again: bool) -> tuple[str | None, bool]:
    with _lock:
        trials = _trials.setdefault(model, {})
        key, name = _key(model, body, what), type(model).__name__
        if again or key not in trials:
            training = {module: module.training for module in model.modules()}
            try:
                model.eval()  # a dropout would differ
                apart, shifts = (_packing if what == "packing" else _trees)(run, body, device)
                trials[key] = None if apart else f"sequences in one row of {name} see each other", shifts
            except Exception as error:
                if what == "packing" or isinstance(error, torch.OutOfMemoryError):
                    raise
                # Trees run unasked. Some models take no mask of four dimensions.
                trials[key] = f"the forward of {name} fails with a tree: {error}", True
            finally:
                for module, mode in training.items():
                    module.training = mode
        return trials[key]


def _same(values: Tensor, expected: Tensor, effect: Tensor) -> bool:
    # Kernels and experts may round in another way, by far less than another context changes a sequence.
    return bool((values - expected).abs().max() <= effect.abs().max() / 16)


def _packing(run: Run, body: Body, device: Any) -> tuple[bool, bool]:
    """The second of two sequences: packed, packed behind another first one, alone, and in one row with the first.

    Some models do not pass positions on to their attention, have a state that runs on, or use positions for more than a
    rotary embedding.
    """
    length = min(TRIAL_TOKENS, body.positions // 2 or TRIAL_TOKENS)
    ids = torch.arange(3, 3 + 2 * length, device=device).view(2, length) % body.config.vocab_size
    changed = torch.stack([(ids[0] + 2 * length) % body.config.vocab_size, ids[1]])
    counted = torch.arange(length, device=device).expand(2, length) != 0
    micro = MicroBatch(torch.arange(2 * length)[None], (length, length), packed=True)
    last = torch.arange(length, device=device)[None] + max(body.positions - length, length)
    packed, packed_changed = (run(inputs_of(micro, x, counted, {}, body))[:, length:] for x in (ids, changed))
    alone = run({"input_ids": ids[1:], "counted": counted[1:]})
    joined, joined_changed = (
        run({"input_ids": x.view(1, -1), "counted": counted.reshape(1, -1)})[:, length:] for x in (ids, changed)
    )
    moved = run({"input_ids": ids[1:], "counted": counted[1:], "position_ids": last})
    # The first sequence's tokens are told apart from its length, because learned positions may change more.
    apart = _same(packed, alone, joined - alone) and _same(packed, packed_changed, joined - joined_changed)
    return apart, _same(moved, alone, joined - alone)


def _trees(run: Run, body: Body, device: Any) -> tuple[bool, bool]:
    """-> whether two sequences with one prefix have the same log-probabilities as a tree and alone, and at other
    positions. A third forward has them in one row without a mask, to see how much they change each other."""
    shared, tail = TREE_TOKENS
    length = shared + tail
    if 0 < body.positions < 2 * length:
        raise ValueError(f"a trial takes {2 * length} positions, the model has {body.positions}")
    ids = torch.arange(3, 3 + 2 * length) % body.config.vocab_size
    ids = torch.stack([ids[:length], torch.cat([ids[:shared], ids[length : length + tail]])])
    tree = prefix_tree((length, length), ordered([ids[0], ids[1]], (0, 0)))
    mask = masks(
        body.config, tree.ends, tree.offsets, device, body.dtype, dense=body.config._attn_implementation in DENSE
    )
    row = ids[tree.sequences, tree.offsets][None].to(device)
    counted = torch.arange(length, device=device).expand(2, length) != 0
    predicted = tree.follows[None].to(device)
    inputs = {"input_ids": row, "counted": predicted, "position_ids": tree.offsets[None].to(device)}
    in_tree = run(inputs | {"attention_mask": mask})[0][torch.stack(tree.places).to(device)]
    alone = run({"input_ids": ids.to(device), "counted": counted})
    joined = run({"input_ids": ids.reshape(1, -1).to(device), "counted": counted.reshape(1, -1)}).view(2, -1)
    effect = (joined - alone)[1, shared:]
    last = torch.arange(length, device=device)[None] + max(body.positions - length, length)
    moved = (
        run({"input_ids": ids[:1].to(device), "counted": counted[:1], "position_ids": last})
        if body.rotary
        else alone[:1]
    )
    return _same(in_tree[:, 1:], alone[:, 1:], effect), _same(moved, alone[:1], effect)
