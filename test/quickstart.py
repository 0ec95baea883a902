"""examples/quickstart.ipynb, run in a kernel. `make notebook` keeps what comes out of it."""

import copy
import os
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

PATH = Path(__file__).resolve().parent.parent / "examples" / "quickstart.ipynb"


def main() -> None:
    """Fresh outputs in the notebook: warnings and times, which differ from host to host, are left out."""
    notebook = nbformat.read(PATH, as_version=4)
    metadata = copy.deepcopy(notebook.metadata)
    # Over sockets that are files: a port may be taken or forbidden. Their paths have to be short.
    sockets = Config({"KernelManager": {"transport": "ipc"}})
    options = {"timeout": 120, "record_timing": False, "coalesce_streams": True, "config": sockets}
    client = NotebookClient(notebook, kernel_name="python3", **options)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JUPYTER_RUNTIME_DIR"] = folder
        client.execute()
    notebook.metadata = metadata
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    nbformat.write(notebook, PATH)


if __name__ == "__main__":
    main()
