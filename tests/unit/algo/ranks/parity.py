"""What every layout and every shard must give: the numbers of one process."""

from __future__ import annotations

import torch

from sluice.algo.advantages import compute_advantages
from sluice.algo.aggregation import Moments
from sluice.algo.layout import SequenceLayout
from sluice.algo.logprobs import (
    VocabShard,
    linear_logprobs,
    token_logprobs,
    top_logprobs,
)
from sluice.algo.losses import compute_loss, pack_rows
from sluice.algo.packed_rows import AdvantageRow, generalized_advantages, place_terminal
from sluice.algo.spec import AdvantageSpec
from tests.unit.algo.ranks.toy_model import (
    BATCHES,
    HIDDEN,
    SPECS,
    VOCAB,
    close,
    compare,
    gather_responses,
    make_rows,
    reference,
    run_local,
    share,
)

WORLD = 4


def kinds(collectives):
    return ("zigzag", "contiguous") if collectives.size > 1 else ("none",)


def check_losses_on_gathered_responses(context):
    """Every rank computes the whole loss from gathered log-probs and keeps its own gradient."""
    for collectives in context.groups:
        for kind in kinds(collectives):
            for batch in BATCHES:
                for spec in SPECS.values() if batch != "short" else [SPECS["ppo"]]:
                    rows = make_rows(batch)
                    local = run_local(rows, spec, kind, collectives)
                    both = torch.stack([local.logprobs, local.entropy], dim=1)
                    whole = gather_responses(both, local.responses, collectives, gradient="own")
                    terms = compute_loss(pack_rows(rows, spec, whole[:, 0], whole[:, 1]), spec)
                    terms.loss.backward()
                    compare(local, terms, reference(batch, spec), collectives)


def check_gae_by_global_position(context):
    for collectives in context.groups:
        for kind in kinds(collectives):
            rows = make_rows("mixed")
            layout = SequenceLayout(
                kind=kind, lengths=tuple(len(r.tokens) for r in rows), size=collectives.size
            )
            responses = layout.responses([row.prompt for row in rows])
            local = share([r.columns["old_logprobs"] for r in rows], responses, collectives.rank)
            whole = gather_responses(local, responses, collectives, gradient="none")
            for i, (row, values) in enumerate(
                zip(rows, whole.split([len(r.loss_mask) for r in rows]), strict=True)
            ):
                found, wanted = (
                    generalized_advantages(
                        place_terminal(row.loss_mask, i + 1.0),
                        v,
                        row.loss_mask,
                        gamma=0.9,
                        gae_lambda=0.95,
                    )[0]
                    for v in (values, row.columns["old_logprobs"])
                )
                assert torch.equal(found, wanted)


def check_whitening_over_data_ranks(context):
    """Uneven shares, one rank without any row: the same as one rank with all rows."""
    collectives = context.world
    rows = [
        AdvantageRow(
            sample_id=f"{i}/0",
            group_id=str(i),
            loss_mask=torch.rand(n, generator=torch.Generator().manual_seed(i)) > 0.2,
            rewards={"reward": float(i)},
        )
        for i, n in enumerate((5, 1, 9, 3, 7))
    ]
    owner = (0, 0, 1, 3, 3)  # nothing for rank 2
    spec = AdvantageSpec(name="reinforce_plus_plus")

    def merge(mine):
        packed = torch.tensor([mine.count, mine.mean, mine.m2], dtype=torch.float64)
        merged = Moments()
        for part in collectives.all_gather(packed).view(-1, 3).tolist():
            merged = merged.merge(Moments(*part))
        return merged

    mine = [row for row, r in zip(rows, owner, strict=True) if r == collectives.rank]
    found = compute_advantages(mine, spec, merge).advantages
    whole = compute_advantages(rows, spec).advantages
    wanted = [a for a, r in zip(whole, owner, strict=True) if r == collectives.rank]
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        close(a, b, "advantages")


def shard_of(rank, padded):
    """Uneven by padding: 19 real tokens over 4 ranks of 5, or of 7 with the last all padding."""
    columns = 7 if padded else 5
    return columns, VocabShard(start=rank * columns, size=VOCAB)


def check_vocabulary_shards(context):
    collectives = context.world
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(11, HIDDEN, generator=generator).requires_grad_()
    targets = torch.randint(0, VOCAB, (11,), generator=generator)
    upstream = torch.randn(2, 11, generator=generator)
    for padded in (False, True):
        columns, shard = shard_of(collectives.rank, padded)
        whole = torch.zeros(WORLD * columns, HIDDEN)
        whole[:VOCAB] = torch.randn(VOCAB, HIDDEN, generator=generator) * 3
        whole.requires_grad_()
        log = (hidden @ whole[:VOCAB].T / 0.7).log_softmax(-1)
        wanted = log.gather(1, targets[:, None])[:, 0], -(log.exp() * log).sum(-1)
        wanted_grads = torch.autograd.grad((torch.stack(wanted) * upstream).sum(), (hidden, whole))
        mine = slice(shard.start, shard.start + columns)
        vocab = VocabShard(start=shard.start, size=VOCAB, collectives=collectives)
        for kind in ("logits", "linear"):
            weight = whole[mine].detach().requires_grad_()
            options = {"temperature": 0.7, "entropy": "gradient", "vocab": vocab, "chunk_rows": 4}
            if kind == "linear":
                found = linear_logprobs(hidden, weight, targets, **options)
            else:
                found = token_logprobs(hidden @ weight.T, targets, **options)
            grads = torch.autograd.grad((torch.stack(found) * upstream).sum(), (hidden, weight))
            close(found[0], wanted[0], "log-probs")
            close(found[1], wanted[1], "entropy")
            grad_hidden = grads[0]
            if kind == "logits":  # the product's own gradient is a part of the sum over shards
                grad_hidden = collectives.all_reduce(grad_hidden.contiguous(), "sum")
            close(grad_hidden, wanted_grads[0], "d hidden")
            close(grads[1], wanted_grads[1][mine], "d weight")


