"""`Launched` finds the kernel that Triton itself would take."""

import ast
import itertools
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import jit  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

import liger_rl  # noqa: E402
from devices import NEEDS_GPU  # noqa: E402
from liger_rl.kernels import epilogue  # noqa: E402
from liger_rl.kernels.launches import Launched, kinds  # noqa: E402
from liger_rl.kernels.matrix_triton import Rows  # noqa: E402
from liger_rl.kernels.transform import LogitSteps, LogitTransform  # noqa: E402

PACKAGE = Path(liger_rl.__file__).parent


def tensors() -> list[torch.Tensor]:
    whole = [torch.zeros(64, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)]
    return [*whole, *(part[first:] for part in whole[:2] for first in (1, 2, 4, 8))]


EDGES = [sign * 2**bits + more for sign in (1, -1) for bits in (0, 4, 31, 40) for more in (-1, 0, 1, 16)]
NUMBERS = [*EDGES, 2**63 - 1, 2**63, 2**63 + 1]
PAIRS = [Rows(first, stride, 3) for first, stride in itertools.product(tensors()[:6], (1, 8, 16))]


def values() -> list[object]:
    tuples = [*PAIRS, (None, 1.5), (2.0, None), ()]
    return [None, True, False, 0.0, 1.0, np.float64(1.0), *NUMBERS, *tensors(), *tuples]


@pytest.mark.skipif(not hasattr(jit, "native_specialize_impl"), reason="Triton before 3.6 tells it in another way")
def test_values_of_one_kind_are_compiled_for_alike():
    backend = make_backend(GPUTarget("cuda", 90, 32))
    told: dict[object, object] = {}
    for value in values():
        # Not a constant, and specialised as far as Triton can.
        found = jit.native_specialize_impl(backend, value, False, True, True)
        assert told.setdefault(tuple(kinds([value])), found) == found, value
    assert len(told) > 20


def test_descriptors_differ_by_dtype_and_block():
    matrices = [torch.zeros(32, 64, dtype=dtype) for dtype in (torch.bfloat16, torch.float16)]
    blocks = ([16, 64], [32, 64])
    told = {tuple(kinds([TensorDescriptor.from_tensor(*pair)])) for pair in itertools.product(matrices, blocks)}
    assert len(told) == 4
    assert tuple(kinds([TensorDescriptor.from_tensor(matrices[0][:16], blocks[0])])) in told


def launched_names(tree: ast.Module) -> set[str]:
    """What is launched by name."""
    calls = (
        node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    )
    return {call.value.id for call in calls if isinstance(call.value, ast.Name)}


def test_every_kernel_of_the_package_is_launched_so():
    number = 0
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        names = launched_names(tree) & functions
        if not names:
            continue
        module = import_module(".".join(("liger_rl", *path.relative_to(PACKAGE).with_suffix("").parts)))
        for name in names:
            kernel = getattr(module, name)
            assert isinstance(kernel, Launched), f"{path.name}: {name}"
            number += 1
    assert number > 35
    if epilogue.gluon_is_known():
        for module, name in (("hopper_gluon", "fold_kernel"), ("hopper_pairs_gluon", "pair_kernel")):
            assert isinstance(getattr(import_module(f"liger_rl.kernels.{module}"), name), Launched)


def test_constexprs_come_last():
    def between(first, SIZE: tl.constexpr, second):
        pass

    with pytest.raises(TypeError, match="constexprs of between must come after all other parameters"):
        Launched(triton.jit(between))


def test_an_annotation_may_be_a_string():
    def kernel(first, second, SIZE: "tl.constexpr"):
        pass

    assert Launched(triton.jit(kernel)).variable == 2


def test_arguments_by_name():
    with pytest.raises(TypeError, match="_write takes 6 arguments by place, got 1"):
        _write[(1,)](torch.empty(8), start=None, number=1, free=1, pair=None, factor=1.0, SIZE=8)


def test_temperatures_of_numpy():
    steps = (LogitSteps.of(LogitTransform(temperature=number)) for number in (0.7, np.float64(0.7)))
    assert kinds([next(steps)]) == kinds([next(steps)])


def test_kinds_of_several_arguments_are_not_mixed_up():
    one = torch.zeros(64)
    lists = ([(one, one), one], [(one,), one, one], [one, one, one], [one[1:], one], [one, one[1:]], [(one, one, one)])
    assert len({tuple(kinds(arguments)) for arguments in lists}) == len(lists)


@Launched
@triton.jit(do_not_specialize=["free"])
def _write(out, start, number, free, pair, factor, SIZE: tl.constexpr, DOUBLE: tl.constexpr = False):
    place = tl.arange(0, SIZE)
    value = (number + free).to(tl.float64) * factor
    if start is not None:
        value += tl.load(start).to(tl.float64)
    value += tl.load(pair.start).to(tl.float64) + pair.stride
    tl.store(out + place, tl.zeros((SIZE,), tl.float64) + (value * 2 if DOUBLE else value))


@NEEDS_GPU
def test_results_are_those_of_triton():
    out = torch.empty(8, dtype=torch.float64, device="cuda")
    ramp = torch.arange(1, 65, dtype=torch.float32, device="cuda")
    cases = itertools.product(
        (None, ramp, ramp[1:], ramp[4:].bfloat16()), (1, 2, 16, 2**31, 2**33 + 1), (1, 7), (1, 32)
    )
    for _ in range(2):  # compiled, then found
        for start, number, free, stride in cases:
            for double in (False, True):
                _write[(1,)](out, start, number, free, Rows(ramp[3:], stride, 1), 0.5, SIZE=8, DOUBLE=double)
                expected = (number + free) * 0.5 + (0 if start is None else start[0].item()) + 4 + stride
                assert out.tolist() == [expected * (2 if double else 1)] * 8
        # By place, and with what is not given.
        _write[(1, 1)](out, None, 3, 4, Rows(ramp, 1, 1), 1.0, 4)
        assert out[:4].tolist() == [9.0] * 4


@NEEDS_GPU
def test_the_second_launch_is_found():
    kernel = Launched(_write.kernel)
    out, ramp = torch.empty(8, dtype=torch.float64, device="cuda"), torch.ones(4, device="cuda")
    for number in (2, 3, 5):
        kernel[(1,)](out, None, number, 1, Rows(ramp, 2, 1), 0.5, SIZE=8)
    assert len(kernel._known) == 1
    kernel[(1,)](out, None, 16, 1, Rows(ramp, 2, 1), 0.5, SIZE=8)
    assert len(kernel._known) == 2
