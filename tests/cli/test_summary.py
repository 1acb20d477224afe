import json

from hookdiff.cli.summary import run_summary
from hookdiff.testing.toy import toy_loop


def test_golden_summary_of_a_run(tmp_path):
    lines = [{"step": n, "time": 0.0, "loss": 1 / n} for n in range(1, 19)]
    for line in lines[2::3]:
        line |= {"fd/x": 8.0 - line["step"], "odd/inner": 1.0}
    lines[8]["fd/x"] = None
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("config.toml", "outcome.json"):
        (tmp_path / name).touch()
    (tmp_path / "samples").mkdir()
    for name in ("step-00000001.png", "step-00000010.png"):
        (tmp_path / "samples" / name).touch()
    (tmp_path / "empty").mkdir()
    loop = toy_loop(run_dir=tmp_path)
    loop.log({"odd/inner": 1.0}, detail=True)
    assert run_summary(loop, "time", "it", 125.4) == (
        "it: out of time after 0 steps, 0 epochs, in 2:05\n"
        f"  {tmp_path}/config.toml    the whole config; running it again gives the same run\n"
        f"  {tmp_path}/empty          empty\n"
        f"  {tmp_path}/metrics.jsonl  18 lines; loss 0.0556 at step 18; fd/x ... 2, nan, -4, -7, -10\n"
        f"  {tmp_path}/samples        2, newest step-00000010.png"
    )