def check_tokens_that_a_teacher_named_over_shards(context):
    """Several log-probs a place, named on any shards, twice in a row too; against float64."""
    collectives = context.world
    generator = torch.Generator().manual_seed(8)
    named = torch.randint(0, VOCAB, (9, 5), generator=generator)
    upstream = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    hidden = torch.randn(9, HIDDEN, generator=generator)
    for padded in (False, True):
        columns, shard = shard_of(collectives.rank, padded)
        whole = torch.zeros(WORLD * columns, HIDDEN)
        whole[:VOCAB] = torch.randn(VOCAB, HIDDEN, generator=generator)
        exact = hidden.double().requires_grad_(), whole.double().requires_grad_()
        table = (exact[0] @ exact[1][:VOCAB].T / 0.7).log_softmax(-1)
        wanted = torch.autograd.grad((table.gather(1, named) * upstream).sum(), exact)
        mine = slice(shard.start, shard.start + columns)
        vocab = VocabShard(start=shard.start, size=VOCAB, collectives=collectives)
        factors = hidden.clone().requires_grad_(), whole[mine].clone().requires_grad_()
        found, _ = linear_logprobs(*factors, named, temperature=0.7, vocab=vocab, chunk_rows=4)
        close(found.double(), table.gather(1, named), "log-probs")
        grads = torch.autograd.grad((found * upstream).sum(), factors)
        close(grads[0].double(), wanted[0], "d hidden")
        close(grads[1].double(), wanted[1][mine], "d weight")


def check_likeliest_tokens_over_shards(context):
    """Those of one process, also where logits of several shards are equal."""
    collectives = context.world
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randint(-1, 2, (40, HIDDEN), generator=generator).float()
    targets = torch.randint(0, VOCAB, (40,), generator=generator)
    for padded in (False, True):
        columns, shard = shard_of(collectives.rank, padded)
        whole = torch.zeros(WORLD * columns, HIDDEN)
        whole[:VOCAB] = torch.randint(-1, 2, (VOCAB, HIDDEN), generator=generator)
        table = (hidden @ whole[:VOCAB].T).double()  # of whole numbers: exact, often equal
        order = torch.argsort(-table, dim=1, stable=True)
        assert (table.gather(1, order).diff(dim=1) == 0).any(), "no two are equal"
        mine = whole[shard.start : shard.start + columns]
        vocab = VocabShard(start=shard.start, size=VOCAB, collectives=collectives)
        for count in (1, 6, VOCAB):
            options = {"temperature": 0.5, "vocab": vocab, "chunk_rows": 7}
            found = top_logprobs(hidden, mine, targets, count, **options)
            assert torch.equal(found.ids, order[:, :count]), (padded, count)
            wanted = (table / 0.5).log_softmax(1)
            close(found.top.double(), wanted.gather(1, order[:, :count]), "log-probs")
            close(found.logprobs.double(), wanted.gather(1, targets[:, None])[:, 0], "given")
        none = top_logprobs(hidden[:0], mine, targets[:0], 3, vocab=vocab)
        assert none.ids.shape == (0, 3)


def check_a_shard_of_banned_tokens(context):
    """One rank's logits are all -inf, as where a task forbids them; the others share the mass."""
    collectives = context.world
    columns, shard = shard_of(collectives.rank, False)
    logits = torch.randn(6, WORLD * columns, generator=torch.Generator().manual_seed(2))
    logits[:, columns : 2 * columns] = -torch.inf
    targets = torch.tensor([0, 1, 10, 11, 18, 2])
    kept = torch.cat([logits[:, :columns], logits[:, 2 * columns : VOCAB]], dim=1)
    kept.requires_grad_()
    log = kept.log_softmax(-1)
    wanted = (
        log.gather(1, torch.where(targets < columns, targets, targets - columns)[:, None])[:, 0],
        -(log.exp() * log).sum(-1),
    )
    torch.stack(wanted).sum().backward()
    mine = logits[:, shard.start : shard.start + columns].requires_grad_()
    vocab = VocabShard(start=shard.start, size=VOCAB, collectives=collectives)
    found = token_logprobs(mine, targets, entropy="gradient", vocab=vocab)
    torch.stack(found).sum().backward()
    close(found[0], wanted[0], "log-probs")
    close(found[1], wanted[1], "entropy")
    if collectives.rank == 1:
        assert not mine.grad.any()
    if collectives.rank == 0:
        close(mine.grad, kept.grad[:, :columns], "d logits")
