"""Plays episodes of an environment of the `verifiers` package, in a Python that has it.

`python player.py SETTINGS` reads a JSON call a line, `{"id": ..., "task": index}` or `{"id": ...,
"play": {...}}`, and answers each with a line of that id. The first line says that it is ready, or
why not. SETTINGS are JSON, as of `VerifiersSettings`. It imports nothing of this project.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO


class Player:
    """Holds the environment and one client for all episodes."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Imports the environment and reads its tasks. Raises what either raises."""
        import verifiers
        from verifiers.types import ClientConfig

        self._model: str = settings["model"]
        self._environment = verifiers.load_environment(
            settings["environment"], **settings["arguments"]
        )
        data = self._environment
        self.tasks = data.get_dataset() if settings["split"] == "train" else data.get_eval_dataset()
        self._client = ClientConfig(
            client_type=f"openai_{settings['client']}",
            api_base_url=settings["url"],
            api_key_var="VERIFIERS_OPENAI_KEY",
            timeout=settings["seconds"],
            max_retries=settings["retries"],
        )
        self._resolved: Any = None

    async def answer(self, call: Mapping[str, Any]) -> dict[str, Any]:
        if "task" in call:
            row = self.tasks[call["task"]]
            return {"prompt": row["prompt"], "answer": str(row.get("answer") or "")}
        play = call["play"]
        return {"episodes": await self._play(play["index"], play["sampling"], play["records"])}

    async def _play(
        self, index: int, sampling: list[dict[str, Any]], records: list[Any]
    ) -> list[dict[str, Any]]:
        """Plays a group: its episodes at once, and its rewards together, as some compare them."""
        from verifiers.clients import resolve_client

        if self._resolved is None:
            self._resolved = resolve_client(self._client)
        row = dict(self.tasks[index])
        states = await asyncio.gather(
            *(
                self._environment.rollout(row, self._resolved, self._model, _recorded(*each))
                for each in zip(sampling, records, strict=True)
            )
        )
        await self._environment.rubric.score_group(states)
        for state in states:
            await self._environment.rubric.cleanup(state)
        return [self._result(state) for state in states]

    def _result(self, state: Mapping[str, Any]) -> dict[str, Any]:
        error = state.get("error")
        return {
            "reward": state["reward"],
            "metrics": state["metrics"] or {},
            "stop": state.get("stop_condition") or "",
            "error": "" if error is None else type(error).__name__,
            "message": "" if error is None else f"{error} {error.__cause__ or ''}".strip(),
        }


def _recorded(sampling: Mapping[str, Any], record: Any) -> dict[str, Any]:
    extra = {**sampling.get("extra_body", {}), "sluice_record": record}
    return {**sampling, "extra_body": extra}


async def serve(player: Player, output: TextIO) -> None:
    loop = asyncio.get_running_loop()
    calls: asyncio.Queue[str] = asyncio.Queue()
    source = os.fdopen(os.dup(0), "r", encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)

    def read() -> None:
        """A parent that is gone must not leave this process behind, whatever it is at."""
        for line in source:
            loop.call_soon_threadsafe(calls.put_nowait, line)
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    running: dict[int, asyncio.Task[dict[str, Any]]] = {}

    def tell(task: asyncio.Task[dict[str, Any]]) -> None:
        number = int(task.get_name())
        del running[number]
        if task.cancelled():
            return
        error = task.exception()  # of the environment: told to who asked
        reply = task.result() if error is None else {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"id": number, **reply}), file=output, flush=True)

    while True:
        call = json.loads(await calls.get())
        if "leave" in call:
            if (task := running.get(call["leave"])) is not None:
                task.cancel()
            continue
        task = asyncio.create_task(player.answer(call), name=str(call["id"]))
        running[call["id"]] = task
        task.add_done_callback(tell)


def main() -> None:
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what an environment prints has nothing to do with the answers

    def tell_failure(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        sys.__excepthook__(kind, error, trace)
        print(json.dumps({"failed": f"{kind.__name__}: {error}"}), file=output, flush=True)

    sys.excepthook = tell_failure
    player = Player(json.loads(sys.argv[1]))
    sys.excepthook = sys.__excepthook__
    print(json.dumps({"tasks": len(player.tasks)}), file=output, flush=True)
    asyncio.run(serve(player, output))


if __name__ == "__main__":
    main()
