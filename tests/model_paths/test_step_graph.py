"""Decode steps through graphs: the same responses, from recorded operations on fixed memory.

A CUDA graph repeats kernels on the addresses of the step that it was made of. On a CPU operations of torch stand in:
they are recorded, and repeated on the tensors that they were called with, so that whatever a step takes from Python
variables is as old as the recording. Beside them, rows and keys are not padded, as on any CPU.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from rollout.engines import by_row, generate, random_prompts
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from verl.model_paths import decode
from verl.models.parallel_info import KEPT_COPIES, computing_in
from verl.models.pretrained import Pretrained
from verl.protocol import DataProto
from verl.rollout import hf_rows
from verl.rollout.base import GenerationRequest, TurnLimits, TurnRequest
from verl.rollout.hf import HFEngine, HFRollout


def places(value: Any) -> set[int]:
    """Where the numbers of all tensors lie, but for single ones: those of a graph are its own."""
    return {x.untyped_storage().data_ptr() for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.dim()}


class Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, out))
        return out

    @property
    def read(self) -> set[int]:
        """Memory that was not made within: a graph finds it where it was, whatever is there then."""
        read, made = set[int](), set[int]()
        for _, args, kwargs, out in self.calls:
            given, found = places((args, kwargs)), places(out)
            read |= given - made
            made |= found - given - read  # an output may be a view
        return read

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

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        self.made += 1
        if self.fault is not None:
            raise RuntimeError(self.fault)
        with Recording() as recording:
            work()
        is_first = True

        def replay() -> None:
            nonlocal is_first
            if not is_first:
                recording.repeat()
                self.repeated += 1
            is_first = False

        replay.read = recording.read  # type: ignore[attr-defined]
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


def without_graphs(engine: HFEngine, monkeypatch: pytest.MonkeyPatch, *, key_multiple: int = 1) -> None:
    monkeypatch.undo()
    engine.memory, engine.key_multiple = None, key_multiple


def assert_same(found: DataProto, expected: DataProto, atol: float = 1e-12) -> None:
    for (tokens, log_probs), (others, other_log_probs) in zip(
        by_row(found).values(), by_row(expected).values(), strict=True
    ):
        assert tokens == others
        torch.testing.assert_close(log_probs, other_log_probs, rtol=0, atol=atol)


OPTIONS = {
    "plain": {},
    "filtered": {"top_k": 5, "temperature": 1.3},
    "no early stop": {"min_new_tokens": 25},
    "nucleus": {"top_p": 0.9},  # which asks for values: sampled outside of the graph
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIONS)
def test_responses_of_several_steps_are_those_of_single_kernels(name, model64, graphs, monkeypatch):
    model, options = model64.load_causal_lm("cpu"), dict(OPTIONS[name])
    options |= {"max_new_tokens": 60, "max_rows": 18, "sleep": False}
    engine = HFRollout(**options).attach(model, model64.load_tokenizer(), 0)
    engine.key_multiple = 32
    prompts, sampled, made = random_prompts(12, 70), [], []
    requests = [GenerationRequest(step, 2, greedy=step == 2) for step in (0, 0, 0, 0, 1, 2)]
    for request in requests:
        sampled.append(generate(engine, prompts, request))
        engine.offload()
        made.append(graphs.made)
        if request.step:
            update_in_place(model, 1.25)
    memory = engine.memory
    stays = [*model.parameters(), *model.buffers(), memory.inputs, memory.noise, *memory.outputs.values()]
    stays += [x for layer in memory.cache.layers for x in layer.slots.tensors]
    replays = [graph for graph in memory.graphs._graphs.values() if graph is not None]
    assert set.union(*(graph.read for graph in replays)) <= places(stays)
    assert made[0] > 3
    assert made[3] == made[2]  # in the first step keys and values move to more memory
    assert made[5] < 2 * made[2]
    assert graphs.repeated > 10 * graphs.made
    update_in_place(model, 1.25**-2)
    without_graphs(engine, monkeypatch)
    for request, found in zip(requests, sampled, strict=True):
        assert_same(found, generate(engine, prompts, request))
        if request.step:
            update_in_place(model, 1.25)


def update_in_place(model: torch.nn.Module, factor: float) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(factor)


def generate_and_train(model64: Pretrained, prepare: Callable[[HFEngine], None]) -> list[DataProto]:
    """Responses of three steps in bfloat16, with an update after each."""
    model, sampled = model64.load_causal_lm("cpu").float(), []
    KEPT_COPIES[model] = {}
    engine = HFRollout(max_new_tokens=60, sleep=False).attach(model, model64.load_tokenizer(), 0, "bfloat16")
    for step in range(3):
        prepare(engine)
        sampled.append(generate(engine, random_prompts(12, 9), GenerationRequest(step)))
        with computing_in("bfloat16", model):
            model(input_ids=torch.arange(9)[None]).logits.sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.01 * p.grad.sign()
                p.grad = None
    return sampled


def test_copies_of_weights_stay_where_graphs_read_them_through_updates(model64, graphs, monkeypatch):
    made = []

    def pad(engine: HFEngine) -> None:
        engine.key_multiple = 32
        made.append(graphs.made)

    sampled = generate_and_train(model64, pad)
    assert 1 < made[1] <= graphs.made < 2 * made[1]
    monkeypatch.undo()
    for found, expected in zip(sampled, generate_and_train(model64, pad), strict=True):
        assert_same(found, expected, atol=0)


def test_memory_is_freed_during_training_unless_both_fit(engine, graphs, monkeypatch):
    prompts = random_prompts(4, 9)
    first = generate(engine, prompts, GenerationRequest(0))
    assert engine.memory is not None
    for layer in engine.memory.cache.layers:
        for stored in layer.slots.tensors:
            stored.fill_(float("nan"))  # of weights that were not numbers
    assert_same(generate(engine, prompts, GenerationRequest(0)), first)
    engine.offload()
    assert engine.memory is None


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
    without_graphs(engine, monkeypatch)
    for (*turn, log_probs), (*plain, plain_log_probs) in zip(drawn, episodes(engine), strict=True):
        assert turn == plain
        assert log_probs == pytest.approx(plain_log_probs, abs=1e-12)


def waiting(engine: HFEngine, length: int, counts: Sequence[int]) -> list[tuple[list[int], list[float]]]:
    """Turns of an episode that waits while another is played, and of that."""
    turns, texts = engine.turns(TurnLimits(200, 0.1)), [[5] * length, [6] * 3]
    sampled = []
    for episode, count in zip((0, 1, 0), counts, strict=True):
        turns.add(TurnRequest(episode, texts[episode], episode, 0, len(sampled), count))
        while turns.num_pending:
            for turn in turns.advance():
                sampled.append((turn.tokens, turn.log_probs))
                texts[episode] = [*texts[episode], *turn.tokens, 9, 9]
    turns.close()
    return sampled


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("length", "counts"), [(97, (2, 90, 8)), (60, (37, 5, 8))], ids=["others go on", "slot is full"]
)
def test_padding_changes_no_episode_that_waits(length, counts, engine, graphs, monkeypatch):
    engine.stop_ids = engine.stop_ids[:0]
    found = waiting(engine, length, counts)
    assert tuple(len(tokens) for tokens, _ in found) == counts
    without_graphs(engine, monkeypatch)
    expected = waiting(engine, length, counts)
    for (tokens, log_probs), (others, other_log_probs) in zip(found, expected, strict=True):
        assert tokens == others
        assert log_probs == pytest.approx(other_log_probs, abs=1e-12)


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
    assert (graphs.made, graphs.repeated) == (3, 23)
    without_graphs(engine, monkeypatch)
    plain_tokens, plain_log_probs = turn_across_an_update(engine)
    assert tokens == plain_tokens
    assert log_probs == pytest.approx(plain_log_probs, abs=1e-12)


def test_there_are_none_on_a_cpu_for_shards_or_where_experts_are_recorded():
    model = torch.nn.Linear(2, 2)
    assert decode.graph_maker(model, torch.device("cpu"), records_experts=False) is None
    assert decode.graph_maker(model, torch.device("cuda"), records_experts=True) is None
    model.parallel_info = object()  # type: ignore[assignment]
    assert decode.graph_maker(model, torch.device("cuda"), records_experts=False) is None
