"""Models of any library: adapted to the loop, initialised, and loaded from a file."""

from hookdiff.models.adapters import adapt
from hookdiff.models.attention import Form, attention, use_attention
from hookdiff.models.checks import check_labels
from hookdiff.models.compiler import compiled, compiler_errors, try_compiler
from hookdiff.models.load import check_file, load_into
from hookdiff.models.names import modules_named

__all__ = [
    "Form",
    "adapt",
    "attention",
    "check_file",
    "check_labels",
    "compiled",
    "compiler_errors",
    "load_into",
    "modules_named",
    "try_compiler",
    "use_attention",
]
