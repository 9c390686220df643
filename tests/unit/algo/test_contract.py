"""The contract of losses: kept by all that are shipped, broken by each wrong one where it is."""

import os
import subprocess
import sys

import pytest

from sluice.algo.contract import check_loss, failures
from sluice.algo.plugins import SHIPPED
from sluice.algo.spec import LossSpec
from tests.patience import PATIENCE

SETTINGS = {
    "ppo_clip": [{"clip_low": 0.2}, {"clip_low": 0.2, "clip_high": 0.3, "dual_clip": 1.5}],
    "gspo": [{"clip_low": 0.1}],
    "cispo": [{"clip_high": 0.2}],
    "dro": [{"dro_beta": 0.3}],
    "dppo": [
        {"high": 0.05},
        {"divergence": "kl", "high": 0.02, "low": 0.01},
        {"high": 0.05, "two_sided": True, "log_ratio_coefficient": 0.1},
    ],
    "clip_cov": [{"clip_low": 0.2, "low": 0.05, "share": 0.2}],
    "kl_cov": [{"share": 0.2}],
    "topk_forward_kl": [{"top_count": 3}, {"top_count": 2, "tail": "renormalised"}],
    "topk_reverse_kl": [{"top_count": 3}, {"top_count": 2, "tail": "renormalised"}],
    "topk_jsd": [{"top_count": 3, "beta": 0.2}, {"top_count": 2, "tail": "renormalised"}],
    "value": [{}, {"value_clip": 0.1}],
}
SHIPPED_CASES = [(name, each) for name in SHIPPED["loss"] for each in SETTINGS.get(name, [{}])]
WRONG = {
    "MeanNotSum": {"split over micro-batches equals whole", "split over ranks equals whole"},
    "BatchMean": {"split over micro-batches equals whole", "split over ranks equals whole"},
    "ReadsMasked": {"masked tokens have no part"},
    "ReadsNeighbour": {"split over micro-batches equals whole"},
    "InPlaceDetach": {"gradient is that of the loss (float64)"},
    "InPlaceClamp": {"inputs are left as they are"},
    "HiddenDetach": {"gradient is that of the loss (float64)"},
    "NotSilent": {"silent where advantages are 0, if it says so"},
    "Scalar": {"is a number, and the same one twice"},
    "Logarithm": {"is a number, and the same one twice"},
    "Dice": {"is a number, and the same one twice"},
}
PATH = "tests.unit.algo.wrong_losses"


@pytest.mark.parametrize(("name", "settings"), SHIPPED_CASES)
def test_what_is_shipped_keeps_the_contract(name, settings):
    assert list(failures(check_loss(LossSpec(name=name, settings=settings)))) == []


@pytest.mark.parametrize(
    "more",
    [
        {"importance": {"mode": "mask", "low": 0.7, "high": 1.4, "level": "geometric"}},
        {
            "corrections": [
                {"name": "weight", "settings": {"high": 1.2, "batch_normalized": True}},
                {"name": "reject", "settings": {"level": "worst", "statistic": "k2", "high": 0.1}},
                {"name": "opsm", "settings": {"delta": 0.05}},
            ]
        },
        {"kl_coefficient": 0.1, "kl_unbiased": True},
    ],
)
def test_corrections_and_regularisers_keep_it_too(more):
    spec = LossSpec(name="sapo", old_logprobs="old", **more)
    assert list(failures(check_loss(spec))) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_is_caught_where_it_is_wrong(name):
    broken = {check.name for check in failures(check_loss(LossSpec(name=f"{PATH}:{name}")))}
    assert broken >= WRONG[name]


def test_a_right_one_of_a_user_passes():
    spec = LossSpec(name=f"{PATH}:Right", settings={"heat": 0.5})
    assert list(failures(check_loss(spec))) == []


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        (f"{PATH}:Right", {"hot": 1.0}, "settings.hot: has no effect .* heat"),
        (f"{PATH}:Right", {"heat": -1.0}, "settings.heat"),
        (f"{PATH}:Right", {"heat": True}, "settings.heat: is true or false"),
        (f"{PATH}:NoLoss", {}, "names no subclass of sluice.algo.surrogate.Loss"),
        (f"{PATH}:Absent", {}, "names no subclass"),
        ("no_such_module:X", {}, "No module named"),
    ],
)
def test_a_name_or_setting_that_is_wrong_is_told(name, settings, message):
    with pytest.raises(ValueError, match=message):
        check_loss(LossSpec(name=name, settings=settings))


def run(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "sluice.cli", "check-loss", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def test_the_command_names_what_failed_and_finds_modules_of_its_directory(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from sluice.algo.surrogate import Loss\n\n"
        "class Mean(Loss):\n"
        "    def token_losses(self, tokens):\n"
        "        return -tokens.ratio * tokens.advantages / tokens.count.clamp(min=1)\n"
    )
    done = run("mine:Mean", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAIL  split over ranks equals whole: the loss of three ranks" in done.stdout
    assert done.stdout.splitlines()[-1] == "mine:Mean: 2 of 8 broken"


def test_the_command_passes_and_refuses():
    done = run("sapo", "--settings", '{"tau_positive": 2.0}')
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "sapo: keeps the contract"
    for arguments in (
        ["sapo", "--settings", '{"tau": 2.0}'],
        ["sapo", "--settings", "{"],
        ["nope"],
    ):
        done = run(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("sluice: ")
