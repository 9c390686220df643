"""Tinker's protobuf messages, as the public client of Python reads and writes them.

They are described here, by number and type, as `tinker` 0.38.0 has them: the gateway needs none of
that package. A message that is not read has no fields of its own here.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import Message

PACKAGE = "sluice_tinker"
SCALARS = {
    "double": descriptor_pb2.FieldDescriptorProto.TYPE_DOUBLE,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "int32": descriptor_pb2.FieldDescriptorProto.TYPE_INT32,
    "uint32": descriptor_pb2.FieldDescriptorProto.TYPE_UINT32,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
}
# By message: fields as `[repeated|map|oneof] type name number`; enums are their numbers.
MESSAGES = {
    "SparseCsr": ("bytes values 1", "bytes crow_indices 2", "bytes col_indices 3"),
    "Tensor": (
        "oneof bytes dense 1",
        "oneof SparseCsr sparse_csr 2",
        "int32 dtype 3",
        "repeated int64 shape 4",
    ),
    "EncodedTextChunk": ("bytes tokens 1",),
    "OtherChunk": (),
    "Chunk": (
        "oneof EncodedTextChunk encoded_text 1",
        "oneof OtherChunk image 2",
        "oneof OtherChunk dmel 3",
    ),
    "Datum": ("repeated Chunk model_input 1", "map Tensor loss_fn_inputs 2"),
    "LossConfigValue": ("oneof double number 1", "oneof string text 2"),
    "ForwardBackwardRequest": (
        "string model_id 1",
        "int32 seq_id 2",
        "repeated Datum data 3",
        "string loss_fn 4",
        "map double loss_fn_config 5",
        "bool forward_only 6",
        "map LossConfigValue loss_fn_config_v2 7",
    ),
    "BatchedTensor": (
        "bytes data 1",
        "bytes offsets 2",
        "int32 dtype 3",
        "repeated int64 trailing_shape 4",
    ),
    "ArrayRecord": ("string type_tag 1", "map BatchedTensor fields 2", "int64 num_datums 3"),
    "ForwardBackwardOutput": (
        "string loss_fn_output_type 1",
        "repeated ArrayRecord loss_fn_outputs 2",
        "map double metrics 3",
    ),
    "TopkLogprobs": ("bytes token_ids 1", "bytes logprobs 2", "uint32 k 3", "uint32 length 4"),
    "SampledSequence": (
        "int32 stop_reason 1",
        "bytes tokens 2",
        "bytes logprobs 3",
        "TopkLogprobs topk_sampled_logprobs 4",
    ),
    "SampleResponse": (
        "repeated SampledSequence sequences 1",
        "bytes prompt_logprobs 2",
        "TopkLogprobs topk_prompt_logprobs 3",
    ),
}
FLOAT32, INT64, INT32 = 1, 2, 3  # of Tensor.dtype
STOP, LENGTH = 0, 1  # of SampledSequence.stop_reason


def _describe() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(
        name=f"{PACKAGE}.proto", package=PACKAGE, syntax="proto3"
    )
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for line in fields:
            *label, kind, field, number = line.split()
            added = message.field.add(name=field, number=int(number))
            added.label = added.LABEL_REPEATED if label else added.LABEL_OPTIONAL
            if label == ["oneof"]:
                added.label = added.LABEL_OPTIONAL
                added.oneof_index = 0
                if not message.oneof_decl:
                    message.oneof_decl.add(name="kind")
            if label == ["map"]:
                kind = _add_entry(message, field, kind)
            _set_type(added, kind)
    return file


def _add_entry(message: descriptor_pb2.DescriptorProto, field: str, kind: str) -> str:
    """Add the message of a map from text, as protoc does; returns its name."""
    entry = message.nested_type.add(name="".join(map(str.capitalize, field.split("_"))) + "Entry")
    entry.options.map_entry = True
    for number, (name, of) in enumerate((("key", "string"), ("value", kind)), 1):
        added = entry.field.add(name=name, number=number)
        added.label = added.LABEL_OPTIONAL
        _set_type(added, of)
    return f"{message.name}.{entry.name}"


def _set_type(field: descriptor_pb2.FieldDescriptorProto, kind: str) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]  # type: ignore[assignment]
    else:
        field.type, field.type_name = field.TYPE_MESSAGE, f".{PACKAGE}.{kind}"


_pool = descriptor_pool.DescriptorPool()
_pool.Add(_describe())


def _message(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{PACKAGE}.{name}"))


ForwardBackwardRequest: type[Message] = _message("ForwardBackwardRequest")
ForwardBackwardOutput = _message("ForwardBackwardOutput")
SampleResponse = _message("SampleResponse")
TopkLogprobs = _message("TopkLogprobs")
