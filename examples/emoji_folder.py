"""Lay 3,781 emoji of 64 x 64 pixels out as a folder of nine classes, to train on.

npm pack emoji-datasource-twitter@16.0.0 && tar xzf emoji-datasource-twitter-16.0.0.tgz
python examples/emoji_folder.py package emoji
"""

import argparse
import json
import shutil
from pathlib import Path


def lay_out(package: Path, out: Path) -> int:
    """Copy the pictures of the unpacked npm package to `out`/CATEGORY; return their number."""
    num = 0
    for emoji in json.loads((package / "emoji.json").read_text("utf-8")):
        if emoji["category"] == "Component":  # a colour of skin alone
            continue
        (out / emoji["category"]).mkdir(parents=True, exist_ok=True)
        for one in (emoji, *emoji.get("skin_variations", {}).values()):
            shutil.copyfile(package / "img" / "twitter" / "64" / one["image"], out / emoji["category"] / one["image"])
            num += 1
    return num


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(f"{lay_out(options.package, options.out):,} pictures in {options.out}")
