"""A small attention model on whole samples and on one rank's slots of a layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache

import torch

from sluice.algo.collectives import gather_placed, gather_tokens
from sluice.algo.layout import ResponseLayout, SequenceLayout
from sluice.algo.logprobs import linear_logprobs
from sluice.algo.losses import compute_loss, pack_rows
from sluice.algo.spec import LossSpec

VOCAB, HIDDEN = 19, 8
# Prompt and length: single tokens of response, samples shorter than any context size, an empty
# response; alone, one such sample leaves most ranks without a token.
BATCHES = {
    "mixed": ((3, 17), (1, 2), (2, 9), (4, 4), (1, 30)),
    "one_token": ((1, 2),),
    "short": ((1, 3), (2, 3)),
    "no_response": ((2, 2),),
}
MIS = {"level": "geometric", "mode": "mask", "low": 0.7, "high": 1.4, "veto": 0.2}
SPECS = {
    "ppo": LossSpec(
        name="ppo_clip",
        clip_low=0.2,
        kl_coefficient=0.1,
        entropy_coefficient=0.01,
        temperature=0.8,
    ),
    "gspo": LossSpec(name="gspo", clip_low=0.05),
    "mis_opsm": LossSpec(
        name="ppo_clip", clip_low=0.2, old_logprobs="old", importance=MIS, opsm_delta=0.01
    ),
    "sft": LossSpec(name="sft"),
}


@dataclass(frozen=True)
class Row:
    sample_id: str
    tokens: torch.Tensor
    prompt: int
    loss_mask: torch.Tensor
    loss_weight: float
    columns: dict = field(default_factory=dict)


def make_rows(batch):
    generator = torch.Generator().manual_seed(7)
    rows = []
    for i, (prompt, length) in enumerate(BATCHES[batch]):
        response = length - prompt
        names = ("rollout_logprobs", "old_logprobs", "reference_logprobs", "advantages")
        columns = {name: 0.5 * torch.randn(response, generator=generator) - 3 for name in names}
        columns["advantages"] += 3
        rows.append(
            Row(
                sample_id=f"g/{i}",
                tokens=torch.randint(0, VOCAB, (length,), generator=generator),
                prompt=prompt,
                loss_mask=torch.rand(response, generator=generator) > 0.2,
                loss_weight=1 / (i + 1),
                columns=columns,
            )
        )
    return rows


def make_parameters():
    generator = torch.Generator().manual_seed(3)
    shapes = {"embed": (VOCAB, HIDDEN), "qkv": (3 * HIDDEN, HIDDEN), "head": (VOCAB, HIDDEN)}
    return {
        name: (0.5 * torch.randn(*shape, generator=generator)).requires_grad_()
        for name, shape in shapes.items()
    }


def attend(parameters, hidden, keys_values, visible):
    """Causal attention of local tokens over all keys; `visible` is bool[queries, keys]."""
    query = hidden @ parameters["qkv"][:HIDDEN].T
    scores = (query @ keys_values[:, :HIDDEN].T) / HIDDEN**0.5
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).nan_to_num()
    return hidden + weights @ keys_values[:, HIDDEN:]


@cache
def reference(batch, spec):
    """Whole samples one by one, plain log_softmax: what every layout must equal."""
    rows = make_rows(batch)
    parameters = make_parameters()
    logprobs, entropies = [], []
    for row in rows:
        hidden = parameters["embed"][row.tokens]
        keys_values = hidden @ parameters["qkv"][HIDDEN:].T
        count = len(row.tokens)
        hidden = attend(parameters, hidden, keys_values, torch.ones(count, count).tril().bool())
        logits = hidden[row.prompt - 1 : -1] @ parameters["head"].T / (spec.temperature or 1.0)
        log = logits.log_softmax(-1)
        logprobs.append(log.gather(1, row.tokens[row.prompt :, None])[:, 0])
        entropies.append(-(log.exp() * log).sum(-1))
    outputs, entropy = torch.cat(logprobs), torch.cat(entropies)
    terms = compute_loss(pack_rows(rows, spec, outputs, entropy), spec)
    terms.loss.backward()
    return outputs.detach(), entropy.detach(), terms, parameters


@dataclass(frozen=True)
class Local:
    layout: SequenceLayout
    responses: ResponseLayout
    logprobs: torch.Tensor
    entropy: torch.Tensor
    parameters: dict


def run_local(rows, spec, kind, collectives):
    """The same model on this rank's slots; keys and values are gathered over the group."""
    parameters = make_parameters()
    layout = SequenceLayout(
        kind=kind, lengths=tuple(len(row.tokens) for row in rows), size=collectives.size
    )
    responses = layout.responses([row.prompt for row in rows])
    rank = collectives.rank
    samples = [torch.full_like(row.tokens, i) for i, row in enumerate(rows)]
    positions = [torch.arange(len(row.tokens)) for row in rows]

    def everywhere(values, fill):
        return torch.cat([layout.split(values, r, fill=fill) for r in range(layout.size)])

    mine = slice(rank * layout.local_length, (rank + 1) * layout.local_length)
    sample, position = everywhere(samples, -1), everywhere(positions, -1)
    visible = (sample[mine, None] == sample[None]) & (position[mine, None] >= position[None])
    hidden = parameters["embed"][layout.split([row.tokens for row in rows], rank)]
    local = hidden @ parameters["qkv"][HIDDEN:].T
    hidden = attend(parameters, hidden, gather_tokens(local, collectives, gradient="sum"), visible)
    targets = share([row.tokens[row.prompt :] for row in rows], responses, rank)
    logprobs, entropy = linear_logprobs(
        hidden.index_select(0, responses.slots(rank)),
        parameters["head"],
        targets,
        temperature=spec.temperature or 1.0,
        entropy="gradient" if spec.has_entropy_gradient else "metric",
        chunk_rows=3,
    )
    return Local(layout, responses, logprobs, entropy, parameters)


def share(columns, responses, rank):
    """What `rank` predicts of per-sample columns [response_i, ...]."""
    return torch.cat(columns)[responses.share(rank)]


def gather_responses(local, responses, collectives, *, gradient):
    """All response tokens in packed order, from those that this rank predicts."""
    return gather_placed(
        local,
        responses.slots(collectives.rank),
        responses.places,
        collectives,
        local_length=responses.layout.local_length,
        gradient=gradient,
    )


def close(found, wanted, what):
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5, msg=lambda m: f"{what}: {m}")


def compare(local, terms, expected, collectives):
    """Log-probs gathered by position, the loss of each rank, gradients summed over the group."""
    outputs, entropy, wanted, parameters = expected
    both = torch.stack([local.logprobs.detach(), local.entropy.detach()], dim=1)
    whole = gather_responses(both, local.responses, collectives, gradient="none")
    close(whole[:, 0], outputs, "log-probs")
    close(whole[:, 1], entropy, "entropy")
    names = sorted(wanted.metrics)
    assert sorted(terms.metrics) == names
    mine = torch.stack([terms.loss.detach(), *(x for n in names for x in terms.metrics[n])])
    whole_terms = torch.stack(
        [wanted.loss.detach(), *(x for n in names for x in wanted.metrics[n])]
    )
    close(mine, whole_terms, f"loss and {names}")
    gradients = torch.cat(
        [
            torch.zeros(p.numel()) if p.grad is None else p.grad.flatten()
            for p in local.parameters.values()
        ]
    )
    expected_gradients = torch.cat([p.grad.flatten() for p in parameters.values()])
    close(collectives.all_reduce(gradients, "sum"), expected_gradients, "gradients")
