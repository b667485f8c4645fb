"""The SDK's protobuf messages, as numpy arrays.

The SDK's generated module is loaded by its file: importing the SDK takes seconds and loads torch.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megarl.service.refusals import MalformedError, UserError
from megarl.types import ConfigError, TopTokens

SDK_VERSION = "0.38"
"""Minor version of the SDK with these messages."""
PROTOBUF = "application/x-protobuf"
# SDK 0.38 reads a cell with this log-prob and id 0 as empty.
_EMPTY_LOGPROB = -99999.0
_LITTLE_ENDIAN = {"float32": "<f4", "int64": "<i8", "int32": "<i4"}


@cache
def load_messages() -> ModuleType:
    """Return the SDK's generated module. Raises ConfigError if the SDK is missing or has another version."""
    # Find the package's folder without importing the package.
    spec = importlib.util.find_spec("tinker")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            "megarl service needs the SDK's messages: install the extra `service` (pip install 'megarl[service]')"
        )
    installed_version = version("tinker")
    if not installed_version.startswith(f"{SDK_VERSION}."):
        raise ConfigError(
            f"tinker = {installed_version}: this service knows the messages of tinker {SDK_VERSION}; install that "
            "version"
        )
    file = Path(spec.submodule_search_locations[0]) / "proto" / "tinker_public_pb2.py"
    module_spec = importlib.util.spec_from_file_location("megarl_service_messages", file)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


# Each part of a message takes about 50 bytes and 30 microseconds to read. SDK 0.38 sends at most 1,024 datums in a
# request, of about 20 parts each.
_MAX_PARTS = 1 << 17
"""Maximum datums, chunks, tensors and settings of one request."""
_FIXED_BYTES = {1: 8, 5: 4}
"""Bytes of a protobuf field with a fixed size, by its wire type."""


class Datum(NamedTuple):
    """A training sequence as the client sends it: input tokens [tokens], and arrays [tokens] by name."""

    token_ids: NDArray[np.int64]
    inputs: Mapping[str, NDArray[Any]]


class Sample(NamedTuple):
    """A sampled sequence: tokens and log-probs [tokens], and whether it ended at a stop (else at its length).

    `top` has the most likely tokens at each position; None: not requested.
    """

    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    is_stopped: bool
    top: TopTokens | None = None


def parse_training_call(raw: bytes) -> Any:
    """Return the message of a forward_backward request.

    Raises MalformedError for another message, for fields of a newer SDK, and for more than `_MAX_PARTS` parts: 8 MiB
    of empty datums would take minutes.
    """
    from google.protobuf.message import DecodeError

    for num_parts, (message_type, field_number) in enumerate(_walk_parts(raw), 1):
        # The parser would ignore it, although it may change the loss.
        if field_number not in message_type.fields_by_number:
            raise MalformedError(
                f"the body's {message_type.name} has field {field_number}, unknown to tinker {SDK_VERSION}; use "
                "this version of the SDK"
            )
        if num_parts > _MAX_PARTS:
            raise MalformedError(
                f"the body has more than {_MAX_PARTS} datums, chunks and tensors; send fewer datums at once"
            )
    message = load_messages().ForwardBackwardRequest()
    try:
        message.ParseFromString(raw)
    except DecodeError as error:
        raise MalformedError("the body is not a ForwardBackwardRequest") from error
    return message


def _walk_parts(raw: bytes) -> Iterator[tuple[Any, int]]:
    """Yield each field of a forward_backward request and of its datums: its message's descriptor, and its number.

    A datum's fields are its chunks and tensors.
    """
    call, datum = load_messages().ForwardBackwardRequest.DESCRIPTOR, load_messages().Datum.DESCRIPTOR
    data_number = call.fields_by_name["data"].number
    for field_number, start, end in _find_fields(raw, 0, len(raw)):
        yield call, field_number
        if field_number == data_number:
            yield from ((datum, part_field_number) for part_field_number, *_ in _find_fields(raw, start, end))


