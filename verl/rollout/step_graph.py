"""CUDA graphs of decode steps: the launches of some hundred kernels, which take longer than they run, become one.

A graph is the kernels of one step on fixed addresses. Its inputs are therefore tensors that are written in place, and
it is of use as long as the rows, the width of their keys and the weights' memory stay.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from verl.model_paths.decode import NextToken

log = logging.getLogger(__name__)

Work = Callable[[], NextToken]
KEY_MULTIPLE = 64  # on a GPU: its kernels prepare themselves for each length of keys, and a graph has one
EAGER_STEPS = 2  # of one shape before its graph is made, which takes about as long: many shapes do not last


@functools.cache
def recording_stream(device: int) -> torch.cuda.Stream:
    """The stream that graphs are recorded on; one of a process, because cuBLAS keeps memory for each."""
    return torch.cuda.Stream(device)


class GraphMaker:
    """Makes graphs that share memory for intermediate results: of two, the newer alone may be used."""

    def __init__(self) -> None:
        self.pool, self.stream = torch.cuda.graph_pool_handle(), recording_stream(torch.cuda.current_device())
        self.last: torch.cuda.CUDAGraph | None = None  # while there is one, its memory stays for the next

    def __call__(self, work: Work) -> Work:
        """A function that does what `work` does, from the values that its tensors have then. Nothing is done yet.

        Raises:
            RuntimeError: `work` cannot be recorded, for example because it waits for the device.
        """
        graph = torch.cuda.CUDAGraph()
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):  # other threads may allocate meanwhile
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                recorded = work()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self.stream)
        self.last = graph

        def replay() -> NextToken:
            graph.replay()
            return NextToken(recorded.logits.clone())  # the next step overwrites them

        return replay


class StepGraphs:
    """The graph of the present rows with the present width of keys, from the third such step on.

    Args:
        new_graph: see `graph_maker`.
    """

    def __init__(self, new_graph: Callable[[Work], Work] | None):
        self.new_graph = new_graph
        self.reset()

    def reset(self) -> None:
        """Make no further use of the graph: the rows are others, or the weights are in other memory."""
        self._width = self._num_eager = 0
        self._tokens: Tensor | None = None  # that the graph reads
        self._graph: Work | None = None

    def read(self, tokens: Tensor, width: int, read_one: Callable[[Tensor], NextToken]) -> NextToken:
        """The result of `read_one` for tokens [r 1]. Whatever else changes must be in tensors, which it updates."""
        if self.new_graph is None:
            return read_one(tokens)
        if width != self._width:
            self.reset()
            self._width = width
        if self._graph is None and self._num_eager == EAGER_STEPS:
            held = self._tokens = tokens.clone()
            try:
                self._graph = self.new_graph(lambda: read_one(held))
            except RuntimeError as error:
                log.warning("Decode steps run kernel by kernel, since no CUDA graph can be made of them: %s", error)
                self.new_graph = None
        if self._graph is None or self._tokens is None:
            self._num_eager += 1
            return read_one(tokens)
        self._tokens.copy_(tokens)
        return self._graph()


def graph_maker(model: Any, device: torch.device, *, records_experts: bool) -> Callable[[Work], Work] | None:
    """A maker of graphs of a model's decode steps; None if they run kernel by kernel.

    That is so on a CPU, for a sharded model, whose forward pass communicates, and where experts are recorded.
    """
    if device.type != "cuda" or records_experts or getattr(model, "parallel_info", None) is not None:
        return None
    return GraphMaker()


def key_multiple(device: torch.device) -> int:
    """Multiple to which the lengths of keys that a single token attends to are padded on a device; 1 on a CPU."""
    return 1 if device.type == "cpu" else KEY_MULTIPLE
