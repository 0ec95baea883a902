"""Triton's interpreter in less time, with the same results: without what it does again and again, or for nothing."""

from dataclasses import replace
from typing import Any

TRITON = "3.6."  # of whose interpreter this holds; others run as they are


def hasten() -> None:
    try:
        import triton
        from triton.runtime import interpreter
    except ImportError:
        return
    if not triton.__version__.startswith(TRITON):
        return
    interpreter._patch_lang = OncePerLaunch(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = OncePerType(interpreter._get_np_dtype)
    # Without `debug` nobody is told that an integer has overflowed, and to find out takes longer than the sum itself.
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = replace(options, sanitize_overflow=options.debug)


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
