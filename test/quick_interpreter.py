"""Triton's interpreter in less time, with the same results: without what it does again and again, or for nothing."""

import math
import operator
from dataclasses import replace
from typing import Any

TRITONS = ("3.7.", "3.9.")  # the interpreters that this was compared with; others run as they are


def hasten() -> None:
    try:
        import triton
        from triton.language import core, semantic
        from triton.runtime import interpreter
    except ImportError:
        return
    if not triton.__version__.startswith(TRITONS):
        return
    interpreter._patch_lang = OncePerLaunch(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = OncePerType(interpreter._get_np_dtype)
    # Without `debug` nobody is told that an integer has overflowed, and to find out takes longer than the sum itself.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)
    once_per_shape(core)
    without_equal_shapes(semantic.TritonSemantic)


class OncePerLaunch:
    """A launch lends the language to NumPy, and takes it back at its end. The functions that it calls find it lent, but
    Triton looks through all of the language again for each call, which took a third of the time."""

    def __init__(self, lend: Any, nothing: Any) -> None:
        self.lend, self.nothing = lend, nothing
        self.lent: set[int] = set()  # what a function's names are looked up in: it says which language it sees

    def __call__(self, function: Any) -> Any:
        seen = id(function.__globals__)
        if seen in self.lent:
            return self.nothing()
        first, scope = not self.lent, self.lend(function)
        self.lent.add(seen)
        if first:
            take_back = scope.restore

            def restore() -> None:
                self.lent.clear()
                take_back()

            scope.restore = restore
        return scope


class OncePerType:
    """Triton makes a dictionary of all types to look one up."""

    def __init__(self, ask: Any) -> None:
        self.ask = ask
        self.known: dict[str, Any] = {}

    def __call__(self, of: Any) -> Any:
        name = of.scalar.name
        if name not in self.known:
            self.known[name] = self.ask(of)
        return self.known[name]


def once_per_shape(core: Any) -> None:
    """Triton checks and wraps the shape of every value that an operation makes, which took a third of the time."""
    as_it_was = core.block_type.__init__
    wrapped: dict[tuple[int, ...], Any] = {(): (core.tuple([]), core.constexpr(1))}
    checked: dict[tuple[int, ...], Any] = {}

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        key = tuple(map(operator.index, shape))
        if key not in checked:
            as_it_was(self, element_ty, shape)
            checked[key] = self.shape, self.numel
        self.element_ty = element_ty
        self.shape, self.numel = checked[key]
        self.name = f"<{key}, {element_ty}>"

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape.values) if type.is_block() else ()
        if key not in wrapped:
            wrapped[key] = core.tuple([core.constexpr(size) for size in key]), core.constexpr(math.prod(key))
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = wrapped[key]

    core.block_type.__init__ = init_block
    core.tensor.__init__ = init_tensor


def without_equal_shapes(semantic: Any) -> None:
    """Two blocks of one shape need no broadcast, which Triton finds out number by number."""
    broadcast = semantic.broadcast_impl_value

    def broadcast_impl_value(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    semantic.broadcast_impl_value = broadcast_impl_value
