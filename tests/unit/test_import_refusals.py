"""What services would refuse of an imported script is told with the line that says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.importers.documents import with_line
from tests.unit.imported_stack import run_command

SLIME = """\
#!/bin/bash
# --weight-decay -3 was another run's
MODEL=( --hf-checkpoint /nowhere/model --prompt-data /data/tasks.jsonl --rm-type math )
OPTIM=(
   --lr 2e-6
   --weight-decay -1 --adam-beta2 1.5
)
python3 train.py ${MODEL[@]} ${OPTIM[@]} --advantage-estimator grpo \\
   --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 64 --num-rollout 3
"""
VERL = """\
#!/bin/bash
python3 -m verl.trainer.main_ppo \\
   data.train_files=/data/tasks.parquet \\
   actor_rollout_ref.model.path=/nowhere/model \\
   actor_rollout_ref.actor.optim.lr=1e-6 \\
   actor_rollout_ref.actor.optim.weight_decay=-1
"""


@pytest.mark.parametrize(
    ("command", "script", "told"),
    [
        (
            "import-slime",
            SLIME,
            [
                "run.sh:6: --weight-decay -1: is refused by trainer: optim.weight_decay: Input",
                "run.sh:6: --adam-beta2 1.5: is refused by trainer: optim.betas.1: Input",
            ],
        ),
        (
            "import-verl",
            VERL,
            [
                "run.sh:6: actor_rollout_ref.actor.optim.weight_decay=-1: is refused by trainer: "
                "optim.weight_decay: Input"
            ],
        ),
    ],
)
def test_a_value_out_of_range_is_told_with_its_line(
    command: str, script: str, told: list[str], tmp_path: Path
) -> None:
    """On the screen and above the files; a model that is elsewhere is nobody's mistake."""
    (tmp_path / "run.sh").write_text(script)
    code, answer, _ = run_command(command, tmp_path / "run.sh", "-o", tmp_path / "out")
    assert code == 0
    for line in told:
        assert line in answer
        assert f"#   {line}" in (tmp_path / "out/services.yaml").read_text()
    assert answer.count("is refused by") == len(told)
    assert "no model directory" not in answer


def test_a_refusal_of_what_another_script_says_has_no_line() -> None:
    told = "--weight-decay -1: is refused by trainer: optim.weight_decay: no"
    assert with_line(told, "run.sh", "#!/bin/sh\n. ./more.sh\n") == told
    assert with_line(told, "run.sh", "a\n  --weight-decay=-1\n") == f"run.sh:2: {told}"
    assert with_line("--lr: is unknown", "run.sh", "--lr 1") == "--lr: is unknown"
