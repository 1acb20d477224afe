from .adopted import ADOPTED as ADOPTED
from .contract_checks import implements as implements
from .counts import Progress as Progress
from .device_part import DevicePart as DevicePart
from .gradients import Gradients as Gradients
from .hookspecs import HOOK_NAMES as HOOK_NAMES, HOOKS as HOOKS, Hooks as Hooks, hooks_of as hooks_of
from .saved import keeps_state as keeps_state, restore_state as restore_state, state_of as state_of
