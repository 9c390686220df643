"""Samples that engines may make longer than a trainer takes them."""

from pathlib import Path

from tests.e2e.conftest import start_stack, stop_stack


def test_a_run_whose_samples_a_trainer_may_not_take_says_so_when_it_begins(tmp_path: Path) -> None:
    trainer = {"model": str(tmp_path / "model"), "max_tokens_per_micro_batch": 8}
    stack = start_stack(tmp_path, trainer={"kind": "trainer", "config": trainer})
    try:
        training = stack.train("never", sampling={"max_new_tokens": 8})
        output, _ = training.process.communicate()
        told = " ".join(output.split())
        assert training.process.returncode == 2
        assert "sampling.max_new_tokens: 8, and the trainer takes 8 tokens of a sample" in told
        assert "oversize_policy" in told
        assert not training.groups("issued")

        training = stack.train("perhaps", sampling={"max_new_tokens": 2}, steps=1)
        told = " ".join(training.finish().split())
        assert "the trainer takes 8 tokens of a sample at most, and engines go to 16" in told
    finally:
        stop_stack(stack)
