"""Datums of a forward or backward pass as rows of a batch, and log-probs as Tinker answers them.

A datum has N tokens and N targets, each the token that follows; of these a row is made whose first
token is its prompt, so that every target has a log-prob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from services.gateway import schema
from services.gateway.errors import RefusedError
from services.gateway.losses import LossFn
from sluice.samples.sample import Sample

DTYPES: dict[int, np.dtype[Any]] = {schema.FLOAT32: np.dtype("<f4"), schema.INT64: np.dtype("<i8")}
LAST_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class Pass:
    """What a client asks for: rows, a loss, and whether gradients are wanted."""

    samples: Sequence[Sample]
    loss: LossFn
    forward_only: bool


def parse_header(body: bytes) -> tuple[str, int, bool]:
    """Return the model, the place in its order, and whether gradients are not wanted.

    Raises RefusedError.
    """
    message = _parse(body)
    return message.model_id, message.seq_id, message.forward_only


def parse_pass(body: bytes) -> Pass:
    """Raises RefusedError, naming the datum and the field."""
    message = _parse(body)
    given: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        given[name] = value.text if value.WhichOneof("kind") == "text" else value.number
    loss = LossFn.parse(message.loss_fn, given)
    if not message.data:
        raise RefusedError("data: there is no datum")
    samples = [_row(index, datum, loss) for index, datum in enumerate(message.data)]
    return Pass(samples, loss, message.forward_only)


def _parse(body: bytes) -> Any:
    message: Any = schema.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise RefusedError("the body is no ForwardBackwardRequest") from None
    return message


def _row(index: int, datum: Any, loss: LossFn) -> Sample:
    where = f"data[{index}]"
    tokens = _tokens(where, datum.model_input)
    tensors = {
        name: _tensor(f"{where}.loss_fn_inputs[{name!r}]", tensor)
        for name, tensor in datum.loss_fn_inputs.items()
    }
    targets = tensors.pop("target_tokens", None)
    if targets is None:
        raise RefusedError(f"{where}.loss_fn_inputs lacks 'target_tokens'")
    _check_targets(where, tokens, targets)
    columns = loss.columns(where, tensors, len(tokens))
    return Sample(
        sample_id=str(index),
        group_id=str(index),
        token_ids=np.append(tokens, targets[-1]).astype(np.int32),
        prompt_length=1,
        columns=columns,
    )


def _tokens(where: str, chunks: Sequence[Any]) -> np.ndarray:
    parts = [np.empty(0, np.int64)]
    for place, chunk in enumerate(chunks):
        kind = chunk.WhichOneof("kind")
        if kind != "encoded_text":
            raise RefusedError(
                f"{where}.model_input[{place}]: {kind or 'a chunk of an unknown kind'} is not "
                "taken here: text alone is"
            )
        data = chunk.encoded_text.tokens
        if len(data) % 4:
            raise RefusedError(f"{where}.model_input[{place}]: tokens are no int32")
        parts.append(np.frombuffer(data, "<i4").astype(np.int64))
    tokens = np.concatenate(parts)
    if not len(tokens):
        raise RefusedError(f"{where}.model_input has no token")
    return tokens


def _tensor(where: str, tensor: Any) -> np.ndarray:
    """A tensor of one dimension. Raises RefusedError for any other."""
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise RefusedError(f"{where}: dtype {tensor.dtype} is none of float32 and int64")
    shape = list(tensor.shape)
    if len(shape) > 1 or tensor.WhichOneof("kind") == "sparse_csr":
        raise RefusedError(f"{where}: shape {shape} is not taken here: one number a token is")
    if len(tensor.dense) % dtype.itemsize:
        raise RefusedError(f"{where}: {len(tensor.dense)} bytes are no {dtype.name}")
    values = np.frombuffer(tensor.dense, dtype)
    if shape and shape[0] != len(values):
        raise RefusedError(f"{where}: {len(values)} numbers for shape {shape}")
    return values


def _check_targets(where: str, tokens: np.ndarray, targets: np.ndarray) -> None:
    field = f"{where}.loss_fn_inputs['target_tokens']"
    if targets.dtype.kind != "i":
        raise RefusedError(f"{field} are no int64")
    if len(targets) != len(tokens):
        raise RefusedError(f"{field} are {len(targets)} for {len(tokens)} tokens")
    for name, values in (("model_input", tokens), ("target_tokens", targets)):
        if values.min() < 0 or values.max() > LAST_TOKEN:
            raise RefusedError(f"{where}: {name} has a number that is no token")
    wrong = np.flatnonzero(targets[:-1] != tokens[1:])
    if len(wrong):
        place = int(wrong[0])
        raise RefusedError(
            f"{field}[{place}] is {targets[place]}, and token {place + 1} of the input is "
            f"{tokens[place + 1]}: targets that are not the tokens that follow are not taken here"
        )


def encode_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """A ForwardBackwardOutput: log-probs of the targets, by datum."""
    message = schema.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(logprobs))
    sizes = [4 * len(values) for values in logprobs]
    field = record.fields["logprobs"]
    field.data = b"".join(np.asarray(values, "<f4").tobytes() for values in logprobs)
    field.offsets = np.cumsum([0, *sizes]).astype("<i8").tobytes()
    field.dtype = schema.FLOAT32
    for name, value in metrics.items():
        message.metrics[name] = value
    data: bytes = message.SerializeToString()
    return data
