from .plugin import Memory as Memory
