"""What lies in a folder of pictures and is not used is said by each command that reads the folder."""

import io
import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli
from PIL import Image

from tests.conftest import check_facts, check_refused, pixels

BROKEN = (2, 27, "broken.png")  # unreadable, of all, and the first
OTHERS = (3, "2 .txt", "more.txt", "1 .cr2", "raw.cr2")
USED = 25  # 24 files, and one of 16 bits that is called .jfif


@pytest.fixture
def here(pictures: Path) -> Path:
    folder = pictures / "pictures"
    deep = io.BytesIO()
    Image.fromarray(numpy.arange(144, dtype=numpy.uint16).reshape(12, 12) * 400).save(deep, "PNG")
    (folder / "ant" / "deep.jfif").write_bytes(deep.getvalue())
    (folder / "ant" / "broken.png").write_bytes(b"no picture")
    whole = io.BytesIO()
    Image.fromarray(pixels(7, 40)).save(whole, "PNG")
    (folder / "bee" / "cut.png").write_bytes(whole.getvalue()[:-900])
    for name in ("notes.txt", "more.txt", "raw.cr2", "ant/00.txt", ".DS_Store"):
        (folder / name).write_text("no picture")
    return pictures


@pytest.fixture
def say(hookdiff: Any, caplog: pytest.LogCaptureFixture) -> Any:
    """Return a function that runs the command line to an exit code, and returns stdout, and stderr with the log."""

    def call(*words: object, code: int = 0) -> tuple[str, str]:
        caplog.clear()
        ended, out, err = hookdiff(*words)
        assert ended == code, err
        return out, err + caplog.text

    return call


SKIP = ("--set", "data.unreadable=skip", "--set", "data.channels=3")


@pytest.mark.wide
def test_each_command_says_what_is_left_out_of_a_folder(here: Path, say: Any, hookdiff: Any) -> None:
    _, err = say("run", "config.toml", "--out", "stopped", "--set", "data.channels=3", code=2)
    check_facts(err, *BROKEN[:2], "broken.png", "cut.png", "unreadable = 'skip'")
    check_facts(say("run", "config.toml", *SKIP, "--out", "run", "--plugins", "checkpoint")[1], *BROKEN, *OTHERS)
    found = [json.loads(line) for line in (here / "run" / "events.jsonl").read_text().splitlines()]
    broken, others = (event["text"] for event in found if event["kind"] == "finding")
    check_facts(broken, *BROKEN)
    check_facts(others, *OTHERS)
    say("report", "run")
    page = (here / "run" / "report.html").read_text()
    check_facts(page, *BROKEN, *OTHERS)
    assert "has reported no problem" not in page

    out, err = say("data", "config.toml", *SKIP, "--json", "--seconds", 0)
    check_facts(err, *BROKEN, *OTHERS)
    report = json.loads(out)
    passed_over = {".cr2": {"count": 1, "first": "raw.cr2"}, ".txt": {"count": 2, "first": "more.txt"}}
    assert (report["unreadable"]["count"], report["passed_over"]) == (2, passed_over)
    check_facts(say("data", "config.toml", *SKIP, "--seconds", 0)[0], "2 .txt", "1 .cr2")
    found = json.loads(hookdiff("doctor", "config.toml", *SKIP, "--json", "--steps", 2)[1])["findings"]
    logged = [one["what"] for one in found if one["name"].startswith("logged")]
    check_facts(logged[0], *BROKEN[1:])  # it reads the headers only
    check_facts(logged[1], *OTHERS)

    check_facts(say("sample", "run", "--images", "pictures", "--steps", 1, "--each", "made")[1], *BROKEN, *OTHERS)
    assert len(list((here / "made").iterdir())) == USED
    for name in ("ant/broken.png", "bee/cut.png", "raw.cr2"):
        _, err = say("sample", "run", "--images", f"pictures/{name}", "--steps", 1, code=2)
        check_facts(err, f"pictures/{name}")


def test_a_distance_leaves_out_what_cannot_be_read(here: Path, say: Any, hookdiff: Any) -> None:
    for path in (here / "pictures").rglob("*.png"):
        if path.name not in ("broken.png", "cut.png"):
            Image.open(path).convert("L").resize((8, 8)).save(path)
    (here / "pictures" / "ant" / "deep.jfif").unlink()
    out, err = say("fid", "pictures", "pictures", "--features", "digits", "--json")
    check_facts(err, 2, 26, "broken.png", *OTHERS)
    row = json.loads(out)
    assert (row["num"], row["unreadable"]) == ([24, 24], [2, 2])
    assert row["fd/digits"] == pytest.approx(0, abs=1e-3)
    for path in (here / "pictures").rglob("*.png"):
        path.write_bytes(b"no picture")
    check_refused(hookdiff("fid", "pictures", "pictures", "--features", "digits"), "pictures", "00.png")


def test_init_skips_broken_files_if_it_saw_some(here: Path, say: Any) -> None:
    check_facts(say("init", "pictures", "-o", "mine.toml", "--minutes", 0.001)[1], *BROKEN, *OTHERS)
    text = (here / "mine.toml").read_text()
    check_facts(text, "2 of the files", "3 other files", f"{USED} colour images")
    assert tomli.loads(text)["data"]["unreadable"] == "skip"
    for name in ("ant/broken.png", "bee/cut.png"):
        (here / "pictures" / name).unlink()
    say("init", "pictures", "-o", "mine.toml", "--overwrite", "--minutes", 0.001)
    assert "unreadable" not in (here / "mine.toml").read_text()
