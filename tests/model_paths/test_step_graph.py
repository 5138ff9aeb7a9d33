"""Decode steps through graphs: the same responses, from recorded operations on fixed memory.

A CUDA graph repeats kernels on the addresses of the step that it was made of. On a CPU operations of torch stand in:
they are recorded, and repeated on the tensors that they were called with, so that whatever a step takes from Python
variables is as old as the recording.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rollout.engines import by_row, generate, random_prompts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.model_paths import decode
from verl.model_paths.decode import NextToken
from verl.models.pretrained import Pretrained
from verl.rollout import hf_rows
from verl.rollout.base import GenerationRequest, TurnLimits, TurnRequest
from verl.rollout.hf import HFEngine, HFRollout


def address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    def repeat(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if (
                    isinstance(old, torch.Tensor)
                    and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr()
                ):
                    old.copy_(new)


class Graphs:
    """Stands in for `GraphMaker`. Recording carries operations out, so that the first repetition is none."""

    def __init__(self) -> None:
        self.made = self.repeated = 0
        self.fault: str | None = None

    def __call__(self, work: Callable[[], NextToken]) -> Callable[[], NextToken]:
        self.made += 1
        if self.fault is not None:
            raise RuntimeError(self.fault)
        with Recording() as recording:
            recorded = work()
        is_first = True

        def replay() -> NextToken:
            nonlocal is_first
            if not is_first:
                recording.repeat()
                self.repeated += 1
            is_first = False
            return NextToken(recorded.logits.clone())

        return replay


@pytest.fixture
def engine(model64: Pretrained) -> HFEngine:
    model = model64.load_causal_lm("cpu")
    engine = HFRollout(max_new_tokens=60, max_rows=6).attach(model, model64.load_tokenizer(), 0)
    engine.key_multiple = 32
    return engine


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    made = Graphs()
    monkeypatch.setattr(hf_rows, "graph_maker", lambda model, device, *, records_experts: made)
    return made


def test_responses_of_various_lengths_are_those_of_single_kernels(engine, graphs, monkeypatch):
    prompts = random_prompts(8, 70)
    drawn = generate(engine, prompts, GenerationRequest(3, 2))
    assert graphs.made > 3  # rows end and start, and keys become more
    assert graphs.repeated > 30
    monkeypatch.undo()
    plain = generate(engine, prompts, GenerationRequest(3, 2))
    for (tokens, log_probs), (plain_tokens, plain_log_probs) in zip(
        by_row(drawn).values(), by_row(plain).values(), strict=True
    ):
        assert tokens == plain_tokens
        torch.testing.assert_close(log_probs, plain_log_probs, rtol=0, atol=1e-12)


def episodes(engine: HFEngine) -> list[tuple[int, list[int], list[float]]]:
    turns, texts = engine.turns(TurnLimits(200, 0.1)), {row: [5 + row] * (3 + 4 * row) for row in range(4)}
    drawn = []
    for row, text in texts.items():
        turns.add(TurnRequest(row, text, row, 0, 0, 12 + row))
    while turns.num_pending:
        for turn in turns.advance():
            drawn.append((turn.episode, turn.tokens, turn.log_probs))
            text = texts[turn.episode] = [*texts[turn.episode], *turn.tokens, 9, 9]
            if len([x for x in drawn if x[0] == turn.episode]) < 3:
                turns.add(TurnRequest(turn.episode, text, turn.episode, 0, len(drawn), 12))
    turns.close()
    return drawn


def test_turns_of_episodes_are_those_of_single_kernels(engine, graphs, monkeypatch):
    drawn = episodes(engine)
    assert graphs.repeated > 5
    monkeypatch.undo()
    for (*turn, log_probs), (*plain, plain_log_probs) in zip(drawn, episodes(engine), strict=True):
        assert turn == plain
        assert log_probs == pytest.approx(plain_log_probs, abs=1e-12)


def test_a_step_that_cannot_be_recorded_runs_kernel_by_kernel_with_a_warning(engine, graphs, caplog):
    graphs.fault = "operation not permitted when stream is capturing"
    rows = generate(engine, random_prompts(3, 9), GenerationRequest(0))
    assert graphs.made == 1
    assert "no CUDA graph can be made of them: operation not permitted" in caplog.text
    with torch.no_grad():
        assert engine.decoding_gap(rows) < 1e-12


def move_weights(model: torch.nn.Module, factor: float) -> None:
    for p in model.parameters():
        p.data = p.data * factor


def turn_across_an_update(engine: HFEngine) -> tuple[list[int], list[float]]:
    turns = engine.turns(TurnLimits(60, 0.1))
    turns.add(TurnRequest(0, [5, 6, 7], 0, 0, 0, 40))
    for number in range(25):
        if number == 10:
            with turns.paused():
                move_weights(engine.model, 2.0)
        turns.advance()
    (turn,) = turns.open_turns()
    turns.close()
    move_weights(engine.model, 0.5)
    return turn.tokens, turn.log_probs


def test_new_weights_in_other_memory_make_a_new_graph(engine, graphs, monkeypatch):
    tokens, log_probs = turn_across_an_update(engine)
    assert (graphs.made, graphs.repeated) == (2, 19)
    monkeypatch.undo()
    plain_tokens, plain_log_probs = turn_across_an_update(engine)
    assert tokens == plain_tokens
    assert log_probs == pytest.approx(plain_log_probs, abs=1e-12)


def test_there_are_none_on_a_cpu_for_shards_or_where_experts_are_recorded():
    model = torch.nn.Linear(2, 2)
    assert decode.graph_maker(model, torch.device("cpu"), records_experts=False) is None
    assert decode.graph_maker(model, torch.device("cuda"), records_experts=True) is None
    model.parallel_info = object()  # type: ignore[assignment]
    assert decode.graph_maker(model, torch.device("cuda"), records_experts=False) is None
