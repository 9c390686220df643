"""One call: sample from the engines of `sluice up`.

`python -m examples.generate runs/example/services.json "1234="`
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from examples import access
from sluice.api.router.v1 import router_service_pb2 as router_pb
from sluice.client import EngineClient, RouterClient
from sluice.exit_code import exit_code
from sluice.runtime.security import SecurityConfig
from sluice.supervise import read_services


async def main(services: Path, text: str, security: SecurityConfig) -> None:
    from transformers import AutoTokenizer

    async with RouterClient(read_services(services)["router"], security) as router:
        engine = (await router.list_engines(router_pb.ROLE_ENGINE))[0]
    tokenizer = AutoTokenizer.from_pretrained(services.parent / "model")
    async with EngineClient(engine.address, security) as client:
        completions = await client.generate(
            tokenizer.encode(text), max_new_tokens=5, sample_count=4
        )
    for completion in completions:
        spans = ", ".join(f"version {span.weights.version}" for span in completion.spans)
        logprob = sum(completion.logprobs)
        print(f"{tokenizer.decode(completion.token_ids)!r}  log-prob {logprob:.2f}  ({spans})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("services", type=Path, help="services.json of `sluice up`")
    parser.add_argument("text", help='the prompt, as "1234="')
    access.add_flags(parser)
    flags = parser.parse_args()
    sys.exit(exit_code(main(flags.services, flags.text, access.security_of(flags))))