def find_model_and_number(head: bytes) -> tuple[str, int] | None:
    """Return model id and sequence number from the first bytes of a forward_backward request in protobuf, or None."""
    fields_by_name = load_messages().ForwardBackwardRequest.DESCRIPTOR.fields_by_name
    model_id, seq_id = None, None
    # The bytes end inside a field. SDK 0.38 writes model and number before the datums.
    with contextlib.suppress(MalformedError):
        for field_number, start, end in _find_fields(head, 0, len(head)):
            if field_number == fields_by_name["model_id"].number:
                model_id = head[start:end].decode(errors="replace")
            elif field_number == fields_by_name["seq_id"].number:
                seq_id, _ = _read_varint(head, start, end)
    return None if model_id is None or seq_id is None else (model_id, seq_id)


def _find_fields(raw: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, first byte and end of each field of the protobuf message in `raw[start:end]`.

    Raises MalformedError for a cut message, and for groups, which the SDK does not send.
    """
    position = start
    while position < end:
        # A field begins with a tag: 3 bits of wire type below the field's number. Wire type 0 is a varint, 2 a length
        # with as many bytes.
        tag, position = _read_varint(raw, position, end)
        wire_type = tag & 7
        if wire_type == 0:
            content_start = position
            _, position = _read_varint(raw, position, end)
        elif wire_type == 2:
            num_content_bytes, content_start = _read_varint(raw, position, end)
            position = content_start + num_content_bytes
        elif wire_type in _FIXED_BYTES:
            content_start, position = position, position + _FIXED_BYTES[wire_type]
        else:
            raise MalformedError(f"the body is not a ForwardBackwardRequest: it has a field of wire type {wire_type}")
        if position > end:
            raise MalformedError("the body is not a ForwardBackwardRequest: a field is cut")
        yield tag >> 3, content_start, position


def _read_varint(raw: bytes, position: int, end: int) -> tuple[int, int]:
    """Return the varint (a number in 7-bit groups, lowest first) at `position` of `raw`, and the position after it.

    Raises MalformedError if it is incomplete or too long.
    """
    value = 0
    # A number has at most 64 bits, 7 in each byte. The byte's highest bit says that another byte follows.
    for shift in range(0, 70, 7):
        if position >= end:
            break
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise MalformedError("the body is not a ForwardBackwardRequest: a varint is incomplete or longer than 64 bits")


def read_loss_settings(message: Any) -> dict[str, float | str]:
    """Return a call's settings. The newer map, of numbers and texts, takes precedence."""
    if message.loss_fn_config_v2:
        return {
            name: value.number if value.WhichOneof("value") == "number" else value.text
            for name, value in message.loss_fn_config_v2.items()
        }
    return dict(message.loss_fn_config)


def read_datums(message: Any) -> list[Datum]:
    """Return a call's datums. Raises UserError with the datum's number for images and faulty tensors."""
    datums = []
    for number, datum in enumerate(message.data):
        field_path = f"data[{number}]"
        token_ids = _join_chunks(datum.model_input, f"{field_path}.model_input")
        inputs = {
            name: _read_tensor(tensor, f"{field_path}.loss_fn_inputs.{name:.50}")
            for name, tensor in datum.loss_fn_inputs.items()
        }
        datums.append(Datum(token_ids, inputs))
    if not datums:
        raise UserError("data is empty: give at least one datum")
    return datums


def count_tokens(message: Any) -> int:
    """Return the input tokens of a forward_backward request; its tensors are not checked."""
    chunks = (chunk for datum in message.data for chunk in datum.model_input)
    return sum(len(chunk.encoded_text.tokens) for chunk in chunks) // np.dtype(_LITTLE_ENDIAN["int32"]).itemsize


def _join_chunks(chunks: Sequence[Any], field_path: str) -> NDArray[np.int64]:
    """Return the joined tokens of all text chunks: one chat prompt has about ten."""
    parts = []
    for number, chunk in enumerate(chunks):
        kind = chunk.WhichOneof(chunk.DESCRIPTOR.oneofs[0].name)
        if kind != "encoded_text":
            raise UserError(f"{field_path}.chunks[{number}] is {kind or 'empty'}: this service trains on text only")
        parts.append(_read_array(chunk.encoded_text.tokens, "int32", f"{field_path}.chunks[{number}]"))
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)


