"""Pictures know the data that they were drawn from, so that a test sees one that is older than its numbers."""

import hashlib
import json
from pathlib import Path
from typing import Any

KEY = "Data"  # of a PNG's metadata


def digest(record: Any) -> str:
    """Of what is in a JSON file."""
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def make_panels(*shape: int, **options: Any) -> tuple[Any, Any]:
    """A figure that needs no screen, and its axes as an array of `shape`, rows and columns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(*shape, layout="constrained", squeeze=False, **options)


def save(figure: Any, path: Path, record: Any) -> None:
    """Write the PNG and close the figure. `record`: all of the JSON that it shows."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=150, metadata={"Software": None, KEY: digest(record)})
    pyplot.close(figure)


def write_out(axis: Any) -> None:
    """Ticks of an axis, also of a logarithmic one, as plain numbers."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
