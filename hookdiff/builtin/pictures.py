"""The plugin that keeps logged pictures as PNG files in the run directory."""

import logging
from collections.abc import Mapping
from contextlib import suppress

from attrs import define

from hookdiff.errors import UserError
from hookdiff.log.event import Event
from hookdiff.log.picture import Picture
from hookdiff.loop.hookspecs import hookimpl
from hookdiff.loop.loop import Loop
from hookdiff.run_dir.layout import run_of
from hookdiff.run_dir.pictures_png import copy_pictures, picture_path, remove_pictures, write_picture

logger = logging.getLogger("hookdiff")


@define(eq=False)
class Pictures:
    """Writes each logged picture to `NAME/step-00001000.png` in the run directory, with its metadata in a text chunk.

    A run that is resumed or rolled back removes the pictures of later steps, and makes new ones. A run that starts
    anew removes the pictures of an earlier run in its directory. A run that continues another in a new directory (a
    branch) begins with copies of the other's pictures.
    """

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        if loop.run_dir and loop.is_main:
            remove_pictures(loop.run_dir, after=loop.progress.step if resumed else -1)
            if resumed and loop.is_branch and loop.resume:
                with suppress(UserError):  # the checkpoint is in no run directory
                    copy_pictures(run_of(loop.resume), loop.run_dir, until=loop.progress.step)

    @hookimpl
    def on_event(self, loop: Loop, event: Event) -> None:
        if event.kind == "rollback" and loop.run_dir and loop.is_main:
            remove_pictures(loop.run_dir, after=loop.progress.step)

    @hookimpl
    def on_images(self, loop: Loop, step: int, images: Mapping[str, Picture]) -> None:
        """Write the files; warn of a file that cannot be written."""
        if loop.run_dir is None or not loop.is_main:
            return
        for name, picture in images.items():
            try:
                write_picture(loop.run_dir, name, step, picture)
            except OSError as error:
                path = picture_path(loop.run_dir, name, step)
                logger.warning("%s cannot be written: %s", path, error.strerror or error)
