"""Copy 3,781 emoji of 64 x 64 pixels to a folder of nine classes; a .txt beside each emoji has its names.

npm pack emoji-datasource-twitter@16.0.0 && tar xzf emoji-datasource-twitter-16.0.0.tgz
python examples/emoji_folder.py package emoji [--one-tone] [--without "orange heart"]

With --one-tone the script leaves out pictures that differ from another only in their skin tone; 1,906 pictures stay.
"""

import argparse
import json
import shutil
from collections.abc import Collection
from pathlib import Path


def lay_out(package: Path, out: Path, *, one_tone: bool, without: Collection[str]) -> int:
    """Copy the pictures of the unpacked npm package to `out`/CATEGORY, with captions; return their number.

    Emoji with a name in `without` are left out.
    """
    num = 0
    all_emoji = json.loads((package / "emoji.json").read_text("utf-8"))
    tones = {each["unified"]: _plain(each["short_name"]) for each in all_emoji if each["category"] == "Component"}
    for emoji in all_emoji:
        names = list(dict.fromkeys(map(_plain, (emoji["name"], *emoji["short_names"]))))
        if emoji["category"] == "Component" or not set(names).isdisjoint(without):  # a component is only a skin tone
            continue
        (out / emoji["category"]).mkdir(parents=True, exist_ok=True)
        variations = {} if one_tone else emoji.get("skin_variations", {})
        for code, variation in {"": emoji, **variations}.items():
            path = out / emoji["category"] / variation["image"]
            shutil.copyfile(package / "img" / "twitter" / "64" / variation["image"], path)
            tone = "".join(f", {tones[part]}" for part in dict.fromkeys(code.split("-")) if part)
            path.with_suffix(".txt").write_text("".join(f"{name}{tone}\n" for name in names), "utf-8")
            num += 1
    return num


def _plain(name: str) -> str:
    return name.lower().replace("_", " ").replace("-", " ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--one-tone", action="store_true")
    parser.add_argument("--without", nargs="+", default=[], metavar="NAME")
    options = parser.parse_args()
    num = lay_out(options.package, options.out, one_tone=options.one_tone, without=options.without)
    print(f"{num:,} pictures in {options.out}")
