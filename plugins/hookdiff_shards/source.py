"""`source = "shards"`: samples in tar files."""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

from hookdiff.images import Store
from hookdiff.options import Handed, Writes
from hookdiff_shards import captions as texts
from hookdiff_shards.conditions import Items, parse
from hookdiff_shards.files import Files
from hookdiff_shards.indices import indices_of
from hookdiff_shards.labels import read_classes, read_encoded
from hookdiff_shards.places import expand
from hookdiff_shards.samples import Shards, is_array


def shards(
    path: str | list[str],
    image: str | None = None,
    label: str = "auto",
    classes: str | list[str] | None = None,
    conditions: dict[str, str] | None = None,
    captions: str | None = None,
    storage_options: Annotated[dict[str, Any] | None, Handed()] = None,
    index_dir: Annotated[str | None, Writes()] = None,
) -> Shards | Items:
    """Return the samples in shards: tar files as the library webdataset writes them.

    Samples are read in any order: an index of each shard, which is made once, has the position of each sample.

    Args:
        path: the shards: a path or a URL that fsspec reads, with ranges as in "train-{000..123}.tar", or stars; a
            folder, which means its .tar files; or a list of these
        image: extension of the pictures, such as "jpg"; default: any format, with one picture in each sample;
            "npy": arrays, such as latents
        label: extension of the labels: integers from 0 (-1: unknown), or names; "auto": "cls" if there are any;
            "none": no labels
        classes: the names of the classes in the order of their numbers, or a file of them, a .txt with a name on each
            line or a .json; default: classes.json or classes.txt beside the first shard, if there is one
        conditions: other members of a sample, as a table of names and extensions, such as { text = "t5.npy", size =
            "json:size" }. A member is an array (npy), a number or a list of numbers (json, or the value of a key in
            it), a number (txt, cls) or a picture
        captions: extension of the captions, such as "txt": the lines of a text; or "json:caption": a text or a list of
            texts, as the value of a key. A sample without such a member has no captions
        storage_options: options of fsspec for URLs. They are stored in the config of the run, which then needs --trust;
            give passwords by environment variables
        index_dir: folder of the indices, and of captions that were read; default: `hookdiff/shards` in the user's
            cache

    Raises:
        ValueError: for shards, members or labels that are missing or cannot be read.
        UserError: if a URL needs a package that is missing.
    """
    options, asked = storage_options or {}, parse(conditions or {})
    member = None if captions is None else texts.parse(captions)
    files = Files(expand(path, options), options)
    folder = Path(index_dir).expanduser() if index_dir else Store().folder / "shards"
    indices = indices_of(files, folder)
    names = read_classes(classes, files.shards[0].name, options) if label != "none" else None
    kind = partial(Items, asked) if asked or is_array(image) else Shards
    source: Shards | Items = kind(files, indices, image, label, names)
    source.encoded = read_encoded(files.shards[0].name, options)
    if member:
        column = source.column(indices, [member.extension])
        source.read_captions = partial(texts.read_captions, source, column, member, folder)
    return source
