"""CUDA graphs of decode steps: the launches of some hundred kernels, which take longer than they run, become one.

A graph is the kernels of one step on fixed addresses. Its inputs are therefore tensors that are written in place, and
it is of use as long as the rows, the width of their keys and the weights' memory stay.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from verl.model_paths.decode import NextToken

Work = Callable[[], NextToken]
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


def graph_maker(model: Any, device: torch.device, *, records_experts: bool) -> Callable[[Work], Work] | None:
    """A maker of graphs of a model's decode steps; None if they run kernel by kernel.

    That is so on a CPU, for a sharded model, whose forward pass communicates, and where experts are recorded.
    """
    if device.type != "cuda" or records_experts or getattr(model, "parallel_info", None) is not None:
        return None
    return GraphMaker()
