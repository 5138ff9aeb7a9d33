"""Tinker's messages: requests of its SDK as data of training sessions, and results in the SDK's protobuf.

The types are those of the SDK (`pip install "verl[serve]"`), which is the client: a field that this version of the SDK
does not know is refused by its own types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb
from tinker.types.topk_logprobs import MASK_LOGPROB

from verl.errors import ConfigError
from verl.service.data import Datum
from verl.service.sampling import Sample, TokenScores
from verl.service.session import LossOutput

_DTYPES = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64, pb.DTYPE_INT32: np.int32}
MAX_ENTRIES = 2**25  # of all tensors of a request: a sparse one names its size with a few bytes


def forward_backward_message(content: bytes) -> Any:
    """The message of a body.

    Raises:
        ConfigError: it is no such message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(content)
    except DecodeError as error:
        raise ConfigError(f"the body is no ForwardBackwardRequest: {error}.") from error
    return message


def settings_of(message: Any) -> dict[str, float | str]:
    """The settings of the loss of a message."""
    settings: dict[str, float | str] = dict(message.loss_fn_config)
    for key, value in message.loss_fn_config_v2.items():
        settings[key] = value.text if value.HasField("text") else value.number
    return settings


def data_of(message: Any) -> tuple[list[Datum], str]:
    """The data of a message, and the name of its loss.

    Raises:
        ConfigError: a part is not supported; names the datum.
    """
    tensors = [x for datum in message.data for x in datum.loss_fn_inputs.values()]
    entries = sum(math.prod(max(0, size) for size in x.shape) for x in tensors)
    if entries > MAX_ENTRIES:
        raise ConfigError(f"data have {entries} entries by their shapes: at most {MAX_ENTRIES} are accepted at once.")
    return [_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data)], message.loss_fn


def _datum(message: Any, name: str) -> Datum:
    tokens: list[int] = []
    for chunk in message.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise ConfigError(f"{name}.model_input has a chunk of {kind}: text alone is supported.")
        tokens += _numbers(chunk.encoded_text.tokens, np.dtype(np.int32), f"{name}.model_input").tolist()
    inputs = {key: _tensor(x, f"{name}.loss_fn_inputs.{key}") for key, x in message.loss_fn_inputs.items()}
    return Datum(tokens, inputs)


def _numbers(content: bytes, dtype: np.dtype, name: str) -> np.ndarray:
    if len(content) % dtype.itemsize:
        raise ConfigError(f"{name} has {len(content)} bytes: no whole number of {dtype}.")
    return np.frombuffer(content, dtype)


def _tensor(message: Any, name: str) -> torch.Tensor:
    if message.dtype not in _DTYPES:
        raise ConfigError(f"{name} has a dtype that is not supported: expected float32 or int64.")
    dtype, shape = np.dtype(_DTYPES[message.dtype]), [*message.shape]
    if any(size < 0 for size in shape):
        raise ConfigError(f"{name} has shape {shape}.")
    if message.HasField("sparse_csr"):
        csr = message.sparse_csr
        ends, columns = (_numbers(x, np.dtype(np.int64), name) for x in (csr.crow_indices, csr.col_indices))
        values = _dense(_numbers(csr.values, dtype, name), ends, columns, shape, 0, name)
    else:
        values = _numbers(message.dense, dtype, name)
        shape = shape or [len(values)]
        if values.size != math.prod(shape):
            raise ConfigError(f"{name} has {values.size} entries: its shape is {shape}.")
    return torch.from_numpy(values.reshape(shape).copy())


def _dense(
    values: np.ndarray, ends: np.ndarray, columns: np.ndarray, shape: Sequence[int], empty: int, name: str
) -> np.ndarray:
    """A matrix in compressed sparse rows, dense, with `empty` where it has no entry."""
    is_whole = len(shape) == 2 and len(ends) == shape[0] + 1 and len(columns) == len(values)
    if not is_whole or ends[0] != 0 or ends[-1] != len(values) or (np.diff(ends) < 0).any():
        raise ConfigError(f"{name} is no matrix in compressed sparse rows of shape {[*shape]}.")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise ConfigError(f"{name} has columns outside of its shape {[*shape]}.")
    dense = np.full(shape, empty, values.dtype)
    dense[np.repeat(np.arange(shape[0]), np.diff(ends)), columns] = values
    return dense


