"""How often the host reads what is on the device, which would have it wait there."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from liger_rl.head.host_answer import HostAnswer
from liger_rl.kernels import reference

# Reads of a value, and results whose size depends on values.
READS = {
    "_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal",
    "is_nonzero", "bincount", "histc",
}  # fmt: skip


class HostReads:
    """Counts, by name."""

    def __init__(self) -> None:
        self.names: list[str] = []


class _ByName(TorchDispatchMode):
    """What would wait for a GPU if the tensors were on one."""

    def __init__(self, reads: HostReads) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        by_mask = name in ("index", "index_put", "_index_put_impl") and any(
            isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(args[1])
        )
        sized_by_values = name == "repeat_interleave" and (kwargs or {}).get("output_size") is None
        if name in READS or by_mask or sized_by_values:
            self.reads.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(device: torch.device) -> Iterator[HostReads]:
    reads = HostReads()
    if device.type == "cpu":
        wait, select = HostAnswer.wait, reference.select_tokens  # the former reaches no dispatcher on CPU

        def counted(answer: HostAnswer) -> list:
            reads.names.append("wait")
            return wait(answer)

        def uncounted(*args):
            """A GPU has a kernel in its place, which reads nothing."""
            before = len(reads.names)
            selected = select(*args)
            del reads.names[before:]
            return selected

        replaced = (
            mock.patch.object(HostAnswer, "wait", counted),
            mock.patch.object(reference, "select_tokens", uncounted),
        )
        with _ByName(reads), replaced[0], replaced[1]:
            yield reads
        return
    before = torch.cuda.get_sync_debug_mode()
    wait = torch.cuda.Event.synchronize  # which the debug mode does not see

    def waited(event: torch.cuda.Event) -> None:
        reads.names.append("Event.synchronize")
        wait(event)

    with (
        warnings.catch_warnings(record=True) as caught,
        mock.patch.object(torch.cuda.Event, "synchronize", waited),
    ):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield reads
        finally:
            torch.cuda.set_sync_debug_mode(before)
    reads.names += [str(w.message) for w in caught if "synchronizing CUDA operation" in str(w.message)]
