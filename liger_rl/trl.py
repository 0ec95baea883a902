"""TRL's command line under `patch_trl()`.

python -m liger_rl.trl sft --model_name_or_path ...  # the command and the options of `trl`
accelerate launch -m liger_rl.trl sft --model_name_or_path ...
"""

import os
import runpy
import sys

from liger_rl.integrations.trl import patch_trl
from liger_rl.integrations.trl.command_line import read_options


def main() -> None:
    """Run TRL's script if a launcher has started this process, and otherwise TRL's command line, which is one."""
    patch_trl(**read_options())
    from trl.cli.commands import get_commands
    from trl.cli.main import main as run_command_line

    # accelerate sets the one, torchrun the other.
    if {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"}.isdisjoint(os.environ):
        raise SystemExit(run_command_line())
    names = [command.name for command in get_commands()]
    if sys.argv[1:2] == [] or sys.argv[1] not in names:
        raise SystemExit(f"liger_rl.trl must be followed by one of {', '.join(names)}, got {' '.join(sys.argv[1:2])!r}")
    del sys.argv[0]
    runpy.run_module(f"trl.scripts.{sys.argv[0].replace('-', '_')}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
