"""Runs the micro-batches of a layout, and brings their outputs back to the tokens of the batch."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from liger_rl.models.lora_linear import sharing_casts
from liger_rl.models.project import TYPE_INPUTS
from liger_rl.models.randomness import no_graph
from liger_rl.models.router import RouterLogits, RouterLoss, compute_router_losses
from liger_rl.step import attention
from liger_rl.step.facts import Facts
from liger_rl.step.layout import Layout, MicroBatch, TreeRow
from liger_rl.step.sequences import TokenBatch
from liger_rl.step.states import RUNS, Runs


class Output(NamedTuple):
    """The outputs of a model for rows (b, n) of tokens."""

    values: dict[str, Tensor]  # by name, (b, n, ...): of the log-probability, entropy, ... of each token of the rows
    router: RouterLogits | None = None  # of a mixture of experts


Forward = Callable[[dict[str, Any]], Output]  # of the inputs that `make_inputs` makes
RunWithGraph = Callable[[Callable[[], Any], int], Any]


class Outputs(NamedTuple):
    """The outputs of some micro-batches. Values are flat, in the order of the tokens of the micro-batches' rows."""

    outputs: list[Output]  # live ones first
    source: Tensor | None  # (B, T) index into the concatenated values; None: the batch ran as it is
    mask: Tensor  # (B, T) bool, completion tokens
    host_source: Tensor  # `source` of the whole batch, in CPU memory; the tokens' own indices if the batch ran as it is

    def compute_router_losses(
        self, loss: RouterLoss | None, attention: Tensor | None, sizes: Sequence[int]
    ) -> Tensor | None:
        """(M,) the router loss of micro-batches of so many rows; None if the forwards have none."""
        logits = [output.router for output in self.outputs if output.router is not None]
        if loss is None or len(logits) < len(self.outputs):
            return None
        return compute_router_losses(loss, logits, self.host_source, attention, sizes)

    def get(self, name: str) -> Tensor | None:
        """(B, T, ...) values at the batch's tokens, 0 where the mask is not set or the token did not run."""
        values = [output.values[name] for output in self.outputs if name in output.values]
        if not values:
            return None
        if self.source is None:
            return values[0].unflatten(0, self.mask.shape)
        device, outputs = values[0].device, torch.cat(values)
        source, mask = self.source.to(device), self.mask.to(device)
        # A place of a tree may be a completion token of one sequence and a prompt token of another.
        runs = mask & (source < len(outputs))
        # Tokens that read nothing read different places: the backward of many reads of one place takes one at a time.
        spread = torch.arange(source.numel(), device=device).view_as(source) % len(outputs)
        gathered = outputs[torch.where(runs, source, spread)]
        return gathered.masked_fill(~runs.view(*runs.shape, *[1] * (gathered.dim() - 2)), 0)

    def take(self, index: Any) -> "Outputs":
        """The outputs of a part of the batch, by an index of a (B, T) tensor."""
        assert self.source is not None
        return self._replace(source=self.source[index], mask=self.mask[index])


@sharing_casts()
def run(
    layout: Layout,
    batch: TokenBatch,
    forward: Forward,
    *,
    idle_runs: int | None = None,
    recomputes: bool = False,
    with_graph: RunWithGraph = lambda forward, tokens: forward(),
) -> Outputs:
    """The outputs of a layout: idle micro-batches without a graph, live ones with the caller's gradient mode.

    `idle_runs`: number of forwards without a graph, so that every rank makes as many; the repeated micro-batch runs in
    those that this rank does not need. None runs the idle micro-batches alone.
    `recomputes`: whether each live micro-batch keeps no activations, and runs again in the backward.
    `with_graph`: (a function, the number of live tokens) -> the function's result. The function runs the live
    micro-batches, whose graphs are alive at once, and what runs behind them.
    """
    idle, spare = layout.idle, (idle_runs or 0) - len(layout.idle)
    live_inputs, idle_inputs = (
        _prepare_inputs(micros, batch, layout.facts) for micros in (layout.live, [*idle, *[layout.repeated] * spare])
    )
    run_micro = partial(checkpoint, _run, use_reentrant=False) if recomputes else _run

    def run_live() -> list[Output]:
        return [run_micro(forward, get_inputs()) for get_inputs in live_inputs]

    def run_idle() -> list[Output]:
        with no_graph():
            return [_run(forward, get_inputs()) for get_inputs in idle_inputs]

    # The host launches the shorter part while the device runs the longer one. Ranks have one order.
    if idle_runs is None and sum(micro.tokens for micro in idle) <= layout.live_tokens:
        live_outputs, idle_outputs = with_graph(lambda: (run_live(), run_idle()), layout.live_tokens)
    else:
        idle_outputs = run_idle()
        live_outputs, _ = with_graph(lambda: (run_live(), []), layout.live_tokens)
    outputs = [*live_outputs, *idle_outputs[: len(idle)]]
    source = _index_outputs([*layout.live, *idle], batch.ids.shape)
    if source is None:
        return Outputs(outputs, None, batch.mask, torch.arange(batch.ids.numel()).view(batch.ids.shape))
    return Outputs(outputs, source.to(batch.ids.device, non_blocking=True), batch.mask, source)


