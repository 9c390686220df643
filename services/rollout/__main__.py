"""`python -m services.rollout --config rollout.yaml`: one engine, one episode worker, or both."""

from __future__ import annotations

import contextlib
import sys

import uvloop

from services.rollout.config import RolloutConfig
from services.rollout.process import RolloutProcess
from sluice import logs, platform
from sluice.config import ConfigError, load_config
from sluice.durable import DirectoryError
from sluice.imports import run_process
from sluice.runtime.errors import ServiceError


async def serve(config: RolloutConfig) -> int:
    process = RolloutProcess(config)  # built inside the loop that its server belongs to
    await process.run()
    return 1 if process.failure or process.server.failed else 0


def output_of(config: RolloutConfig) -> contextlib.AbstractContextManager[None]:
    """Has what is printed where environments run in the log, within bounds."""
    if "episodes" not in config.roles:
        return contextlib.nullcontext()
    from services.rollout.environments.isolation import bounded_output  # no engine needs it

    return bounded_output()


def main() -> int:
    logs.configure()
    try:
        config = load_config(RolloutConfig)
        if "engine" in config.roles and config.engine.backend != "sglang":
            platform.current()  # before anything imports torch, which a broken plug-in breaks
        with output_of(config):
            return uvloop.run(serve(config))
    except (ConfigError, DirectoryError, platform.PlatformError) as error:
        print(f"services.rollout: {error}", file=sys.stderr)
        return 2
    except ServiceError as error:  # the model cannot be served
        print(f"services.rollout: {error.reason}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    run_process(main)
