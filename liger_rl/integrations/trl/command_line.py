"""TRL's command line starts a training script in processes of its own: `liger_rl.trl` patches each of them."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from accelerate.commands.launch import launch_command, launch_command_parser
from accelerate.utils import patch_environment

from liger_rl.integrations.patching import Patch
from liger_rl.integrations.trl.settings import get_settings

_OPTIONS = "LIGER_RL_PATCH_TRL"  # environment variable: the launcher's options of `patch_trl`, for the processes


def launch_training_script(
    script_name: str,
    launch_args: list[str],
    training_script_args: list[str],
    *,
    launch_command_fn: Callable[[Any], None] = launch_command,
    launch_parser_fn: Callable[[], Any] = launch_command_parser,
) -> None:
    """`trl.cli.accelerate_launcher.launch_training_script`, of TRL's script in patched processes."""
    script = ["--module", "liger_rl.trl", script_name.removesuffix(".py"), *training_script_args]
    with patch_environment(**{_OPTIONS: json.dumps(asdict(get_settings()))}):
        launch_command_fn(launch_parser_fn().parse_args([*launch_args, *script]))


def read_options() -> dict[str, Any]:
    """The options with which the process that launched this one was patched; {} for the defaults."""
    return json.loads(os.environ.get(_OPTIONS, "{}"))


PATCH = Patch("trl.cli.accelerate_launcher:launch_training_script", launch_training_script)