def targets_of(tensor: Any, name: str, rows: int) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor] | None]:
    """Token ids [rows K] of a JSON request, -1 for none, and for a sparse matrix the ends of its rows and its columns.

    Raises:
        ConfigError: they are no such matrix.
    """
    shape, layout = [*(tensor.shape or ())], None
    if tensor.dtype != "int64" or len(shape) != 2 or shape[0] != rows or not 0 < math.prod(shape) <= MAX_ENTRIES:
        raise ConfigError(f"{name} has shape {shape} of {tensor.dtype}: expected token ids of shape [{rows}, K].")
    try:
        values = np.array(tensor.data, np.int64)
        if tensor.sparse_crow_indices is not None:
            sparse = (tensor.sparse_crow_indices, tensor.sparse_col_indices or ())
            ends, columns = (np.array([*x], np.int64) for x in sparse)
            layout = torch.from_numpy(ends), torch.from_numpy(columns)
            values = _dense(values, ends, columns, shape, -1, name)
        return torch.from_numpy(values.reshape(shape).copy()), layout
    except (ValueError, OverflowError) as error:
        raise ConfigError(f"{name} is no matrix of token ids of shape {shape}: {error}.") from error


def forward_backward_output(output: LossOutput) -> bytes:
    """Log-probs of the targets and losses of each datum, and the sum of the losses."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(output.log_probs))
    for name, rows in (("logprobs", output.log_probs), ("elementwise_loss", output.per_token)):
        arrays = [x.to(torch.float32).numpy() for x in rows]
        field = record.fields[name]
        field.data = b"".join(x.tobytes() for x in arrays)
        field.offsets = np.cumsum([0, *(x.nbytes for x in arrays)]).astype(np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(arrays[0].shape[1:])
    message.metrics["loss:sum"] = output.loss
    return message.SerializeToString()


def sample_response(
    samples: Sequence[Sample],
    of_samples: Sequence[TokenScores | None],
    prompt: TokenScores | None,
    first_scored: int,
    wants: Mapping[str, bool],
    layout: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> bytes:
    """Samples of a prompt.

    Args:
        of_samples: of each, the likeliest tokens at its places; None where they are not asked for.
        prompt: scores of the tokens of the prompt after the first.
        first_scored: number of tokens of the prompt without scores.
        wants: which of `logprobs`, `topk` and `targets` of the prompt are asked for.
        layout: ends of rows and columns of the targets, if they are a sparse matrix.
    """
    message = pb.SampleResponse()
    for one, scores in zip(samples, of_samples, strict=True):
        sequence = message.sequences.add()
        sequence.stop_reason = pb.STOP_REASON_STOP if one.is_stopped else pb.STOP_REASON_LENGTH
        sequence.tokens = np.asarray(one.tokens, np.int32).tobytes()
        sequence.logprobs = np.asarray(one.log_probs, np.float32).tobytes()
        if scores is not None:
            _set_topk(sequence.topk_sampled_logprobs, scores, 0)
    if prompt is not None and wants["logprobs"]:
        padded = np.full(len(prompt.log_probs) + 1, np.nan, np.float32)
        padded[first_scored:] = prompt.log_probs[first_scored - 1 :].to(torch.float32).numpy()
        message.prompt_logprobs = padded.tobytes()
    if prompt is not None and wants["topk"]:
        _set_topk(message.topk_prompt_logprobs, prompt, first_scored)
    if prompt is not None and wants["targets"]:
        assert prompt.of_targets is not None
        values = prompt.of_targets.to(torch.float32).numpy()
        if layout is None:
            message.target_prompt_logprobs.dense = values.tobytes()
        else:
            ends, columns = (x.numpy() for x in layout)
            csr = message.target_prompt_logprobs.sparse_csr
            csr.values = values[np.repeat(np.arange(len(values)), np.diff(ends)), columns].tobytes()
            csr.crow_indices, csr.col_indices = ends.tobytes(), columns.tobytes()
        message.target_prompt_logprobs.dtype = pb.DTYPE_FLOAT32
        message.target_prompt_logprobs.shape.extend(values.shape)
    return message.SerializeToString()


def _set_topk(message: Any, scores: TokenScores, first_scored: int) -> None:
    """Likeliest tokens. Of a prompt the tokens before `first_scored` are empty, as the SDK writes it: id 0, -99999."""
    assert scores.likeliest is not None
    assert scores.of_likeliest is not None
    ids, values = scores.likeliest.numpy().astype(np.int32), scores.of_likeliest.to(torch.float32).numpy()
    if first_scored:
        kept, k = slice(first_scored - 1, None), ids.shape[1]
        ids = np.concatenate([np.zeros((first_scored, k), np.int32), ids[kept]])
        values = np.concatenate([np.full((first_scored, k), MASK_LOGPROB, np.float32), values[kept]])
    message.token_ids, message.logprobs = ids.tobytes(), values.tobytes()
    message.length, message.k = ids.shape
