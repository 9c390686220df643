"""What engines tell of experts is what transformers' own routers choose, of every family."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from services.rollout.engine.config import EngineConfig
from services.rollout.engine.interface import create_engine
from services.rollout.engine.sglang.samples import read_routing
from services.rollout.errors import UnfitWeightsError, UnsupportedModelError
from tests.contract.engine.cases import complete, request_of
from tests.models.families import Case, build
from tests.models.forced import chosen_by, shape_of
from tests.models.test_experts import named
from tests.models.test_replay import COVERED

fast = pytest.mark.fast
# an attention of its own that is run over whole rows, a recurrent layer, the engine's attention
FAST = ("deepseek_v3", "gpt_oss", "lfm2_moe", "granitemoe")


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, id=c.name, marks=fast if c.name in FAST else ()) for c in COVERED],
)
async def test_a_family_tells_its_experts(tmp_path: Path, case: Case) -> None:
    """Of prompts in chunks, and of samples of several lengths that run beside one another."""
    model = build(case, tmp_path / "model")
    settings = {"routed_experts": True, "prefill_chunk_tokens": 8, "threads": 1}
    engine = create_engine("reference", EngineConfig(model=str(model.directory), **settings))
    await engine.start()
    try:
        for prompt, count in (([*range(5, 25)], 2), ([7], 3), ([*range(5, 22), 3], 1)):
            samples = await complete(engine, request_of("a", prompt, count, max_new_tokens=6))
            for sample in samples:
                row = torch.tensor([*prompt, *sample.token_ids])
                wanted = chosen_by(model, row).sort(-1).values
                assert sample.routed_experts is not None
                found = torch.from_numpy(sample.routed_experts).sort(-1).values
                assert torch.equal(found, wanted)
    finally:
        await engine.close()


RULED = {
    "deepseek_v3",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "kimi_k2",
    "minimax_m2",
    "qwen3_5_moe_text",
    "qwen3_moe",
    "qwen3_next",
}


@pytest.mark.parametrize("case", [pytest.param(c, id=c.name) for c in COVERED])
def test_what_sglang_tells_is_read_by_the_layers_of_transformers(
    tmp_path: Path, case: Case
) -> None:
    model = build(case, tmp_path / "model")
    document = json.loads((model.directory / "config.json").read_bytes())
    if case.model_type not in RULED:
        with pytest.raises(UnfitWeightsError, match=r"engine\.routed_experts: no weight rules for"):
            read_routing(document)
        return
    routing = read_routing(document)
    found = len(routing.mixtures), routing.experts, routing.chosen
    assert found == shape_of(model)


@fast
@pytest.mark.parametrize(("name", "reason"), [("phimoe", "choose otherwise"), ("llama", "has no")])
async def test_what_chooses_otherwise_is_refused(tmp_path: Path, name: str, reason: str) -> None:
    case = named(name) if name == "phimoe" else Case(name, "")
    model = build(case, tmp_path / "model")
    engine = create_engine(
        "reference", EngineConfig(model=str(model.directory), routed_experts=True)
    )
    with pytest.raises(UnsupportedModelError, match=f"{reason}.*leave routed_experts off"):
        await engine.start()
    await engine.close()
