from hookdiff.hookspecs import HOOK_NAMES
from hookdiff_ema import EMA
from tests.conftest import check_facts


def rows(out):
    """Return the rest of each line by its first word."""
    return dict(line.split(maxsplit=1) for line in out.splitlines())


def test_all_plugins_are_listed_with_their_first_line(hookdiff, folder):
    code, out, _ = hookdiff("plugins")
    assert code == 0
    assert {"amp", "checkpoint", "clip", "ema", "fid", "lr", "samples"} <= rows(out).keys()
    assert rows(out)["ema"] == EMA.__doc__.splitlines()[0]


def test_one_broken_plugin_does_not_hide_the_others(hookdiff, folder, install):
    install("broken", {"abroken": "hd_cli_broken:X"}, hd_cli_broken="1 / 0\n")
    code, out, _ = hookdiff("plugins")
    assert code == 0
    check_facts(rows(out)["abroken"], "division by zero", "broken 1.0")
    assert "ema" in rows(out)


def test_golden_order_of_the_calls(hookdiff, folder):
    code, out, _ = hookdiff("plugins", "--order", "small.toml", "--plugins", "clip,samples")
    order = rows(out)
    assert code == 0
    assert list(order) == list(HOOK_NAMES)
    assert order["after_optimizer_step"] == "ema (first) > lr > checkpoint > samples > ema (last)"
    assert order["between_steps"] == "checkpoint (last)"
    assert order["offer_weights"] == "ema"
    assert order["after_backward"] == "clip (last)"
    assert order["on_nan"] == "checkpoint (first)"
