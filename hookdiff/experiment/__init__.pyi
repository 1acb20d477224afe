from .build import (
    build_feed as build_feed,
    build_loop as build_loop,
    make_model as make_model,
    pick_device as pick_device,
    set_by_data as set_by_data,
)
from .config import Config as Config, load_config as load_config, make_plugin as make_plugin
from .discovery import LeftOut as LeftOut, installed_that as installed_that
from .length import num_steps as num_steps
from .loaded_run import Run as Run, load_run as load_run, run_config as run_config
from .optimizers import Weight as Weight, fastest_kernel as fastest_kernel, groups as groups, matching as matching
from .part import Part as Part
from .probe import try_config as try_config, try_optimizers as try_optimizers
