"""The plugin that keeps logged pictures as PNG files in the run directory."""

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path

from attrs import define

from hookdiff.disk.files import discard
from hookdiff.disk.paths import run_of
from hookdiff.errors import UserError
from hookdiff.events import Event
from hookdiff.history import find_pictures, picture_path
from hookdiff.hookspecs import hookimpl
from hookdiff.loop import Loop
from hookdiff.pictures import Picture

log = logging.getLogger("hookdiff")


@define(eq=False)
class Images:
    """Writes each logged picture to `NAME/step-00001000.png` in the run directory, with its info in a text chunk.

    A run that is resumed or rolled back removes the pictures of later steps, and makes them again; a run that starts
    anew removes those of an earlier run in its directory. A branch begins with copies of the pictures of the run that
    it continues.
    """

    @hookimpl(trylast=True)
    def on_ready(self, loop: Loop, resumed: bool) -> None:
        step = loop.progress.step
        self._cut(loop, step if resumed else -1)
        if resumed and loop.is_branch and loop.resume and loop.run_dir and loop.is_main:
            self._copy(loop.resume, loop.run_dir, step)

    @hookimpl
    def on_event(self, loop: Loop, event: Event) -> None:
        if event.kind == "rollback":
            self._cut(loop, loop.progress.step)

    def _cut(self, loop: Loop, step: int) -> None:
        """Remove the pictures of later steps than `step`."""
        if loop.run_dir and loop.is_main:
            for pictures in find_pictures(loop.run_dir, after=step).values():
                for path in pictures.values():
                    discard(path)

    def _copy(self, source: Path, run_dir: Path, until: int) -> None:
        try:
            found = find_pictures(run_of(source))
        except UserError:  # the checkpoint is in no run directory
            return
        for name, pictures in found.items():
            for step, path in pictures.items():
                copied = picture_path(run_dir, name, step)
                if step <= until and not copied.exists():
                    copied.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(path, copied)

    @hookimpl
    def on_images(self, loop: Loop, step: int, images: Mapping[str, Picture]) -> None:
        """Write the files; a file that cannot be written gives a warning."""
        if loop.run_dir is None or not loop.is_main:
            return
        for name, picture in images.items():
            path = picture_path(loop.run_dir, name, step)
            try:
                picture.with_info(name=name, step=step).save(path)
            except OSError as error:
                log.warning("%s cannot be written: %s", path, error.strerror or error)
