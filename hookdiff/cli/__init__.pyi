from .arguments import (
    config_argument as config_argument,
    override_options as override_options,
    trust_option as trust_option,
)
from .command_line import COMMANDS as COMMANDS, group as group, main as main
