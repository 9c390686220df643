"""`python -m services.rollout --config rollout.yaml`: one engine, one episode worker, or both."""

from __future__ import annotations

import sys

import uvloop

from services.rollout.config import RolloutConfig
from services.rollout.process import RolloutProcess
from sluice import logs
from sluice.config import ConfigError, load_config


async def serve(config: RolloutConfig) -> None:
    await RolloutProcess(config).run()  # built inside the loop that its server belongs to


def main() -> int:
    logs.configure()
    try:
        config = load_config(RolloutConfig)
        uvloop.run(serve(config))
    except ConfigError as error:
        print(f"services.rollout: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
