from .arguments import (
    check_exists as check_exists,
    check_free as check_free,
    check_output as check_output,
    chosen_weights as chosen_weights,
    config_argument as config_argument,
    config_or_run_argument as config_or_run_argument,
    device_option as device_option,
    guidance_option as guidance_option,
    json_option as json_option,
    out_option as out_option,
    override_options as override_options,
    overwrite_option as overwrite_option,
    path_argument as path_argument,
    run_argument as run_argument,
    seed_option as seed_option,
    settings_option as settings_option,
    solver_options as solver_options,
    trust_option as trust_option,
    weights_option as weights_option,
)
from .command_line import COMMANDS as COMMANDS, group as group, main as main
from .completion import complete_trackers as complete_trackers
from .schema import add_schema as add_schema
