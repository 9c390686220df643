"""`python -m services.rollout.reward_model --config reward_model.yaml`: scores of one model."""

from __future__ import annotations

import os
import sys

import uvloop

from services.rollout.reward_model.config import RewardModelConfig
from services.rollout.reward_model.process import RewardModelProcess
from sluice import logs, platform
from sluice.config import ConfigError, load_config
from sluice.imports import run_process

STUCK = 1  # as any failure, for whoever started the process


async def serve(config: RewardModelConfig) -> int:
    process = RewardModelProcess(config)  # built inside the loop that its server belongs to
    await process.run()
    return STUCK if process.failure or process.server.failed else 0


def main() -> int:
    logs.configure()
    try:
        config = load_config(RewardModelConfig)
        status = uvloop.run(serve(config))
    except (ConfigError, platform.PlatformError) as error:
        print(f"services.rollout.reward_model: {error}", file=sys.stderr)
        return 2
    if status == STUCK:
        sys.stderr.flush()
        os._exit(STUCK)  # no library's last words can wait for a thread that hangs
    return status


if __name__ == "__main__":
    run_process(main)
