"""`python -m services.converter --config converter.yaml`: checkpoints between formats."""

from __future__ import annotations

import sys

import torch
import uvloop

from services.converter.config import ConverterConfig
from services.converter.process import ConverterProcess
from sluice import logs
from sluice.config import ConfigError, load_config


async def _run(config: ConverterConfig) -> None:
    await ConverterProcess(config).run()


def main() -> int:
    logs.configure()
    torch.set_num_threads(1)  # threads of a conversion are its own
    try:
        config = load_config(ConverterConfig)
        uvloop.run(_run(config))
    except ConfigError as error:
        print(f"services.converter: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
