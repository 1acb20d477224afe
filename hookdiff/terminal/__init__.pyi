from .bars import (
    Display as Display,
    bar_line as bar_line,
    find_display as find_display,
    flow as flow,
    work_lines as work_lines,
)
from .notice import notice as notice
from .pace import Work as Work, paced as paced, shown_by as shown_by
from .words import (
    byte_size as byte_size,
    duration as duration,
    in_words as in_words,
    rate as rate,
    step_label as step_label,
)
