"""`python -m services.router --config router.yaml`: leases over engines and their ranks."""

from __future__ import annotations

import sys

import uvloop

from services.router.config import RouterConfig
from services.router.process import RouterProcess
from sluice import logs
from sluice.config import ConfigError, load_config


async def _run(config: RouterConfig) -> None:
    await RouterProcess(config).run()


def main() -> int:
    logs.configure()
    try:
        config = load_config(RouterConfig)
        uvloop.run(_run(config))
    except ConfigError as error:
        print(f"services.router: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
