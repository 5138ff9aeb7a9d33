"""A sharding under which one process is struck by a signal inside of the exchange of tokens between experts."""

from __future__ import annotations

import os
from typing import Any

import torch

from verl.component import BuildContext, component
from verl.engines.parallel_dims import Parallelism
from verl.engines.sharding import Parallel


@component
class StruckInExchange(Parallel):
    """See `Parallel`.

    Args:
        number: of the signal, which the last process sends to itself between the two halves of an exchange.
        calls: exchanges of a training pass before that.
    """

    number: int = 9
    calls: int = 3

    def build(self, context: BuildContext) -> Parallelism:
        if context.rank == context.world_size - 1:
            _strike(self.number, self.calls)
        return super().build(context)


def _strike(number: int, calls: int) -> None:
    from transformers.distributed.tensor_parallel import EpDispatchExpertsParallel

    combine = EpDispatchExpertsParallel._combine_tokens
    left = [calls]

    def struck(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), number)
        return combine(*args, **kwargs)

    EpDispatchExpertsParallel._combine_tokens = struck
