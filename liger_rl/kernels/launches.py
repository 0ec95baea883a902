"""Kernels whose launches take the host less time than Triton's own.

Triton binds the arguments to names, writes down what the kernel has to be compiled for, turns that into a string and
compares every global constant, at each launch. Steps over few tokens or small heads wait for the host. On the host of
one H200 a launch took 43 us in the mean, and the same launch of a kernel that is known 17 us. Here the compiled kernel
is found by what NVIDIA's compiler is told of the arguments: their types, which addresses and integers are multiples of
16, and which integers are 1 or take 64 bits. The first launch of each, and all launches elsewhere, are Triton's own.

Triton asks some things before it launches: TRITON_DEBUG, instrumentation, hooks before a run, whether global constants
have changed. These count at the first launch alone. Its hooks around a launch see each.
"""

import inspect
from collections.abc import Iterable
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor
from triton.compiler import CompiledKernel

# Versions of Triton whose compiler is told no more than `kinds` says, and whose compiled kernels are launched as here.
KNOWN_TRITON = ((3, 4), (3, 10))  # from, before
LOW_BITS = 15  # 0 in multiples of 16


class Launched:
    """Over `triton.jit` or `gluon.jit`: kernel[grid](*arguments, **options) as theirs.

    Constexprs come after all other arguments, by place or by name; the others by place.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        parameters = inspect.signature(kernel.fn).parameters
        # As Triton tells them; an annotation may be a string.
        constant = ["constexpr" in str(parameter.annotation) for parameter in parameters.values()]
        if constant != sorted(constant):
            raise TypeError(f"constexprs of {kernel.fn.__name__} must come after all other parameters")
        self.variable = constant.count(False)
        self._defaults = [(name, parameter.default) for name, parameter in parameters.items()]
        self._compiled = isinstance(kernel, triton.JITFunction)  # and not interpreted
        self._known: dict[tuple[object, ...], tuple[CompiledKernel, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> partial[None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if len(arguments) < self.variable:
            raise TypeError(f"{self.kernel.fn.__name__} takes {self.variable} arguments by place, got {len(arguments)}")
        if not (self._compiled and _may_be_known()):
            self.kernel[grid](*arguments, **options)
            return
        variable, constant = arguments[: self.variable], arguments[self.variable :]
        key = (torch.cuda.current_device(), *kinds(variable), *constant, *options, *options.values())
        found = self._known.get(key)
        if found is not None:
            compiled, constants = found
            whole_grid = *grid, 1, 1
            compiled[whole_grid](*variable, *constants)
            return
        compiled = self.kernel[grid](*arguments, **options)
        if isinstance(compiled, CompiledKernel):  # and not still being compiled
            others = (options.get(name, default) for name, default in self._defaults[len(arguments) :])
            self._known[key] = compiled, (*constant, *others)


def cdiv(total: int, step: int) -> int:
    """Steps that cover the total. Triton's own function takes the host microseconds, as does that of the next one."""
    return -(-total // step)


def next_power_of_2(number: int) -> int:
    """The least power of 2 that is no smaller than the number, which is at least 1."""
    return 1 << (number - 1).bit_length()


@cache
def _may_be_known() -> bool:
    version = tuple(int(part) for part in triton.__version__.split(".")[:2])
    return torch.cuda.is_available() and torch.version.hip is None and KNOWN_TRITON[0] <= version < KNOWN_TRITON[1]


def kinds(arguments: Iterable[Any]) -> list[object]:
    """What a kernel is compiled for of its arguments: equal for two lists only if one compiled kernel takes both."""
    found: list[object] = []
    for value in arguments:
        if value is None:
            found.append(None)
        elif isinstance(value, Tensor):
            found.append((value.dtype,) if value.data_ptr() & LOW_BITS else value.dtype)
        elif isinstance(value, bool):
            found.append(bool)
        elif isinstance(value, int):
            bits = 32 if -(1 << 31) <= value < 1 << 31 else 63 if value < 1 << 63 else 64
            found.append("1" if value == 1 else bits if value & LOW_BITS else -bits)
        elif isinstance(value, float):
            found.append(float)
        elif isinstance(value, tuple):
            found += (type(value), len(value), *kinds(value))
        else:
            # A descriptor, whose address and strides the tensor memory accelerator asks to be multiples of 16.
            found += (type(value), value.base.dtype, *value.block_shape, getattr(value, "layout", None))
    return found
