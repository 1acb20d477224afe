from .adamw import AdamW as AdamW
from .adapters import (
    adapt as adapt,
    check_labels as check_labels,
    num_classes_of as num_classes_of,
    takes_time_later as takes_time_later,
)
from .attention_forms import Form as Form, attention as attention, use_attention as use_attention
from .base import has_base as has_base, leave_out_base as leave_out_base, left_out as left_out, mark_base as mark_base
from .compiler import compiled as compiled, compiler_errors as compiler_errors, try_compiler as try_compiler
from .footprint import HeldBytes as HeldBytes, as_fake as as_fake, storages as storages
from .init import LAYERS as LAYERS, is_zero as is_zero, layers_called as layers_called
from .load import check_file as check_file, load_into as load_into, load_state as load_state
from .names import modules_named as modules_named
from .plain import plain_tensors as plain_tensors
from .sampler import Sampler as Sampler
from .sampling_arguments import conditions_of_samples as conditions_of_samples
from .weights import Buffers as Buffers, choose_weights as choose_weights, holding as holding
