from .folder import find_checkpoints as find_checkpoints, read_checkpoint as read_checkpoint
from .plugin import Checkpoint as Checkpoint