def _prepare_inputs(
    micros: Sequence[MicroBatch], batch: TokenBatch, facts: Facts
) -> list[Callable[[], dict[str, Any]]]:
    """Functions that give the inputs. On a GPU they are made here, because a copy may wait for forwards before it.
    Elsewhere they are made for each forward: dense masks take memory."""
    makers: list[Callable[[], dict[str, Any]]] = [partial(make_inputs, micro, batch, facts) for micro in micros]
    if not batch.ids.is_cuda:
        return makers
    return [partial(dict, make()) for make in makers]


def _run(forward: Forward, inputs: dict[str, Any]) -> Output:
    output = forward({**inputs})  # a forward takes names out, and may run again
    return output._replace(values={name: value.flatten(0, 1) for name, value in output.values.items()})


def make_inputs(micro: MicroBatch, batch: TokenBatch, facts: Facts) -> dict[str, Any]:
    """The model's inputs of a micro-batch, by name. `counted` is the mask of completion tokens."""
    ids, mask, inputs = batch
    if micro.flat_index is None:
        return {"input_ids": ids, "counted": mask, **inputs}
    index = micro.flat_index.to(ids.device, non_blocking=True)
    inside, index = index >= 0, index.clamp(min=0)
    tensors = dict(inputs)
    tensors["input_ids"] = ids.reshape(-1)[index]
    tensors["counted"] = mask.reshape(-1)[index] & inside
    for name in TYPE_INPUTS:
        if tensors.get(name) is not None:
            tensors[name] = tensors[name].reshape(-1)[index.to(tensors[name].device)]
    attended, position_ids = tensors.pop("attention_mask", None), tensors.pop("position_ids", None)
    if micro.tree is not None:
        return tensors | _make_tree_inputs(micro.tree, mask, facts)
    if attended is not None and micro.keeps_mask:
        device = attended.device
        tensors["attention_mask"] = attended.reshape(-1)[index.to(device)].masked_fill(~inside.to(device), 0)
    if (facts.drops_left_padding and facts.needs_positions) or position_ids is not None:
        tensors["position_ids"] = _make_positions(micro, position_ids, index, inside, ids, facts)
    return tensors


def _make_tree_inputs(row: TreeRow, mask: Tensor, facts: Facts) -> dict[str, Any]:
    device, tree = mask.device, row.tree
    index, places, follows = (x.to(device, non_blocking=True) for x in (row.flat_index, row.places, tree.follows))
    # A place is a target if one of its sequences counts the token that stands there.
    counts = torch.zeros(tree.tokens, dtype=torch.int32, device=device)
    counts.index_add_(0, places, mask.reshape(-1)[index].to(torch.int32))
    inputs = {
        "counted": ((counts > 0) & follows)[None],
        "attention_mask": attention.make_masks(
            facts.config, tree.ends, row.position_ids, device, facts.dtype, dense=device.type == "cpu"
        ),
    }
    if facts.takes_positions:
        inputs["position_ids"] = row.position_ids[None].to(device, non_blocking=True)
    if facts.states is not None:
        inputs[RUNS] = Runs(tree, facts.states, device)
    return inputs


def _make_positions(
    micro: MicroBatch, position_ids: Tensor | None, index: Tensor, inside: Tensor, ids: Tensor, facts: Facts
) -> Tensor:
    """The padded batch's position_ids. Padding continues those before it, so that a row without a mask is recognized as
    one sequence."""
    batch, width = ids.shape
    if position_ids is None:
        positions = index % width
    else:
        positions = position_ids.to(ids.device).expand(batch, width).reshape(-1)[index]
    lengths = torch.tensor(micro.lengths).to(ids.device, non_blocking=True)
    last = positions.gather(1, lengths[:, None] - 1)
    running = positions[:, :1] + torch.arange(positions.shape[1], device=ids.device, dtype=positions.dtype)
    # A table of positions may have no entry beyond the model's last position.
    return torch.where(inside, positions, torch.minimum(running, last.clamp(min=facts.positions - 1)))


def _index_outputs(micros: list[MicroBatch], shape: torch.Size) -> Tensor | None:
    """(B, T) index, in CPU memory, of each token into the concatenated flat outputs of the micro-batches.

    Tokens that did not run get the index behind the last output. None if the batch ran as it is.
    """
    if len(micros) == 1 and micros[0].flat_index is None:
        return None
    source, base = np.full(shape.numel(), -1), 0
    for micro in micros:
        index = np.arange(shape.numel()) if micro.flat_index is None else micro.flat_index.numpy().reshape(-1)
        if micro.tree is not None:
            source[micro.tree.flat_index.numpy()] = base + micro.tree.places.numpy()
        else:
            source[index[index >= 0]] = base + (index >= 0).nonzero()[0]
        base += index.size
    source[source < 0] = base
    return torch.from_numpy(source).view(shape)
