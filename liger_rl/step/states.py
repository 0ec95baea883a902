"""Layers with a state in a row that is a prefix tree: linear attention, Mamba 2, short convolutions.

Such a layer reads a row from left to right. A tree's row is cut into runs, tokens that continue each other. A run
begins with the state that its parent run ended with, and its convolution with the parent's last inputs. Runs of one
depth go through the recurrence together.

The layers of transformers call functions of their own Python module, which are a kernel's (fla, mamba-ssm,
causal-conv1d) or a reference. Ours stand in front of them. `seq_idx`, an input of the model that reaches all of them,
is the row's `Runs`; with any other value the module's own function runs. So recomputed layers get it, too.

Where transformers' reference would run the gated delta rule, `_scan_gated_delta_rule` does. It launches a few kernels
for each depth of the tree and not for each call.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from liger_rl.step.prefix_tree import PrefixTree

RUNS = "seq_idx"  # the input of the model
CONVOLUTION, FUSED = "causal_conv1d_fn", "mamba2_split_conv1d_scan_combined"
DELTA_RULES = GATED, KIMI = "torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention"
MAMBA_2 = "mamba2_chunk_scan"
RECURRENCES = (*DELTA_RULES, MAMBA_2)
DECAY = "A_log"  # a parameter of layers with a state
# The arguments that come without a name. A kernel of the hub does not say its own.
NAMES = {
    CONVOLUTION: ("hidden_states", "weight", "bias", "activation"),
    MAMBA_2: ("hidden_states", "dt", "A", "B", "C", "chunk_size"),
    **dict.fromkeys(DELTA_RULES, ("query", "key", "value", "g", "beta")),
}
# Runs of a call are padded to its longest. Each of their chunks waits for the one before, which costs as much as this
# many runs more.
WAITING_RUNS = 16
# A longer run is cut: the backward of a reference takes time and memory for all pairs of a call's chunks, and pieces of
# this length are not padded.
LONGEST_RUN = 512
CHUNK = 64  # tokens of the gated delta rule whose updates of the state are solved for at once


class StateLayers(NamedTuple):
    """The layers of a model that a tree reaches."""

    homes: tuple[ModuleType, ...]  # the Python modules with their functions
    taps: int  # of the widest convolution
    takes_lengths: bool  # the recurrence is a kernel's that takes runs of different lengths
    takes_chunks: bool = False  # the recurrence is this module's, of chunks


def find_state_layers(modules: Iterable[nn.Module]) -> StateLayers | None:
    """The layers of a model whose Python module has the functions that are known here; None if there is none."""
    modules = list(modules)
    # A generated class may have no Python module.
    found = {sys.modules.get(kind.__module__): None for kind in {type(module): None for module in modules}}
    homes = tuple(home for home in found if home is not None and not NAMES.keys().isdisjoint(vars(home)))
    if not homes:
        return None
    convolutions = [module for module in modules if isinstance(module, nn.Conv1d) and module.groups > 1]
    taps = max((module.kernel_size[0] for module in convolutions), default=1)
    rules = {name for home in homes for name in RECURRENCES if name in vars(home)}
    has_kernel = "fla" in sys.modules and not rules.isdisjoint(DELTA_RULES)
    return StateLayers(homes, taps, has_kernel, rules == {GATED} and not has_kernel)


def has_closed_states(modules: Iterable[nn.Module]) -> bool:
    """Whether a layer's state always begins with zeros: its Python module has no recurrence that is known here."""
    kinds = {type(module) for module in modules if DECAY in module._parameters}
    # FSDP2 makes a subclass of a layer's class.
    return not all(any(_has_recurrence(base) for base in kind.__mro__) for kind in kinds)


def _has_recurrence(kind: type) -> bool:
    home = sys.modules.get(kind.__module__)
    return home is not None and any(name in vars(home) for name in RECURRENCES)


# --- the runs of a row ------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """Runs that go through a recurrence in one call."""

    # (r + 1,) int64, sums of the runs' lengths, on the device and in CPU memory; None: they are padded to one.
    lengths: tuple[Tensor, Tensor] | None
    runs: int
    parents: Tensor | None  # (r,) int64, numbers among the runs one depth above; None: they begin without a state


