"""`python -m services.router --config router.yaml`: leases over engines and their ranks."""

from __future__ import annotations

import sys

import uvloop

from services.router.config import RouterConfig
from services.router.process import RouterProcess
from sluice import logs
from sluice.config import ConfigError, load_config


async def serve(config: RouterConfig) -> int:
    process = RouterProcess(config)  # built inside the loop that its server belongs to
    await process.run()
    return 1 if process.server.failed else 0


def main() -> int:
    logs.configure()
    try:
        config = load_config(RouterConfig)
        return uvloop.run(serve(config))
    except ConfigError as error:
        print(f"services.router: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
