"""The number of steps that images need, and real runs as examples."""

from attrs import define

# After this many steps, drawings of 32 x 32 in four classes could be recognised; twice the side takes twice the steps.
_STEPS = 800
_SIDE = 32


@define(frozen=True)
class Example:
    """A real run of docs/gallery.md or docs/tutorial/pictures.md."""

    side: int  # of the images in pixels
    steps: int
    time: str  # in minutes, on two CPU cores
    images: str
    result: str


EXAMPLES = (  # by side
    Example(8, 1500, "1:43", "the digits", "The samples were as near to the digits as a perfect model's"),
    Example(16, 1900, "2:07", "600 drawings of four shapes", "The samples showed all four"),
    Example(32, 2000, "5:59", "3,781 emoji in nine categories", "An observer sorted 47 of 63 samples correctly"),
)


def fewest_steps(side: int) -> float:
    """Return the steps after which the shapes in images of this side can be recognised, roughly."""
    return _STEPS * side / _SIDE


def example(side: int) -> Example:
    """Return the run with images of this side, or of the next smaller one."""
    return [run for run in EXAMPLES if run.side <= max(side, EXAMPLES[0].side)][-1]