class Runs:
    """The runs of a tree's row of n places, on the row's device."""

    def __init__(self, tree: PrefixTree, layers: StateLayers, device: torch.device) -> None:
        _install(layers.homes)
        before = tree.before.numpy()
        longest = before.size if layers.takes_lengths else CHUNK if layers.takes_chunks else LONGEST_RUN
        starts, parents, depths = _cut_into_runs(before, longest)
        lengths = np.diff(np.append(starts, before.size))
        number = np.zeros_like(starts)  # of each run among those of its depth, in the order of the calls
        order, inverse, stop = [], np.empty_like(before), 0
        self.calls: list[list[_Call]] = []  # by depth
        self._sizes: list[int] = []  # of all calls in `_order`
        self._pads = not layers.takes_lengths
        self.is_of_chunks = layers.takes_chunks
        for depth in range(depths.max() + 1):
            runs, calls, count = np.flatnonzero(depths == depth), list[_Call](), 0
            runs = runs[np.argsort(-lengths[runs], kind="stable")]
            number[runs] = np.arange(runs.size)
            splits = self._pads and not self.is_of_chunks
            for group in _split_by_length(runs, lengths[runs]) if splits else [runs]:
                column = np.arange(CHUNK if self.is_of_chunks else lengths[group[0]])
                index = np.where(column < lengths[group, None], starts[group, None] + column, before.size)
                places = index[index < before.size] if layers.takes_lengths else index.reshape(-1)
                inside = np.flatnonzero(places < before.size)
                inverse[places[inside]] = stop + inside
                order.append(places)
                sums = torch.from_numpy(np.append(0, np.cumsum(lengths[group])))
                both = None if self._pads else (sums.to(device, non_blocking=True), sums)
                above = number[parents[group]] if depth else None
                calls.append(_Call(both, group.size, _to(above, device)))
                self._sizes.append(places.size)
                stop, count = stop + places.size, count + group.size
            self.calls.append(calls)
        self._order, self._inverse = _to(np.concatenate(order), device), _to(inverse, device)
        near, windows = _find_windows(before, layers.taps)
        self._near, self._windows = _to(near, device), _to(windows, device)

    def cut(self, x: Tensor) -> Tensor:
        """(1, n, ...) -> (places, ...) in the order of the calls, with zeros where a call pads."""
        padded = torch.cat([x[0], torch.zeros_like(x[0, :1])]) if self._pads else x[0]
        return padded.index_select(0, self._order)

    def join(self, x: Tensor) -> Tensor:
        """(places, ...) in the order of the calls -> (1, n, ...)."""
        return x.index_select(0, self._inverse)[None]

    def scan(self, run: Callable[..., Any], columns: dict[str, Tensor]) -> Tensor:
        """(1, n, ...) what a recurrence gives for columns (1, n, ...).

        `run`: (columns (b, w, ...), initial states (b, ...) or None, whether final states are needed, `lengths` of
        a `_Call`) -> outputs (b, w, ...), final states (b, ...) or None. A token of zeros leaves a state as it is.
        """
        # The backward of a slice would take a whole tensor for each call.
        pieces = zip(*(self.cut(x).split(self._sizes) for x in columns.values()), strict=True)
        outputs: list[Tensor] = []
        states: Tensor | None = None
        for depth, calls in enumerate(self.calls, 1):
            finals = []
            for call in calls:
                rows = call.runs if call.lengths is None else 1
                named = zip(columns, next(pieces), strict=True)
                cut = {name: x.unflatten(0, (rows, -1)) for name, x in named}
                initial = states[call.parents] if states is not None and call.parents is not None else None
                output, final = run(cut, initial, depth < len(self.calls), call.lengths)
                outputs.append(output.flatten(0, 1))
                finals.append(final)
            states = torch.cat(finals) if depth < len(self.calls) else None
        return self.join(torch.cat(outputs))

    def mend_convolution(
        self, output: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None
    ) -> Tensor:
        """(1, C, n) a causal convolution of hidden (1, C, n) with weight (C, k), from its `output` along the row: the
        first tokens of a run read the last inputs of its parent."""
        windows = self._windows[:, self._windows.shape[1] - weight.shape[1] :]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        inputs = hidden[0][:, windows.clamp(min=0)].to(dtype).masked_fill(windows < 0, 0)  # (C, m, k)
        mended = (inputs * weight[:, None].to(dtype)).sum(-1)
        if bias is not None:
            mended = mended + bias[:, None].to(dtype)
        if activation is not None:
            mended = ACT2FN[activation](mended)
        return output.index_copy(2, self._near, mended[None].to(output.dtype))


