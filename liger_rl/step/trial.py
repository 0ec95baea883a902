"""Runs a model to find out what its config does not say: whether sequences of one row see each other."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from liger_rl.distributed import has_ranks
from liger_rl.models.randomness import no_graph, seeded, without_randomness
from liger_rl.models.unknown_layers import keeping_values, list_code, list_unknown_layers, read_values
from liger_rl.step.attention import BLOCK, make_masks
from liger_rl.step.facts import Facts
from liger_rl.step.prefix_tree import LEAST_SHARED, SortedSequences, build_prefix_tree
from liger_rl.step.reason import Reason
from liger_rl.step.row_readers import UNTRIED
from liger_rl.step.states import RUNS, Runs

ROW_TOKENS = 32  # of each row without a tree
PACKED_TOKENS = 16  # of each of two sequences
TREE_TOKENS = (20, 8)  # shared by two sequences, and of each alone

RunModel = Callable[[dict[str, Any]], Tensor]  # inputs, as `make_inputs` makes them -> log-probabilities (b, n)


_lock = threading.Lock()
# For each model: (code of its layers, kind of attention, kind of device, trial) -> the reason against it, and if
# positions may be shifted. There is no reason if sequences have the log-probabilities that they have alone.
Key = tuple[frozenset[Any], str, str, int]
_trials: WeakKeyDictionary[Any, dict[Key, tuple[Reason | None, bool]]] = WeakKeyDictionary()


ROWS, TREES, PACKED = 1, 2, 3  # trials, in the order in which they run


def _make_key(facts: Facts, trial: int) -> Key:
    return facts.code, facts.config._attn_implementation, facts.device.type, trial


def apply_known_trials(model: Any, facts: Facts) -> Facts:
    """The facts with the results of the trials that have run."""
    for trial in (ROWS, TREES, *([] if facts.packed is None else [PACKED])):
        result = _trials.get(model, {}).get(_make_key(facts, trial))
        if result is not None and (trial != ROWS or model.training):
            facts = _add_result(facts, trial, *result)
    return facts


def find_needed_trial(model: Any, facts: Facts, *, has_trees: bool) -> int:
    """The trial that must run before a layout of these facts runs; 0 if none must."""
    known = _trials.get(model, {})
    if model.training and facts.unknown_layers and _make_key(facts, ROWS) not in known:
        return ROWS
    trials = (TREES, *([] if facts.packed is None else [PACKED])) if has_trees else ()
    return next((trial for trial in trials if _make_key(facts, trial) not in known), 0)


def find_known_row_reader(model: Any, modules: Sequence[nn.Module]) -> Reason | None:
    """What a trial of rows has found, `UNTRIED` if the model, which has these modules, needs one."""
    code, results = list_code(modules), _trials.get(model, {}).items()
    found = [reason for (tried, *_, trial), (reason, _) in results if (tried, trial) == (code, ROWS)]
    return found[0] if found else UNTRIED if list_unknown_layers(modules) else None


@no_graph()
def run_trial(run: RunModel, model: Any, facts: Facts, trial: int) -> None:
    """Run a model to see what its facts do not say. `apply_known_trials` has the result from then on.

    `TREES` are ten forwards of at most 56 tokens, of 256 on a GPU: a reason against trees if sequences of one row see
    each other. `rotary` becomes False if shifted positions change log-probabilities. `ROWS` are six forwards of a
    model with layers of its own: a reason to leave the batch as it is if they keep values of it or read its rows.
    `PACKED` are two forwards of a packed row: a reason against trees if its second sequence sees the first.

    Every rank of a sharded model must run it at once.
    """
    with _lock:
        key = _make_key(facts, trial)
        try:
            with without_randomness(model, facts.device):
                if trial == ROWS:
                    result = _try_rows(run, model, facts), True
                elif trial == PACKED:
                    result = _try_packed(run, model, facts), True
                else:
                    problem, shifts = _try_trees(run, model, facts)
                    result = None if problem is None else Reason(f"{facts.name} {problem}"), shifts
        except Exception as error:
            if trial != TREES or isinstance(error, torch.OutOfMemoryError):
                raise
            # Nobody asked for trees, so this is no error. Some models take no mask of four dimensions.
            problem = str(error).partition("\n")[0]  # a compiler adds its whole graph
            result = Reason(f"the forward of {facts.name} fails with a tree: {problem}"), True
        _trials.setdefault(model, {})[key] = result


def _add_result(facts: Facts, trial: int, reason: Reason | None, shifts: bool) -> Facts:
    facts = replace(facts, rotary=facts.rotary and shifts)
    if trial == ROWS:
        return replace(facts, obstacle=facts.obstacle or reason)
    return replace(facts, no_tree=facts.no_tree or reason)


# --- what is compared -------------------------------------------------------------------------------------------------

# Log-probabilities agree within this multiple of what a rounding error after each layer changes ...
ROUNDINGS = 2
# ... or within this fraction of what another context changes.
CONTEXT_FRACTION = 1 / 16
# Values behind a layer that has other rows beside them agree within this multiple.
ROW_ROUNDINGS = 8
# ... and the size of their noise is within this factor, or within one plus this many standard errors of few values.
NOISE_RATIO, NOISE_ERRORS = 1.5, 8
BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
MIXERS = ("attn", "attention", "conv", "mamba")  # in names of what makes tokens see each other
SEES_ANOTHER = "lets a sequence see another one of its row"
DIFFERS = "gives log-probabilities in {} that are not those of separate rows"


@contextmanager
def _hooked(modules: Sequence[nn.Module], hook: Callable[..., Any]) -> Iterator[None]:
    thread = threading.get_ident()  # others may run the model at the same time

    def hook_here(*args: Any) -> Any:
        return hook(*args) if threading.get_ident() == thread else None

    handles = [module.register_forward_hook(hook_here) for module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _rounded_otherwise(model: Any) -> Iterator[None]:
    """The output of each module without children is off by half a unit in the last place, up or down."""

    def perturb(module: nn.Module, args: Any, output: Any) -> Any:
        if not (isinstance(output, Tensor) and output.dtype in BITS):
            return output
        # The last bit is as good as random, and is the same on all ranks.
        up = 1 - 2 * (output.view(BITS[output.dtype]) & 1)
        return (output.double() * (1 + torch.finfo(output.dtype).eps / 2 * up)).to(output.dtype)

    head = _list_head(model)
    leaves = [module for module in model.modules() if module not in head and next(module.children(), None) is None]
    with _hooked(leaves, perturb):
        yield


def _list_head(model: Any) -> set[nn.Module]:
    """Modules of the head, which the fused head reads and does not call. It refuses hooks on them."""
    return set(model.get_output_embeddings().modules())


def _find_experts(model: nn.Module) -> list[nn.Module]:
    """Mixtures of experts, whose products depend on how many tokens of the batch go to an expert."""
    found = []
    for module in model.modules():
        children = dict(module.named_children())
        if children.keys().isdisjoint(("experts", "router")):
            continue
        # A layer may own its experts. What its attention or its state gives must not be replayed.
        if any(mixer in name for name, _ in module.named_modules() for mixer in MIXERS):
            found += [children["experts"]] if "experts" in children else []
        else:
            found.append(module)
    return found


def _run_both(model: nn.Module, runs: tuple[Callable[[], Tensor], Callable[[], Tensor]], kept: Tensor) -> list[Tensor]:
    """The results of both runs of one row (1, n). In the second, experts give the `kept` tokens, (n,), what they gave
    them in the first, so that other tokens cannot change their rounding."""
    outputs: list[Tensor] = []
    replays = False

    def record_or_replay(module: nn.Module, args: Any, output: Any) -> Any:
        is_tuple = isinstance(output, tuple)
        values = output[0] if is_tuple else output
        if not replays:
            outputs.append(values)
            return output
        values = torch.where(kept[:, None], outputs.pop(0), values)
        return (values, *output[1:]) if is_tuple else values

    with _hooked(_find_experts(model), record_or_replay):
        first = runs[0]()
        replays = True
        return [first, runs[1]()]


class _Comparison:
    """How far log-probabilities of one sequence may be apart that differ by rounding alone.

    `alone`, `rounded`: (b, n) of sequences in rows of their own, the second with other rounding. `other_row`: `alone`
    beside another first row. `joined`, `joined_changed`: (m,) of a sequence that sees another one, before and after a
    change of that one.
    """

    def __init__(
        self,
        model: Any,
        alone: Tensor,
        rounded: Tensor,
        other_row: Tensor,
        joined: Tensor,
        joined_changed: Tensor,
    ) -> None:
        self.effect = joined_changed - joined
        rounding = (rounded - alone).abs().max()
        self.tolerance = torch.maximum(ROUNDINGS * rounding, CONTEXT_FRACTION * self.effect.abs().max())
        # The bits of activations that are quantized together depend on all rows.
        self.is_exact = torch.equal(other_row[1], alone[1]) or bool(_find_experts(model))

    def are_close(self, values: Tensor, expected: Tensor) -> bool:
        return bool((values - expected).abs().max() <= self.tolerance)

    def is_independent(self, values: Tensor, changed: Tensor) -> bool:
        """Whether a change of the other sequence has not changed these values, (m,) as `joined`.

        A masked token has the weight 0, so the bits are the same. Otherwise the change is not that of `joined`.
        """
        if self.is_exact or torch.equal(values, changed):
            return torch.equal(values, changed)
        change = (changed - values).dot(self.effect)
        return self.are_close(values, changed) and bool(change < self.effect.dot(self.effect) / 2)


# --- the trials -------------------------------------------------------------------------------------------------------


def _try_rows(run: RunModel, model: Any, facts: Facts) -> Reason | None:
    """The layer that keeps values of a batch, or that gives a row other values beside other rows and tokens."""
    head = _list_head(model)
    layers = [layer for layer in facts.unknown_layers if layer not in head]
    length = min(ROW_TOKENS, facts.positions or ROW_TOKENS)
    short = max(length // 4, 2)
    ids = torch.arange(3, 3 + 4 * length, device=facts.device).view(2, 2, length) % facts.config.vocab_size

    def run_rows(ids: Tensor, seed: int = 0) -> dict[nn.Module, Tensor]:
        """The values of the first tokens of the first row, behind each layer and at last."""
        outputs: dict[nn.Module, Tensor] = {}

        def record(layer: nn.Module, args: Any, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            if isinstance(values, Tensor) and values.is_floating_point() and values.shape[:2] == ids.shape:
                outputs.setdefault(layer, values[0, :short].detach())

        with _hooked(layers, record), seeded(facts.device):
            torch.manual_seed(seed)
            counted = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape) != 0
            outputs[model] = run({"input_ids": ids, "counted": counted})[0, 1:short].detach()
        return outputs

    # A layer may keep a loss only with a graph. Ranks would wait for its backward.
    with keeping_values(layers), torch.set_grad_enabled(not has_ranks()):
        together = run_rows(ids[0])  # may build a table
        before = read_values(layers, {})
        run_rows(ids[1])
        after = read_values(layers, {})
        alone = run_rows(ids[0, :1, :short])  # all ranks run as often, whatever one of them has found
        with _rounded_otherwise(model):
            rounded = run_rows(ids[0, :1, :short])
        redrawn = [run_rows(x, seed=1) for x in (ids[0, :1, :short], ids[0])]
    for number, key in sorted(before.keys() | after.keys()):
        if before.get((number, key), before) != after.get((number, key), before):
            name = type(layers[number]).__name__
            return Reason(f"{name} keeps values of the batch in training ({key})", f"a model without {name}")
    for layer, values in alone.items():
        name, least = type(layer).__name__, torch.finfo(values.dtype).eps * values.abs().max()
        beside = together.get(layer, values)
        # Noise of its own is no reason, if it is as large beside other rows.
        noise, noise_beside = (again.get(layer, x) - x for again, x in zip(redrawn, (values, beside), strict=True))
        rounding = torch.maximum((rounded.get(layer, values) - values).abs().max(), noise.abs().max()).maximum(least)
        low, high = sorted(x.square().mean().sqrt() for x in (noise, noise_beside))
        ratio = max(NOISE_RATIO, 1 + NOISE_ERRORS / values.numel() ** 0.5)
        if (beside - values).abs().max() > ROW_ROUNDINGS * rounding or high > ratio * low + least:
            return Reason(f"{name} gives a row other values beside other rows", f"a model without {name}")
    return None


def _try_packed(run: RunModel, model: Any, facts: Facts) -> Reason | None:
    """Whether the attention, or a state, reaches from one packed sequence to the next, as the caller runs them."""
    assert facts.packed is not None
    length, device = min(PACKED_TOKENS, facts.positions or PACKED_TOKENS), facts.device
    index = torch.arange(2 * length, device=device)
    in_second, ids = index >= length, (index + 3) % facts.config.vocab_size
    bounds = torch.arange(3, dtype=torch.int32, device=device) * length
    values = {"cu_seq_lens": bounds, "max_length": length, "seq_idx": in_second.int()[None]}
    inputs = {name: values[name.removesuffix("_q").removesuffix("_k")] for name in facts.packed}
    inputs |= {"counted": (index % length != 0)[None], "position_ids": (index % length)[None]}

    def run_row(first: Tensor) -> Tensor:
        return run(inputs | {"input_ids": torch.where(in_second, ids, first)[None]})[0]

    alike, changed = _run_both(model, (lambda: run_row(ids), lambda: run_row(ids.flip(0))), in_second)
    if torch.equal(alike[in_second], changed[in_second]):
        return None
    return Reason(f"the forward of {facts.name} lets packed sequences see each other")


def _try_trees(run: RunModel, model: Any, facts: Facts) -> tuple[str | None, bool]:
    """(what the model does wrong with two sequences in a tree, whether positions may be shifted).

    In the row another sequence stands before them, as in batches of several prompts. The values of the second sequence
    do not depend on the tokens of the first alone. They depend on the shared tokens, and on position_ids. They are
    those of separate rows. A row without the tree's mask shows how much the first sequence changes the second if the
    second sees it.
    """
    (shared, tail), device = TREE_TOKENS, facts.device
    if 0 < facts.positions < shared + tail:
        shared, tail = LEAST_SHARED + 1, facts.positions - LEAST_SHARED - 1
    length = shared + tail
    if tail < 2:
        raise ValueError(f"a trial takes {LEAST_SHARED + 3} positions, the model has {facts.positions}")
    numbers, vocab = torch.arange(3, 3 + 2 * length), facts.config.vocab_size
    first = numbers[:length] % vocab
    second = torch.cat([first[:shared], numbers[length : length + tail] % vocab])
    # The last shared token stands in both branches.
    in_prefix, index = torch.arange(length) < shared - 1, torch.arange(length)
    other_first = torch.where(index < shared, first, (first + 1 + tail) % vocab)
    other_prefix = [torch.where(in_prefix, (x + 1 + shared) % vocab, x) for x in (first, second)]
    # Two blocks: Dynamo would compile flex attention for a single one, and again for the first batch.
    multiple = 2 * BLOCK if device.type == "cuda" else 1
    before = second[shared:]
    tree = build_prefix_tree((tail, length, length), SortedSequences([0, 1, 2], [0, 0, shared]), multiple)
    runs = None if facts.states is None else Runs(tree, facts.states, device)
    places, counted = (
        torch.stack(tree.places[1:]).to(device),
        torch.arange(length, device=device).expand(2, length) != 0,
    )

    def run_tree(
        *sequences: Tensor, ends: Tensor = tree.ends, positions: Tensor = tree.offsets, joined: bool = False
    ) -> Tensor:
        mask = make_masks(facts.config, ends, tree.offsets, device, facts.dtype, dense=device.type == "cpu")
        padded = nn.functional.pad(before, (0, shared))
        row = torch.stack([padded, *sequences])[tree.sequences, tree.offsets][None].to(device)
        inputs = {"input_ids": row, "counted": tree.follows[None].to(device), "attention_mask": mask}
        if facts.takes_positions:
            inputs["position_ids"] = positions[None].to(device)
        if runs is not None and not joined:
            inputs[RUNS] = runs
        return run(inputs)[0][places][:, 1:]

    def run_rows(*sequences: Tensor, positions: dict[str, Tensor] | None = None) -> Tensor:
        rows = torch.stack(sequences).to(device)
        return run({"input_ids": rows, "counted": counted[: len(rows)], **(positions or {})})[:, 1:]

    in_second = torch.arange(tree.tokens) >= tail + length
    in_tree, changed = _run_both(
        model, (lambda: run_tree(first, second), lambda: run_tree(other_first, second)), in_second.to(device)
    )
    joined, joined_changed = (
        run_tree(x, second, ends=torch.full_like(tree.ends, tree.tokens), joined=True)[1, shared - 1 :]
        for x in (first, other_first)
    )
    without_prefix = run_tree(*other_prefix)
    backwards = run_tree(
        first, second, positions=torch.where(in_second, length + shared - 2 - tree.offsets, tree.offsets)
    )
    alone, other_row = run_rows(first, second), run_rows(other_first, second)
    with _rounded_otherwise(model):
        rounded = run_rows(first, second)
    comparison = _Comparison(model, alone, rounded, other_row, joined, joined_changed)
    shifts = True
    if facts.rotary:
        last = torch.arange(length, device=device)[None] + max(facts.positions - length, length)
        shifts = comparison.are_close(run_rows(first, positions={"position_ids": last}), alone[:1])
    own = 1, slice(shared - 1, None)  # the second sequence's values that its own branch predicts
    problem = None
    if not comparison.is_independent(in_tree[own], changed[own]):
        problem = SEES_ANOTHER
    elif torch.equal(in_tree[own], without_prefix[own]):
        problem = "does not let a sequence see the tokens that it shares"
    elif not facts.has_no_positions and torch.equal(in_tree[own], backwards[own]):
        problem = "does not read position_ids"
    elif not comparison.are_close(in_tree, alone):
        problem = DIFFERS.format("a tree")
    return problem, shifts
