"""Tool calls between OpenAI's form and the text that a model wrote."""

from __future__ import annotations

import json
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from services.rollout.environments.tool_calls import OPEN, parse_calls

REMEMBERED_CALLS = 10_000


class ToolCalls:
    """Finds calls in answers, and remembers the text of each.

    A caller sends calls back as JSON, which a template would write in its own way. The text as it
    was sampled takes their place, so that the conversation goes on from the very tokens.
    """

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()  # of answers, by the id of a call

    def split(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """What was said before the first call, and the calls; all is said if one is malformed."""
        said, opening, _ = text.partition(OPEN)
        calls = parse_calls(text) if opening else []
        if not calls or any(call.error for call in calls):
            return text, []
        found = []
        for call in calls:
            function = {"name": call.name, "arguments": json.dumps(call.arguments)}
            call_id = f"call_{uuid.uuid4().hex}"
            found.append({"id": call_id, "type": "function", "function": function})
            self._texts[call_id] = text
        while len(self._texts) > REMEMBERED_CALLS:
            self._texts.popitem(last=False)
        return said.rstrip(), found

    def restore(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message whose calls were found here, as it was sampled; any other as it is."""
        calls = message.get("tool_calls")
        if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
            return message
        texts = {self._texts.get(str(call.get("id"))) for call in calls}
        if len(texts) != 1 or None in texts:
            return message
        (text,) = texts
        return {"role": message.get("role"), "content": text}


class CallFilter:
    """Streams what is said; from where a call may begin on, nothing is shown until the end."""

    def __init__(self, calls: ToolCalls) -> None:
        self._calls = calls
        self._text, self._shown = "", 0

    def add(self, text: str) -> str:
        """What may be shown now."""
        self._text += text
        end = self._text.find(OPEN)
        if end < 0:
            sizes = range(min(len(OPEN) - 1, len(self._text)), 0, -1)
            held = next((size for size in sizes if OPEN.startswith(self._text[-size:])), 0)
            end = len(self._text) - held
        # White space before a call is not said.
        end = max(self._shown, len(self._text[:end].rstrip()))
        start, self._shown = self._shown, end
        return self._text[start:end]

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of what is said, and the calls."""
        said, calls = self._calls.split(self._text)
        return said[self._shown :], calls
