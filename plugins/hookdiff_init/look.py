"""Looks at a folder of images, for the properties on which the config depends."""

from collections.abc import Mapping
from pathlib import Path

from attrs import define, evolve

from hookdiff import UserError
from hookdiff.images import Folder, Store, Transforms, feed_of, reader_of_source

_PER_CLASS = 8  # with fewer images in each sub-folder, the sub-folders are not classes
_DECODED = 5_000  # images that are decoded, to find broken files; this many photos take a minute
_ROWS = 10  # classes that a grid shows
_PROMPTS = 4  # captions that a grid shows
_SMALL = 0.1  # share of the images that may be smaller than the training images


@define(frozen=True)
class Captions:
    """The captions to train on."""

    lacking: int  # images without a caption
    different: tuple[str, ...]  # in the order of the images

    @property
    def prompts(self) -> tuple[str, ...]:
        """Captions from all over the folder, to draw."""
        num = min(len(self.different), _PROMPTS)
        return tuple(self.different[k * len(self.different) // num] for k in range(num))


@define(frozen=True)
class Texts:
    """The text encoder for the captions."""

    encoder: str  # the folder
    width: int  # features of a token
    length: int  # tokens to which a caption is padded or truncated
    longest: int  # tokens of the longest caption


@define(frozen=True)
class Pictures:
    """The images to train on."""

    path: str | None  # None: the digits
    num: int  # images that can be read
    channels: int
    side: int  # in pixels: the sides of nearly all images are at least this long
    sizes: Mapping[tuple[int, int], int]  # counts by width and height
    classes: tuple[str, ...] = ()
    flat: bool = False  # sub-folders are not classes
    mixed: bool = False  # grey and colour
    transparent: bool = False
    unreadable: int = 0
    others: int = 0  # files that are not images
    captioned: int = 0  # images with a .txt beside them
    captions: Captions | None = None
    texts: Texts | None = None

    @property
    def summary(self) -> str:
        """Number, colour and classes, in words."""
        classes = f" in {len(self.classes):,} classes" if self.classes else ""
        captions = " with captions" * bool(self.captions)
        return f"{self.num:,} {self.colour} image{'s' * (self.num != 1)}{classes}{captions}"

    @property
    def colour(self) -> str:
        return "grey" if self.channels == 1 else "colour"

    @property
    def are_captioned(self) -> bool:
        """Whether at least half of the images have a .txt beside them."""
        return 0 < self.num <= 2 * self.captioned

    @property
    def rows(self) -> int:
        """The number of classes or prompts in a grid; 0: it has no rows."""
        return len(self.captions.prompts) if self.captions else min(len(self.classes), _ROWS)

    @property
    def square(self) -> bool:
        """Whether all images are squares of one size."""
        return list(self.sizes) == [(self.side, self.side)]

    @property
    def usual_size(self) -> str:
        """The size that most images have."""
        width, height = max(self.sizes, key=lambda size: self.sizes[size])
        return f"{width} x {height}"

    def without_classes(self) -> "Pictures":
        """Return the same pictures, of which the sub-folders are not classes."""
        return evolve(self, classes=(), flat=self.flat or bool(self.classes))

    def smaller(self, side: int) -> int:
        """Return the number of images with a side below `side`."""
        return sum(count for size, count in self.sizes.items() if min(size) < side)


def digits() -> Pictures:
    """Return the properties of the source "digits"."""
    return Pictures(None, 1797, 1, 8, {(8, 8): 1797}, tuple(map(str, range(10))))


def look(path: Path) -> Pictures:
    """Read the images below `path`, or only their headers if there are many. Raises UserError if there is no image."""
    try:
        source = Folder(str(path))
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from None
    classes, flat = source.classes or (), bool(source.problems)
    if flat or len(source) < _PER_CLASS * len(classes):
        classes, flat = (), True
        source = Folder(str(path), "none")
    # Options that any images fit. Only the headers of many are read.
    store = Store(store="memory" if len(source) <= _DECODED else "none", unreadable="skip")
    feed = feed_of(source, Transforms(image_size=2, upscale=True, channels=3), store)
    survey = reader_of_source(feed).prepared.survey
    kinds, num = survey.kinds, len(source) - len(survey.unreadable | survey.undecodable)
    sizes: dict[tuple[int, int], int] = {}
    for kind in kinds:
        sizes[kind.width, kind.height] = sizes.get((kind.width, kind.height), 0) + kind.count
    channels = {kind.channels for kind in kinds}
    return Pictures(
        path=str(path),
        num=num,
        channels=max(channels),
        side=_side(sizes),
        sizes=sizes,
        classes=tuple(classes),
        flat=flat,
        mixed=len(channels) > 1,
        transparent=any(kind.mode in ("LA", "PA", "RGBA") for kind in kinds),
        unreadable=len(source) - num,
        others=sum(count for count, _ in source.passed_over.values()),
        captioned=sum(source.path_of(index).with_suffix(".txt").is_file() for index in range(len(source))),
    )


def read_captions(pictures: Pictures) -> Captions:
    """Read the captions beside the images of a folder, of which some have one.

    Raises:
        UserError: for captions that cannot be read.
    """
    by_name = Folder(str(pictures.path), "none", "txt").texts
    assert by_name is not None
    captions = by_name["text"]
    lacking = sum(not each for each in captions)
    return Captions(lacking, tuple(dict.fromkeys(text for each in captions for text in each)))


def _side(sizes: Mapping[tuple[int, int], int]) -> int:
    """Return the largest side for which at most a small share of the images is smaller."""
    smaller, allowed = 0, _SMALL * sum(sizes.values())
    for size in sorted(sizes, key=min):
        smaller += sizes[size]
        if smaller > allowed:
            break
    return min(size)
