"""A call that torch.compile leaves out of its graphs. Imported while Dynamo traces, because it loads Dynamo."""

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable
def run_in_eager_mode(function: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
    return function(*args, **keywords)
