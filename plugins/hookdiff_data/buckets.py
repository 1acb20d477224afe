"""Statistics of pictures in several sizes, such as aspect-ratio buckets: what is in each size, and what is cut off."""

from typing import Any

from hookdiff import Feed
from hookdiff.images import reader_of_source, size_name


def buckets(feed: Feed) -> dict[str, Any] | None:
    """Return statistics of the sizes of the samples of a bound `feed`, ready for JSON; None if they have one size.

    "cut_off" is the mean share of the pixels of a picture that is cut off, over the pictures that can be read.
    "batches" is the mean number of batches in an epoch.
    """
    if not (order := feed.by_shape):
        return None
    sized = reader_of_source(feed).prepared.sized
    assert sized is not None
    shares, batches, rows = sized.cut_off, order.mean_batches, list[dict[str, Any]]()
    parts = [(part, sized.numbers[part]) for part in (feed.training, feed.held_out_indices, feed.usable)]
    for number, shape in enumerate(sized.shapes):
        training, held_out, usable = (part[numbers == number] for part, numbers in parts)
        rows.append(
            {
                "size": size_name(shape),
                "training": len(training),
                "held_out": len(held_out),
                "batches": batches.get(shape, 0.0),
                "cut_off": float(shares[usable].mean()) if len(usable) else 0.0,
            }
        )
    worst = int(feed.usable[shares[feed.usable].argmax()])
    return {
        "sizes": sorted(rows, key=lambda row: -row["training"]),
        "cut_off": float(shares[feed.usable].mean()),
        "worst": {"name": feed.describe(worst), "cut_off": float(shares[worst])},
        "enlarged": int(sized.enlarged[feed.usable].sum()),
        "below_batch_size": [size_name(shape) for shape in order.small],
    }
