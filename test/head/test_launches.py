"""What is launched before the first product of a step, which has nothing to hide under."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from liger_rl import FusedLinearGRPOLoss

PRODUCTS = {"mm", "addmm"}
ALLOCATIONS = {"empty", "empty_like"}


class Launches(TorchDispatchMode):
    """Operators that compute something, by name, until the first product."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.product = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        self.product = self.product or name in PRODUCTS
        if not self.product and not func.is_view and name not in ALLOCATIONS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """All of them, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"passes": "two"}, {"passes": "one"}, {"grad_tolerance": 1e-3}], ids=str)
def test_launches_before_the_first_product(options):
    """Twelve select the tokens, on CUDA one kernel; two pick rows and ids; three start the fold, on CUDA none."""
    hidden, weight = torch.randn(8, 64, 64, requires_grad=True), torch.randn(512, 64, requires_grad=True)
    ids, mask, advantages = torch.randint(512, (8, 64)), torch.rand(8, 64) < 0.8, torch.randn(8)
    loss = FusedLinearGRPOLoss("dapo", beta=0.0, **options)
    with Launches() as launches:
        loss(hidden, weight, ids, advantages, mask, num_items_in_batch=400)
    assert launches.product
    assert len(launches.names) <= 17, launches.names


def test_chunks_of_all_tokens_copy_no_column():
    """Where every token counts, the part of a chunk is a view, and no sequence is looked for that no term asks for."""
    hidden, weight = torch.randn(8, 128, 64, requires_grad=True), torch.randn(512, 64)
    ids, advantages, old = torch.randint(512, (8, 128)), torch.randn(8), -torch.rand(8, 128)
    loss = FusedLinearGRPOLoss("dapo", beta=0.0, passes="one", chunk_tokens=256)
    with Operators() as operators:
        loss(hidden, weight, ids, advantages, old_per_token_logps=old)
    assert operators.names.count("mm") >= 4, "in one chunk after all"
    assert not {"index", "floor_divide", "arange"} & set(operators.names)
