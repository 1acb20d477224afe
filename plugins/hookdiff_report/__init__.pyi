from .plugin import Report as Report
