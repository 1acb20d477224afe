"""Lay emoji of 64 x 64 pixels out as a folder of pictures with captions, to train on.

npm pack emoji-datasource-twitter@16.0.0 && tar xzf emoji-datasource-twitter-16.0.0.tgz
python examples/emoji_captions.py package captioned
"""

import argparse
import json
import shutil
from pathlib import Path


def lay_out(package: Path, out: Path) -> int:
    """Copy the pictures of the unpacked npm package to `out`, each with a .txt of its names; return their number."""
    out.mkdir(parents=True, exist_ok=True)
    emoji = json.loads((package / "emoji.json").read_text("utf-8"))
    tones = {one["unified"]: _plain(one["short_name"]) for one in emoji if one["category"] == "Component"}
    num = 0
    for one in emoji:
        names = dict.fromkeys([_plain(one["name"]), *map(_plain, one["short_names"])])
        variants = one.get("skin_variations", {}).items()
        pictures = [(one["image"], "")] + [(each["image"], _tone(code, tones)) for code, each in variants]
        for image, tone in pictures if one["category"] != "Component" else ():
            shutil.copyfile(package / "img" / "twitter" / "64" / image, out / image)
            text = "\n".join(f"{name}, {tone}" if tone else name for name in names)
            (out / image).with_suffix(".txt").write_text(f"{text}\n", "utf-8")
            num += 1
    return num


def _plain(name: str) -> str:
    return name.lower().replace("_", " ").replace("-", " ")


def _tone(code: str, tones: dict[str, str]) -> str:
    return " and ".join(dict.fromkeys(tones[part] for part in code.split("-")))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(f"{lay_out(options.package, options.out):,} pictures in {options.out}")
