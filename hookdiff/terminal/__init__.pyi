from .bars import (
    Display as Display,
    bar_line as bar_line,
    find_display as find_display,
    flow as flow,
    work_lines as work_lines,
)
from .notice import notice as notice
from .pace import Work as Work, clock as clock, in_words as in_words, paced as paced, shown_by as shown_by
