"""Copy the flags of 256 countries and regions, 250 pixels wide, to a folder; a .txt beside each flag has its name.

npm pack svg-country-flags@1.2.10 && tar xzf svg-country-flags-1.2.10.tgz
python examples/flags.py package flags

The flags are in the public domain: https://www.npmjs.com/package/svg-country-flags
"""

import argparse
import json
import shutil
from pathlib import Path


def lay_out(package: Path, out: Path) -> int:
    """Copy the flags of the unpacked npm package to `out`, with captions; return their number."""
    names = json.loads((package / "countries.json").read_text("utf-8"))
    out.mkdir(parents=True, exist_ok=True)
    flags = sorted((package / "png250px").glob("*.png"))
    for flag in flags:
        shutil.copyfile(flag, out / flag.name)
        (out / flag.name).with_suffix(".txt").write_text(f"{names[flag.stem.upper()]}\n", "utf-8")
    return len(flags)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    print(f"{lay_out(options.package, options.out):,} flags in {options.out}")
