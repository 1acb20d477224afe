from pathlib import Path

import numpy

from hookdiff.images import Folder, Store, Transforms, feed_of
from tests.images.variants import SIDE, variants

LOSSY = ("jpg", "avif")


def test_every_picture_decodes_as_its_twin_or_is_refused(tmp_path: Path) -> None:
    twins = {}
    for name, content, twin in variants():
        assert name not in twins
        (tmp_path / name).write_bytes(content)
        twins[name] = twin
    feed = feed_of(Folder(str(tmp_path)), Transforms(channels=3), Store(unreadable="skip"))
    names = {index: Path(feed.describe(index)).name for index in range(len(twins))}
    survey = feed.reader.prepared.survey
    assert {names[index] for index in survey.unreadable | survey.undecodable} == {
        name for name, twin in twins.items() if twin is None
    }
    wrong, pixels = {}, feed.reader.prepared.samples.images.permute(0, 2, 3, 1).numpy()
    for index, name in names.items():
        if (twin := twins[name]) is not None:
            found = numpy.abs(pixels[index] - numpy.broadcast_to(twin.reshape(SIDE, SIDE, -1), (SIDE, SIDE, 3))).max()
            if found > (6 if name.endswith(LOSSY) else 2):
                wrong[name] = found
    assert not wrong
