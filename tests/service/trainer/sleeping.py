"""Steps of a trainer that sleeps between them, which must be those of one that does not."""

from __future__ import annotations

from sluice.client import TrainerClient
from tests.service.trainer.harness import PPO, make_groups, upload


async def two_steps(
    client: TrainerClient, name: str, *, sleeps: bool, least: float = 0
) -> list[str]:
    """Digests of the weights after each of two steps.

    `sleeps`: with gradients gathered, and between the steps, when the optimizer has moments; what
    leaves the devices is then at least so many times what is published.
    """
    digests = []
    for number in range(2):
        step = (await client.get()).step
        batch = await upload(client, f"{name}-{number}", make_groups(f"{name}{number}", seed=7))
        await client.forward_backward(batch, PPO, expected_step=step, part_id="whole")
        if sleeps:
            assert (await client.sleep()).step == step
            assert (await client.get()).asleep
            assert await client.wake() == step
        await client.step_optimizer(step, ["whole"])
        if sleeps:
            slept = await client.sleep()
            await client.wake()
        published = await client.publish_weights()
        digests.append(published.weights.digest)
        if sleeps:
            assert slept.state_bytes >= least * published.full_byte_count
        await client.delete_batch(batch)
    return digests


async def check_steps(client: TrainerClient, least: float) -> None:
    """From one checkpoint, the same steps with and without sleep have the same weights."""
    start = (await client.save_checkpoint("awake")).checkpoint
    without = await two_steps(client, "without", sleeps=False)
    assert without[0] != without[1]
    await client.load_checkpoint(start)
    assert await two_steps(client, "without", sleeps=True, least=least) == without
