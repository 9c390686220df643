"""Adapters of every backend are peft's, however the base under them is cut and computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from sluice.weights.adapter import ADAPTER_CONFIG, ADAPTER_FILE
from tests.contract.training_backend.cases import Model, Oracle
from tests.fsdp.jobs import rows_of
from tests.fsdp.oracle import gradient_difference, logprob_difference, read_ranks
from tests.lora.conftest import ExpectedAdapters
from tests.rank_pool import Pool

LOGPROB_TOLERANCE, GRADIENT_TOLERANCE = 5e-6, 5e-5
NARROW = 0.1  # of anything, over a bfloat16 base
SEQUENCE = {"sequence_parallel": True}
fast = pytest.mark.fast
CASES = [
    pytest.param("reference", "qwen3", 1, {}, id="reference", marks=fast),
    pytest.param("reference", "llama", 1, {}, id="reference, tied"),
    pytest.param("reference", "qwen3_moe", 1, {}, id="reference, beside experts"),
    pytest.param("reference", "glm4", 1, {}, id="reference, glm4"),
    pytest.param("reference", "deepseek_v3", 1, {}, id="reference, latent attention"),
    pytest.param("reference", "qwen3", 2, {}, id="reference, two ranks"),
    pytest.param("fsdp", "qwen3", 1, {}, id="fsdp, one rank"),
    pytest.param("fsdp", "qwen3", 2, {}, id="fsdp, two ranks", marks=fast),
    pytest.param("fsdp", "qwen3", 4, {}, id="fsdp, four ranks"),
    pytest.param("fsdp", "llama", 2, {}, id="fsdp, tied"),
    pytest.param("fsdp", "qwen3_moe", 2, {}, id="fsdp, beside experts"),
    pytest.param("fsdp", "qwen3_moe", 2, {"expert": 2}, id="fsdp, beside experts of ranks"),
    pytest.param("fsdp", "glm4", 2, {}, id="fsdp, glm4"),
    pytest.param("fsdp", "deepseek_v3", 2, {}, id="fsdp, latent attention"),
    pytest.param("fsdp", "qwen3", 2, {"activation_checkpointing": True}, id="fsdp, run again"),
    pytest.param("fsdp", "qwen3", 2, {"context": 2}, id="fsdp, context 2"),
    pytest.param("fsdp", "deepseek_v3", 4, {"context": 2}, id="fsdp, context 2, data 2"),
    pytest.param("fsdp", "deepseek_v3", 4, {"expert": 2, "context": 2}, id="fsdp, all of these"),
    pytest.param("fsdp", "qwen3", 2, {"reshard_after_forward": False}, id="fsdp, kept gathered"),
    pytest.param("fsdp", "qwen3", 2, {"tensor": 2}, id="fsdp, tensor 2", marks=fast),
    pytest.param("fsdp", "qwen3", 4, {"tensor": 2}, id="fsdp, data 2, tensor 2"),
    pytest.param("fsdp", "llama", 2, {"tensor": 2}, id="fsdp, tensor 2, tied"),
    pytest.param("fsdp", "qwen3_moe", 2, {"tensor": 2}, id="fsdp, tensor 2, beside experts"),
    pytest.param("fsdp", "glm4", 2, {"tensor": 2}, id="fsdp, tensor 2, gathered gates"),
    pytest.param("fsdp", "deepseek_v3", 2, {"tensor": 2}, id="fsdp, tensor 2, whole attention"),
    pytest.param("megatron", "qwen3", 1, {}, id="megatron"),
    pytest.param("megatron", "qwen3", 2, {"tensor": 2}, id="tensor 2", marks=fast),
    pytest.param("megatron", "qwen3", 2, {"tensor": 2, **SEQUENCE}, id="tensor 2, sequence"),
    pytest.param("megatron", "one_key_head", 2, {"tensor": 2}, id="tensor 2, one key head"),
    pytest.param(
        *("megatron", "one_key_head", 2, {"tensor": 2, **SEQUENCE}),
        id="tensor 2, sequence, one key head",
        marks=fast,
    ),
    pytest.param("megatron", "qwen3", 2, {"pipeline": 2}, id="pipeline 2"),
    pytest.param("megatron", "qwen3", 4, {"tensor": 2, "pipeline": 2}, id="tensor 2, pipeline 2"),
    pytest.param(
        *("megatron", "qwen3", 4, {"tensor": 2, **SEQUENCE, "pipeline": 2}),
        id="tensor 2, sequence, pipeline 2",
    ),
    pytest.param("megatron", "qwen3", 2, {}, id="data 2"),
    pytest.param("megatron", "qwen3", 4, {"tensor": 2, **SEQUENCE}, id="data 2, tensor 2"),
    pytest.param("megatron", "qwen3", 2, {"context": 2}, id="context 2"),
    pytest.param("megatron", "llama", 2, {"tensor": 2}, id="tensor 2, tied"),
    pytest.param("megatron", "llama", 2, {"pipeline": 2}, id="pipeline 2, tied"),
    pytest.param("megatron", "glm4", 2, {"tensor": 2}, id="tensor 2, glm4"),
    pytest.param(
        "megatron", "qwen3_moe", 2, {"tensor": 2, **SEQUENCE}, id="tensor 2, beside experts"
    ),
    pytest.param("megatron", "qwen3_moe", 2, {"expert": 2}, id="expert 2"),
    pytest.param("megatron", "deepseek_v3", 1, {}, id="megatron, latent attention"),
    pytest.param(
        *("megatron", "deepseek_v3", 2, {"tensor": 2, **SEQUENCE}),
        id="tensor 2, sequence, latent attention",
    ),
    pytest.param("fsdp", "glm_moe_dsa", 2, {}, id="fsdp, chosen keys"),
    pytest.param("fsdp", "nemotron_h", 2, {}, id="fsdp, recurrent layers"),
    pytest.param("fsdp", "lfm2", 2, {"activation_checkpointing": True}, id="fsdp, convolutions"),
    pytest.param(
        *("megatron", "glm_moe_dsa", 2, {"tensor": 2, **SEQUENCE}),
        id="tensor 2, sequence, chosen keys",
    ),
    pytest.param("megatron", "qwen3", 2, {"pipeline": 2, "recompute": "full"}, id="run again"),
]


def run(
    pool: Pool,
    expected: ExpectedAdapters,
    out: Path,
    case: tuple[str, str, int, dict[str, Any]],
    job: str = "parity",
    **changes: Any,
) -> list[dict[str, Any]]:
    backend, family, world, layout = case
    oracle = expected(family)
    arguments = {
        "backend": backend,
        "model": str(oracle.directory),
        "out": str(out),
        "layout": layout,
        "lora": oracle.settings,
        "adapter": str(oracle.adapter),
        **changes,
    }
    return pool.run(job, world, **arguments)


@pytest.mark.parametrize(("backend", "family", "world", "layout"), CASES)
def test_numbers_are_those_of_peft(
    pool: Pool,
    expected: ExpectedAdapters,
    tmp_path: Path,
    backend: str,
    family: str,
    world: int,
    layout: Any,
) -> None:
    oracle = expected(family)
    answers = run(pool, expected, tmp_path, (backend, family, world, layout))
    logprobs, base = read_ranks(tmp_path, "logprobs"), read_ranks(tmp_path, "base")
    assert logprob_difference(logprobs, oracle.logprobs) <= LOGPROB_TOLERANCE
    assert logprob_difference(base, oracle.base) <= LOGPROB_TOLERANCE
    assert logprob_difference(oracle.base, oracle.logprobs) > 0.1  # adapters that do something
    gradients = read_ranks(tmp_path, "gradients")
    assert gradients.keys() == oracle.gradients.keys()
    assert gradient_difference(gradients, oracle.gradients) <= GRADIENT_TOLERANCE
    for answer in answers:
        for found, should in zip(answer["steps"], oracle.steps, strict=True):
            assert found["loss"] == pytest.approx(should["loss"], rel=1e-4, abs=1e-4)
            assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=1e-4)
    assert all(answer["frozen"] for answer in answers)
    after = read_ranks(tmp_path, "base_after")
    assert all(torch.equal(after[name], tensor) for name, tensor in base.items())

    assert [name for answer in answers for name in answer["files"]] == [ADAPTER_FILE]
    published = load_file(tmp_path / ADAPTER_FILE)
    assert published.keys() == oracle.tensors.keys()
    for name, tensor in oracle.tensors.items():
        assert (published[name] - tensor).abs().max() < 2e-4, name


@pytest.mark.parametrize(
    ("backend", "world", "layout"),
    [
        pytest.param("megatron", 1, {}, id="megatron", marks=fast),
        pytest.param("megatron", 2, {"tensor": 2, **SEQUENCE}, id="tensor 2, sequence"),
        pytest.param("megatron", 2, {"pipeline": 2}, id="pipeline 2"),
        pytest.param("fsdp", 1, {}, id="fsdp"),
    ],
)
def test_on_a_base_in_bfloat16_numbers_are_near_those_of_peft(
    pool: Pool,
    expected: ExpectedAdapters,
    tmp_path: Path,
    backend: str,
    world: int,
    layout: Any,
) -> None:
    oracle = expected("qwen3")
    case = (backend, "qwen3", world, {**layout, "dtype": "bfloat16"})
    answers = run(pool, expected, tmp_path, case)
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs) <= NARROW
    assert logprob_difference(read_ranks(tmp_path, "base"), oracle.base) <= NARROW
    assert gradient_difference(read_ranks(tmp_path, "gradients"), oracle.gradients) <= NARROW
    for answer in answers:
        assert answer["frozen"]
        for found, should in zip(answer["steps"], oracle.steps, strict=True):
            assert found["loss"] == pytest.approx(should["loss"], rel=NARROW, abs=NARROW)
            assert found["grad_norm"] == pytest.approx(should["grad_norm"], rel=NARROW)


def test_what_is_published_is_read_by_peft(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path
) -> None:
    oracle = expected("qwen3")
    run(pool, expected, tmp_path, ("fsdp", "qwen3", 2, {}))
    (tmp_path / ADAPTER_CONFIG).write_bytes((oracle.adapter / ADAPTER_CONFIG).read_bytes())
    base = Model(oracle.directory).load()
    plain = Oracle(PeftModel.from_pretrained(base, str(tmp_path)).eval())  # type: ignore[arg-type]
    with torch.no_grad():
        found = {row.sample_id: plain.logprobs(row) for row in rows_of(0)}
    assert logprob_difference(read_ranks(tmp_path, "trained"), found) <= LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    "backend", [pytest.param("reference", marks=fast), "fsdp", pytest.param("megatron", marks=fast)]
)
def test_another_alpha_is_another_model(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path, backend: str
) -> None:
    """The check of the numbers above can fail: with half of alpha it does."""
    oracle = expected("qwen3")
    halved = {**oracle.settings, "alpha": oracle.settings["alpha"] / 2}
    adapter = tmp_path / "halved"
    adapter.mkdir()
    for path in oracle.adapter.iterdir():
        text = path.read_bytes()
        (adapter / path.name).write_bytes(text.replace(b'"lora_alpha": 10.0', b'"lora_alpha": 5.0'))
    run(
        pool,
        expected,
        tmp_path,
        (backend, "qwen3", 1, {}),
        lora=halved,
        adapter=str(adapter),
    )
    assert logprob_difference(read_ranks(tmp_path, "base"), oracle.base) <= LOGPROB_TOLERANCE
    assert logprob_difference(read_ranks(tmp_path, "logprobs"), oracle.logprobs) > 0.05
    gradients = read_ranks(tmp_path, "gradients")
    assert gradient_difference(gradients, oracle.gradients) > 0.1


@pytest.mark.parametrize("layout", [pytest.param({}, marks=fast), SEQUENCE], ids=["", "sequence"])
def test_tensor_ranks_that_do_not_sum_have_other_gradients(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """The check of gradients above can fail: without the sum it does, for what is summed alone."""
    case = ("megatron", "qwen3", 2, {"tensor": 2, **layout})
    run(pool, expected, tmp_path, case, job="unsummed")
    wanted, found = expected("qwen3").gradients, read_ranks(tmp_path, "gradients")
    row_cut = ("o_proj", "down_proj")
    for name, tensor in wanted.items():
        by_columns = any(layer in name for layer in row_cut)
        is_summed = ("lora_B" in name and bool(layout)) if by_columns else "lora_A" in name
        difference = gradient_difference({name: found[name]}, {name: tensor})
        assert (difference > 1e-2) is is_summed, name


def test_new_adapters_add_nothing_and_are_the_same_everywhere(
    pool: Pool, expected: ExpectedAdapters, tmp_path: Path
) -> None:
    oracle, found = expected("qwen3"), []
    for index, case in enumerate([("reference", 1), ("fsdp", 2), ("megatron", 2)]):
        out = tmp_path / str(index)
        out.mkdir()
        backend, world = case
        arguments = {"model": str(oracle.directory), "out": str(out), "lora": oracle.settings}
        if backend == "megatron":
            arguments["layout"] = {"tensor": 2}
        pool.run("start", world, backend=backend, **arguments)
        assert logprob_difference(read_ranks(out, "logprobs"), oracle.base) <= LOGPROB_TOLERANCE
        found.append(load_file(out / ADAPTER_FILE))
    first, *others = found
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first | other)
    for name, tensor in first.items():
        bound = tensor.shape[1] ** -0.5
        if "lora_B" in name:
            assert not tensor.any()
        else:  # uniform within the bound, as peft draws it
            assert tensor.abs().max() <= bound
            assert tensor.std() == pytest.approx(bound / 3**0.5, rel=0.2)