def _read_tensor(tensor: Any, field_path: str) -> NDArray[Any]:
    """Return a tensor [tokens]. Raises UserError for a sparse tensor, several columns, or another type."""
    module = load_messages()
    element_types = {module.DTYPE_FLOAT32: "float32", module.DTYPE_INT64: "int64"}
    if tensor.dtype not in element_types:
        raise UserError(f"{field_path}: has element type {tensor.dtype}; send float32 or int64")
    if tensor.WhichOneof("encoding") == "sparse_csr" or len(tensor.shape) > 1:
        # Quote only the first sizes: a client may send millions.
        raise UserError(
            f"{field_path}: has shape {list(tensor.shape[:4])}; several targets for one position are not supported: "
            "send one value per token"
        )
    values = _read_array(tensor.dense, element_types[tensor.dtype], field_path)
    if list(tensor.shape) not in ([], [len(values)]):
        raise UserError(f"{field_path}: has {len(values)} values, but shape {list(tensor.shape)}")
    return values


def _read_array(raw: bytes, element_type: str, field_path: str) -> NDArray[Any]:
    dtype = np.dtype(_LITTLE_ENDIAN[element_type])
    if len(raw) % dtype.itemsize:
        raise UserError(f"{field_path}: its {len(raw)} bytes are not whole values of type {element_type}")
    # Copy: a view of bytes is read-only, and torch warns about such arrays.
    return np.frombuffer(raw, dtype).copy()


def encode_training_reply(logprobs: Sequence[NDArray[np.float32]], metrics: Mapping[str, float]) -> bytes:
    """Return the reply to a forward_backward request, from each datum's log-probs [tokens]."""
    module = load_messages()
    reply = module.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord", metrics=metrics)
    # The SDK reads int64 offsets in bytes, one more than there are datums.
    byte_offsets = np.cumsum([0, *(values.nbytes for values in logprobs)], dtype="<i8")
    record = reply.loss_fn_outputs.add()
    record.type_tag, record.num_datums = "ArrayRecord", len(logprobs)
    field = record.fields["logprobs"]
    field.data = b"".join(values.astype("<f4").tobytes() for values in logprobs)
    field.offsets, field.dtype = byte_offsets.tobytes(), module.DTYPE_FLOAT32
    return reply.SerializeToString()


def encode_sampling_reply(
    samples: Sequence[Sample], prompt_logprobs: NDArray[np.float32] | None, prompt_top: TopTokens | None
) -> bytes:
    """Return the reply to an asample request.

    `prompt_logprobs` [prompt] are NaN where missing. `prompt_top` has the most likely tokens at each position.
    """
    module = load_messages()
    reply = module.SampleResponse()
    for sample in samples:
        sequence = reply.sequences.add()
        sequence.stop_reason = module.STOP_REASON_STOP if sample.is_stopped else module.STOP_REASON_LENGTH
        sequence.tokens = sample.token_ids.astype("<i4").tobytes()
        sequence.logprobs = sample.logprobs.astype("<f4").tobytes()
        if sample.top is not None:
            _write_top_tokens(sequence.topk_sampled_logprobs, sample.top)
    if prompt_logprobs is not None:
        reply.prompt_logprobs = prompt_logprobs.astype("<f4").tobytes()
    if prompt_top is not None:
        _write_top_tokens(reply.topk_prompt_logprobs, prompt_top)
    return reply.SerializeToString()


def _write_top_tokens(message: Any, top: TopTokens) -> None:
    is_empty = np.isneginf(top.logprobs)
    message.length, message.k = top.logprobs.shape
    message.token_ids = np.where(is_empty, 0, top.token_ids).astype("<i4").tobytes()
    message.logprobs = np.where(is_empty, _EMPTY_LOGPROB, top.logprobs).astype("<f4").tobytes()
