"""Tinker's messages in protobuf: training data of requests, and results. Tensors are read and written by the SDK."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tinker import types
from tinker.proto import tinker_public_pb2 as pb
from tinker.proto.request_conv import _tensor_data_to_proto as tensor_message
from tinker.proto.response_conv import _tensor_data_from_proto as tensor_of
from tinker.types.topk_logprobs import MASK_LOGPROB
from torch import Tensor

from verl.errors import ConfigError
from verl.service.data import Datum, LossOutput
from verl.service.sampling import Sample

MAX_ENTRIES = 2**25  # of all tensors of a request: a sparse one names its size with a few bytes
Scores = Mapping[str, Tensor]


def data_of(message: Any) -> list[Datum]:
    """The data of a `ForwardBackwardRequest`.

    Raises:
        ConfigError: a part is not supported; names the datum.
    """
    tensors = [x for datum in message.data for x in datum.loss_fn_inputs.values()]
    if (entries := sum(math.prod(max(0, size) for size in x.shape) for x in tensors)) > MAX_ENTRIES:
        raise ConfigError(f"data have {entries} entries by their shapes: at most {MAX_ENTRIES} are accepted at once.")
    return [_datum(datum, f"data[{index}]") for index, datum in enumerate(message.data)]


def _datum(message: Any, name: str) -> Datum:
    if others := {chunk.WhichOneof("chunk") for chunk in message.model_input} - {"encoded_text"}:
        raise ConfigError(f"{name}.model_input has a chunk of {others}: text alone is supported.")
    for key, x in message.loss_fn_inputs.items():
        if x.dtype not in (pb.DTYPE_FLOAT32, pb.DTYPE_INT64):  # the SDK would read the bits of bfloat16 as integers
            raise ConfigError(f"{name}.loss_fn_inputs.{key} has dtype {x.dtype}: expected float32 or int64.")
        if not x.shape:  # of a `TensorData` without one
            x.shape.append(-1)
    try:
        tokens = b"".join(chunk.encoded_text.tokens for chunk in message.model_input)
        inputs = {key: tensor_of(x).to_torch() for key, x in message.loss_fn_inputs.items()}
        return Datum(np.frombuffer(tokens, np.int32).astype(np.int64), inputs)  # type: ignore[arg-type]
    except (ValueError, RuntimeError, AssertionError) as error:
        raise ConfigError(f"{name} has a tensor that cannot be read: {error}") from error


def forward_backward_output(output: LossOutput) -> bytes:
    """Log-probs of the targets and losses of each datum, and the sum of the losses."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    record = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(output.log_probs))
    for name, rows in (("logprobs", output.log_probs), ("elementwise_loss", output.per_token)):
        arrays = [x.float().numpy() for x in rows]
        field = record.fields[name]
        field.data = b"".join(x.tobytes() for x in arrays)
        field.offsets = np.cumsum([0, *(x.nbytes for x in arrays)]).astype(np.int64).tobytes()
        field.dtype = pb.DTYPE_FLOAT32
        field.trailing_shape.extend(arrays[0].shape[1:])
    message.metrics["loss:sum"] = output.loss
    return message.SerializeToString()


def sample_response(
    request: types.SampleRequest, samples: Sequence[Sample], of_samples: Sequence[Scores], of_prompt: Scores
) -> bytes:
    """Samples of a prompt.

    Args:
        of_samples: `LossRows.scores` of the tokens of each, where the likeliest are asked for.
        of_prompt: `LossRows.scores` of the tokens of the prompt after the first, as far as they are asked for, and
            `of_targets`, log-probs [n K] of chosen tokens.
    """
    message = pb.SampleResponse()
    for one, scores in zip(samples, of_samples, strict=True):
        sequence = message.sequences.add()
        sequence.stop_reason = pb.STOP_REASON_STOP if one.is_stopped else pb.STOP_REASON_LENGTH
        sequence.tokens = np.asarray(one.tokens, np.int32).tobytes()
        sequence.logprobs = np.asarray(one.log_probs, np.float32).tobytes()
        if scores:
            _set_topk(sequence.topk_sampled_logprobs, scores, 0, 0)
    if "log_probs" in of_prompt:
        log_probs = of_prompt["log_probs"].float().numpy()
        unscored = len(log_probs) + 1 - (request.prompt_logprobs_last_n or len(log_probs))
        if request.prompt_logprobs:
            padded = [np.full(unscored, np.nan, np.float32), log_probs[unscored - 1 :]]
            message.prompt_logprobs = np.concatenate(padded).tobytes()
        if "likeliest" in of_prompt:
            _set_topk(message.topk_prompt_logprobs, of_prompt, unscored, unscored - 1)
    if (asked := request.target_prompt_logprobs) is not None:
        ends, columns = asked.sparse_crow_indices, asked.sparse_col_indices
        values = of_prompt["of_targets"].numpy()
        if ends is not None:
            values = values[np.repeat(np.arange(len(values)), np.diff(ends)), columns]
        scored = types.TensorData(values, "float32", [*(asked.shape or ())], ends, columns)
        message.target_prompt_logprobs.CopyFrom(tensor_message(scored))
    return message.SerializeToString()


def _set_topk(message: Any, scores: Scores, empty: int, begin: int) -> None:
    """Likeliest tokens from a place on, after some empty places as the SDK writes them: id 0, -99999."""
    ids, values = scores["likeliest"].numpy()[begin:], scores["of_likeliest"].float().numpy()[begin:]
    padding = (empty, 0), (0, 0)
    ids = np.pad(ids.astype(np.int32), padding)
    message.token_ids = ids.tobytes()
    message.logprobs = np.pad(values, padding, constant_values=np.float32(MASK_LOGPROB)).tobytes()
    message.length, message.k = ids.shape
