"""Messages that users should see, even in a script that sets up no logging."""

import logging

logger = logging.getLogger("hookdiff")


def notice(text: str) -> None:
    """Log `text` at the level INFO; a process without log handlers, such as a script, prints it to stderr."""
    if logger.hasHandlers() or logging.lastResort is None:
        logger.info("%s", text)
    else:
        logging.lastResort.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))