def _cut_into_runs(before: np.ndarray, longest: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The place where each run starts, its parent run or -1, and the number of its ancestors."""
    place = np.arange(before.size)
    jumps = (before != place - 1) | (place == 0)
    ends = before[jumps]  # a run ends where another one continues it elsewhere
    cuts = jumps.copy()
    cuts[ends[(ends >= 0) & (ends + 1 < before.size)] + 1] = True
    starts = np.flatnonzero(cuts)
    cuts |= (place - starts[np.cumsum(cuts) - 1]) % longest == 0
    starts = np.flatnonzero(cuts)
    parents = np.searchsorted(starts, before[starts], side="right") - 1
    depths = np.zeros_like(starts)
    for run, parent in enumerate(parents):  # a parent comes first
        depths[run] = depths[parent] + 1 if parent >= 0 else 0
    return starts, parents, depths


def _split_by_length(runs: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Runs, the longest first, in the groups that cost least."""
    # Runs of one length are in one group, so no more than `LONGEST_RUN` places are tried.
    bounds = np.append(np.flatnonzero(np.diff(lengths, prepend=0)), runs.size)
    least, cut = np.zeros(bounds.size), np.zeros(bounds.size, dtype=int)
    for stop in range(1, bounds.size):
        start = bounds[:stop]
        costs = least[:stop] + lengths[start] * (bounds[stop] - start + WAITING_RUNS)
        cut[stop] = costs.argmin()
        least[stop] = costs[cut[stop]]
    groups: list[np.ndarray] = []
    stop = bounds.size - 1
    while stop:
        groups.insert(0, runs[bounds[cut[stop]] : bounds[stop]])
        stop = cut[stop]
    return groups


def _find_windows(before: np.ndarray, taps: int) -> tuple[np.ndarray, np.ndarray]:
    """Places whose last `taps` tokens are not those in front of it, (m,), and the places of these, (m, taps), or -1."""
    place = np.arange(before.size)
    steps = [place]
    for _ in range(taps - 1):
        steps.insert(0, np.where(steps[0] < 0, -1, before[steps[0]]))
    windows = np.stack(steps, 1)
    along_the_row = np.maximum(place[:, None] - np.arange(taps - 1, -1, -1), -1)
    near = np.flatnonzero((windows != along_the_row).any(1))
    return near, windows[near]


def _to(array: Any, device: torch.device) -> Any:
    return None if array is None else torch.from_numpy(array).to(device, non_blocking=True)


# --- transformers' functions ------------------------------------------------------------------------------------------


_lock = threading.Lock()
_replaced: dict[tuple[ModuleType, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}  # -> transformers', ours


def _install(homes: Iterable[ModuleType]) -> None:
    """Let the functions of these Python modules read `Runs`, until `restore_states`."""
    makers = {CONVOLUTION: _wrap_convolution, FUSED: _wrap_fused, MAMBA_2: _wrap_mamba}
    makers |= dict.fromkeys(DELTA_RULES, _wrap_delta_rule)
    with _lock:
        for home in homes:
            for name, make in makers.items():
                function = vars(home).get(name)
                # Somebody else may have replaced ours.
                if function is not None and function is not _replaced.get((home, name), (None, None))[1]:
                    _replaced[home, name] = function, make(function, NAMES.get(name, ()))
                    setattr(home, name, _replaced[home, name][1])


def restore_states() -> None:
    """Put transformers' functions back. A step that needs trees replaces them again."""
    with _lock:
        while _replaced:
            (home, name), (function, ours) = _replaced.popitem()
            if vars(home).get(name) is ours:
                setattr(home, name, function)


def _reading_runs(
    original: Callable[..., Any], names: tuple[str, ...], run: Callable[[Runs, dict[str, Any], int], Any]
) -> Callable[..., Any]:
    """The function, with `run` in its place if it gets `Runs`: (runs, all arguments by name, how many had no name)."""

    @wraps(original, updated=())  # a kernel of the hub is an nn.Module
    def read_runs(*args: Any, **options: Any) -> Any:
        runs = options.get(RUNS)
        if not isinstance(runs, Runs):
            return original(*args, **options)
        del options[RUNS]
        return run(runs, dict(zip(names[: len(args)], args, strict=True)) | options, len(args))

    return read_runs


def _call(function: Callable[..., Any], arguments: dict[str, Any], positional: int) -> Any:
    """A kernel has other names than its reference for the arguments that come without one."""
    values = list(arguments.items())
    return function(*(value for _, value in values[:positional]), **dict(values[positional:]))


def _wrap_convolution(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def run(runs: Runs, arguments: dict[str, Any], positional: int) -> Tensor:
        output = _call(original, arguments, positional)
        hidden, weight, bias, activation = (arguments.get(name) for name in names)
        assert isinstance(hidden, Tensor)
        assert isinstance(weight, Tensor)
        return runs.mend_convolution(output, hidden, weight, bias, activation)

    return _reading_runs(original, names, run)


def _wrap_fused(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    @wraps(original, updated=())
    def leave_to_parts(*args: Any, **options: Any) -> Any:
        # A layer calls its parts if the kernel of all of them gives None.
        return None if isinstance(options.get(RUNS), Runs) else original(*args, **options)

    return leave_to_parts


def _wrap_delta_rule(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    home = getattr(original, "__globals__", {}).get("__name__", "")
    is_reference = home.startswith("transformers.")  # nobody has replaced it

    def run(runs: Runs, arguments: dict[str, Any], positional: int) -> tuple[Tensor, None]:
        columns = {name: arguments[name] for name in names}
        if runs.is_of_chunks and is_reference:
            normalizes = arguments.get("use_qk_l2norm_in_kernel", False)
            return _scan_gated_delta_rule(runs, *columns.values(), normalizes=normalizes), None

        def scan(cut: dict[str, Tensor], initial: Tensor | None, has_final: bool, lengths: Any) -> Any:
            # Without the second, fla would wait for the device to copy the first.
            others = dict(zip(("cu_seqlens", "cu_seqlens_cpu"), lengths or (None, None), strict=True))
            others |= {"initial_state": initial, "output_final_state": has_final}
            return _call(original, arguments | cut | others, positional)

        return runs.scan(scan, columns), None

    return _reading_runs(original, names, run)


def _scan_gated_delta_rule(
    runs: Runs,  # of chunks
    query: Tensor,  # (1, n, groups of heads, K)
    key: Tensor,  # (1, n, groups of heads, K)
    value: Tensor,  # (1, n, heads, W)
    g: Tensor,  # (1, n, heads), logarithms of the decays
    beta: Tensor,  # (1, n, heads)
    *,
    normalizes: bool,
) -> Tensor:
    """(1, n, heads, W) the gated delta rule of a tree, in float32 as transformers' reference.

    The updates within chunks (Yang et al. 2024, "Gated Delta Networks", the extended WY form) are solved for all chunks
    of the tree at once. What is left for each depth is a state of each chunk.
    """
    dtype, heads = query.dtype, value.shape[2]
    query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
    if normalizes:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5

    def cut(x: Tensor) -> Tensor:  # (chunks x heads, 64, width)
        groups = x.shape[2]  # one for each head before transformers 5.24
        chunks = runs.cut(x).view(-1, CHUNK, groups, 1, x[0, 0, 0].numel()).permute(0, 2, 3, 1, 4)
        return chunks.expand(-1, -1, heads // groups, -1, -1).flatten(0, 2)

    query, key, value, g, beta = map(cut, (query, key, value, g, beta))
    total = g.cumsum(1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decay = (total - total.mT).masked_fill(later, -torch.inf).exp()
    since, until = total.exp(), (total[:, -1:] - total).exp()
    system = (key * beta) @ key.mT * decay
    both = torch.cat([value * beta, key * (-beta * since)], 2)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    # What a chunk would write to a state of zeros, and what it takes from that for the state that it begins with.
    new, taken = solved.split([value.shape[2], key.shape[2]], 2)
    states = value.new_zeros(1, heads, key.shape[2], value.shape[2])
    sizes = [heads * call.runs for [call] in runs.calls]
    pieces = zip(runs.calls, *(x.split(sizes) for x in (new, taken, key * until, since[:, -1:])), strict=True)
    before, written = [], []
    for [call], new, taken, key_until, kept in pieces:
        states = states.expand(call.runs, -1, -1, -1) if call.parents is None else states.index_select(0, call.parents)
        before.append(states.flatten(0, 1))
        # No baddbmm: autocast would round its sum, which is the state, and here rounds its product alone.
        written.append(new + taken @ before[-1])
        states = (before[-1] * kept + key_until.mT @ written[-1]).unflatten(0, (-1, heads))
    output = (query * since) @ torch.cat(before) + (query @ key.mT * decay) @ torch.cat(written)
    return runs.join(output.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)).to(dtype)


def _wrap_mamba(original: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    def run(runs: Runs, arguments: dict[str, Any], positional: int) -> Tensor:
        # A time step of 0 leaves the state as it is.
        dt, bias = arguments["dt"].float(), arguments.get("dt_bias")
        dt = dt if bias is None else dt + bias.float()
        dt = nn.functional.softplus(dt) if arguments.get("dt_softplus") else dt
        columns = {name: arguments[name] for name in ("hidden_states", "B", "C")}
        columns["dt"] = dt.clamp(*arguments.get("dt_limit", (0.0, float("inf"))))
        others = {"dt_bias": None, "dt_softplus": False, "dt_limit": (0.0, float("inf"))}

        def scan(cut: dict[str, Tensor], initial: Tensor | None, has_final: bool, lengths: Any) -> Any:
            states = {"initial_states": initial, "return_final_states": has_final}
            result = _call(original, arguments | others | cut | states, positional)
            return result if has_final else (result, None)

        return runs.scan(scan, columns)

    return _reading_runs(original, names, run)
