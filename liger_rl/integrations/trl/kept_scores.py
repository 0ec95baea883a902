"""The forward of the old policy's log-probabilities, kept with its graph for the training on the same sequences.

RLOO, and GRPO with vLLM, compute these in each step. Where the sequences are those of one optimizer step, the current
policy is the old one, and the forward of the loss would give the same values again. Training takes values and graph of
the first forward. A micro-batch of it whose sequences all turn out to have no advantage has no backward.
"""

import torch
from torch import Tensor

from liger_rl.step.layout import Layout
from liger_rl.step.run import Output, Outputs
from liger_rl.step.sequences import TokenBatch

MOST_MEMORY = 0.5  # the share of the free memory that activations may take, because rewards run before the training


class KeptScores:
    """Outputs with a graph, whose live micro-batches are those of the layout."""

    def __init__(self, outputs: Outputs, layout: Layout, batch: TokenBatch, text: str, enough_tokens: float) -> None:
        self.enough_tokens = enough_tokens  # by which the layout was chosen
        self._outputs, self._micro_batches = outputs, layout.live
        self.text, self.reason = text, layout.reason  # how the forward ran, and why no prefix was shared
        self.live_tokens = layout.live_tokens  # with a backward
        sequences, _ = _read_rows(batch, None)
        self._rows = {sequence: row for row, sequence in enumerate(sequences)}

    def take(self, batch: TokenBatch, idle_rows: Tensor | None) -> Outputs | None:
        """The outputs of a batch, in the order of its rows; None if it has a row that did not run."""
        sequences, idle = _read_rows(batch, idle_rows)
        rows = [self._rows.get(sequence, -1) for sequence in sequences]
        if min(rows) < 0:
            return None
        live = {row for row, is_idle in zip(rows, idle, strict=True) if not is_idle}
        keeps = [not live.isdisjoint(micro.rows) for micro in self._micro_batches]
        if not any(keeps):  # a loss needs a graph to call backward on
            keeps[-1] = True
        self.live_tokens = sum(micro.tokens for micro, kept in zip(self._micro_batches, keeps, strict=True) if kept)
        pairs = zip(self._outputs.outputs, keeps, strict=True)
        outputs = [output if keeps_graph else _detach(output) for output, keeps_graph in pairs]
        return self._outputs._replace(outputs=outputs).take(torch.tensor(rows, device=batch.ids.device))


def _read_rows(batch: TokenBatch, idle_rows: Tensor | None) -> tuple[list[bytes], list[bool]]:
    """The sequence of each row, and whether it has no gradient. One copy to the host."""
    ids, mask, inputs = batch
    attention = inputs.get("attention_mask")
    attended = torch.ones_like(mask) if attention is None else attention.to(ids.device) != 0
    idle = torch.zeros_like(mask[:, 0]) if idle_rows is None else idle_rows
    columns = [column.to(ids.device, ids.dtype) for column in (ids * attended, mask, attended, idle[:, None])]
    table = torch.cat(columns, 1).cpu().numpy()
    return [row.tobytes() for row in table[:, :-1]], (table[:, -1] != 0).tolist()


def _detach(output: Output) -> Output:
    return output._replace(values={name: value.detach() for name, value in output.values.items()})
