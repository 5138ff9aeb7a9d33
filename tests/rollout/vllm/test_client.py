"""vLLM in its own process draws what our own decode loop draws, follows the weights, and outlives its own death."""

import copy
import dataclasses
import logging
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from cluster.processes_of import is_running
from environments.episodes import REQUEST, Scripted, first_differences, long_turns, prompts_of, tokens_by_sample
from refusals import refusal
from roles import assert_own_log_probs
from rollout.engines import agreement, by_row, generate, random_prompts, save_family, shake

from verl.component import BuildContext
from verl.engines.optimizer import AdamW
from verl.environments.episode_loop import EpisodeGenerator
from verl.errors import ConfigError, RolloutError, WeightSyncError
from verl.ops.logprobs import log_probs_of
from verl.ops.sampling import EVALUATION
from verl.rollout.base import GenerationRequest, TurnLimits, TurnRequest
from verl.rollout.hf import HFRollout
from verl.rollout.responses import ResponseGenerator
from verl.rollout.vllm.config import VLLMRollout
from verl.serving.endpoint import PolicyEndpoint

pytestmark = pytest.mark.xdist_group("vllm")

PLAIN = {"max_new_tokens": 12, "stop_token_ids": tuple(range(7, 17))}
SMALL = {"max_num_seqs": 16, "max_num_batched_tokens": 64, "kv_cache_gib": 0.05}  # prompts are read in pieces


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.exhaustive)], ids=["one process", "two stages"]
)
def engines(request, tmp_path_factory):
    """vLLM and our own loop on the same weights; give both a request under any options."""
    source = save_family(tmp_path_factory.mktemp("models") / "qwen2", "qwen2")
    model, tokenizer = source.load_causal_lm("cpu"), source.load_tokenizer()
    context = BuildContext(run_dir=tmp_path_factory.mktemp("run"))
    rollout = VLLMRollout(**PLAIN, **SMALL, pipeline_parallel_size=request.param)
    vllm = rollout.attach(model, tokenizer, 5, None, context)
    ours = HFRollout(**PLAIN).attach(model, tokenizer, 5)

    def both(prompts=None, request=None, **options):
        prompts, request = prompts or random_prompts(), request or GenerationRequest(3, 4)
        found = []
        for engine in (vllm, ours):
            engine.options = dataclasses.replace(engine.options, **{**UNSET, **PLAIN, **options})
            found.append(generate(engine, prompts, request))
        return found

    both.vllm, both.ours, both.model, both.tokenizer = vllm, ours, model, tokenizer
    yield both
    vllm.close()


@pytest.fixture(autouse=True)
def options_at_first(engines):
    """Each test finds both engines with the same options."""
    kept = engines.vllm.options, engines.ours.options
    yield
    engines.vllm.options, engines.ours.options = kept


UNSET = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_new_tokens": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_new_tokens": 4},
        {"max_new_tokens": 1},
        {"request": GenerationRequest(3, greedy=True)},
        {"request": GenerationRequest(3, 2, stream=EVALUATION)},
    ],
    ids=str,
)
def test_it_draws_the_tokens_of_our_own_loop_with_their_log_probs(engines, options):
    theirs, ours = engines(**options)
    same, gap = agreement(theirs, ours)
    assert same >= (0.95 if "request" in options else 0.99)
    assert gap < 2e-4
    assert theirs.batch.keys() == ours.batch.keys()


def test_the_order_and_company_of_prompts_change_no_response(engines):
    prompts = random_prompts()
    among = by_row(engines(prompts)[0])
    shuffled = by_row(engines(prompts[torch.arange(11, -1, -1)])[0])
    alone = by_row(engines(prompts[4:5])[0])
    assert sum(shuffled[key][0] == tokens for key, (tokens, _) in among.items()) >= len(among) - 1
    assert all(among[key][0] == tokens for key, (tokens, _) in alone.items())


def test_no_stop_token_is_drawn_before_the_minimum_and_one_ends_a_response(engines):
    rows, _ = engines(min_new_tokens=4, request=GenerationRequest(0, 8))
    lengths = rows["response_mask"].sum(dim=1)
    assert lengths.min() == 5
    ends = torch.isin(rows["responses"], torch.tensor(engines.vllm.stop_ids)) & rows["response_mask"]
    assert ends.sum(dim=1).max() == 1
    assert bool((ends.any(dim=1) | (lengths == 12)).all())


def test_it_follows_an_optimizer_step_after_a_sync_and_not_before(engines):
    model = engines.model
    engines.vllm.sync()
    before, _ = engines()
    optimizer = AdamW(lr=1e-2).attach(model.parameters())
    model(torch.arange(3, 40)[None], labels=torch.arange(3, 40)[None]).loss.backward()
    optimizer.step()
    stale, ours = engines()
    assert agreement(before, stale)[0] == 1
    assert agreement(stale, ours)[0] < 0.9
    synced = engines.vllm.sync()
    same, gap = agreement(*engines())
    assert same >= 0.99
    assert gap < 2e-4
    assert synced.metrics["sync/bytes"] == sum(p.numel() * 4 for p in model.parameters())
    assert synced.metrics["sync/copy_s"] > 0
    assert synced.metrics["sync/load_s"] > 0
    assert synced.metrics["sync/proof_s"] > 0
    assert 0 <= synced.metrics["sync/probe_gap_nats"] < 1e-4


def test_no_prompts_give_no_rows(engines):
    rows, ours = engines(random_prompts()[:0])
    assert len(rows) == len(ours) == 0
    assert rows.batch.keys() == ours.batch.keys()


def test_a_prompt_that_leaves_no_room_for_the_response_is_refused_with_the_numbers(engines):
    with refusal("rollout.max_new_tokens"):
        engines(max_new_tokens=200)


TEXTS = ["1 + 2 =", "what is 6 * 7? " * 9, "9 -", "a b c d " * 20]


@pytest.fixture(scope="module")
def play(engines):
    """Episodes of three turns, by vLLM or by our own loop."""
    tokenizer, context = engines.tokenizer, BuildContext(seed=5)

    def played(engine, texts=TEXTS, ids=None):
        environment = Scripted(answer=long_turns, max_tokens=60)
        loop = EpisodeGenerator(environment, engine, engine.options, tokenizer, engines.vllm.stop_ids, context)
        prompts = prompts_of(tokenizer, texts, ids)
        try:
            return loop.generate(prompts, REQUEST)
        finally:
            loop.calls.close()

    return played


TURNS = {"max_new_tokens": 10, "stop_token_ids": tuple(range(7, 30))}


def test_episodes_are_the_same_alone_in_another_order_and_by_our_own_loop(engines, play):
    for engine in (engines.vllm, engines.ours):
        engine.options = dataclasses.replace(engine.options, **TURNS)
    engines.vllm.sync()
    whole = play(engines.vllm)
    expected = tokens_by_sample(whole)
    assert max(len(record["turns"]) for record in whole["episode"]) == 3
    assert_own_log_probs(engines.model, whole, atol=2e-4)

    backwards = play(engines.vllm, TEXTS[::-1], [3, 2, 1, 0])
    alone = play(engines.vllm, TEXTS[1:2], [1])
    for found in (backwards, alone):
        same = [ids == expected[key][0] for key, (ids, _) in tokens_by_sample(found).items()]
        assert sum(same) >= len(same) - 1  # rounding may turn one

    # By our own loop: where a token differs, the number that chose it lies on the bound between two tokens.
    differing = first_differences(play(engines.ours), whole, engines.model, 5, REQUEST)
    assert len(differing) <= 2
    assert all(margin < 1e-5 for _, margin in differing.values())


def test_the_endpoint_of_a_policy_goes_on_from_the_tokens_of_an_engine_in_another_process(engines):
    engines.vllm.options = dataclasses.replace(engines.vllm.options, **TURNS)
    engines.vllm.sync()
    tokenizer = copy.copy(engines.tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'][0] + ':' + m['content'] + ';' }}{% endfor %}a:"
    turns = partial(engines.vllm.turns, TurnLimits(200))
    endpoint = PolicyEndpoint(turns, tokenizer, engines.vllm.stop_ids, 10, 200)
    messages = [{"role": "user", "content": "1+2="}]
    try:
        first = endpoint.complete(messages, timeout_s=60)
        more = [*messages, first.message, {"role": "user", "content": "and now?"}]
        second = endpoint.complete(more, timeout_s=60)
        with ThreadPoolExecutor(3) as pool:  # side by side, the first again
            others = list(pool.map(lambda n: endpoint.complete(messages, sample=n, timeout_s=60), (0, 1, 2)))
        *parts, streamed = endpoint.begin(messages, sample=0, timeout_s=60, is_watched=True)
        stop = first.turn.text[1:3]
        stopped = endpoint.complete(messages, sample=0, timeout_s=60, stops=[stop])
    finally:
        endpoint.close()
    assert second.continues
    assert second.turn.prompt_ids[: len(first.turn.ids)] == first.turn.ids
    assert others[0].turn.token_ids == first.turn.token_ids
    assert ("".join(parts), streamed.turn.token_ids) == (first.turn.text, first.turn.token_ids)
    assert (stopped.turn.text, stopped.finish_reason) == (first.turn.text.partition(stop)[0], "stop")
    assert stopped.turn.token_ids == first.turn.token_ids[: len(stopped.turn.token_ids)]
    with torch.no_grad():
        logits = engines.model(torch.tensor([second.turn.ids]), use_cache=False).logits[:, :-1]
    ids = torch.tensor([second.turn.ids[1:]])
    own = log_probs_of(logits, ids, 1.0)[0, -len(second.turn.token_ids) :]
    assert torch.allclose(torch.tensor(second.turn.log_probs), own, atol=2e-4)


def test_later_turns_take_keys_and_values_from_the_prefix_cache_until_a_sync(engines):
    tokens = list(range(3, 90)) * 2

    def cached(turn):
        drawing = engines.vllm.turns(TurnLimits(250))
        drawing.add(TurnRequest(0, tokens + [5] * turn, 7, 0, turn, 4, step=1))
        while drawing.num_pending:
            drawing.advance()
        drawing.close()
        return drawing.cached_tokens

    engines.vllm.sync()
    assert [cached(0), cached(1)] == [0, 128]  # a block is 128 tokens on a CPU
    engines.vllm.sync()
    assert cached(2) == 0
    with pytest.raises(ConfigError, match=r"environment.max_tokens makes episodes of up to 300 tokens, .* holds 256"):
        engines.vllm.turns(TurnLimits(300))


def kill_after_sending(vllm, monkeypatch, what="advance_turns") -> list[int]:
    """Let the engine's process be killed as soon as it has its next call to draw; gives the ids of those killed."""
    killed, send = [], vllm.process.send

    def deadly(method, *args):
        send(method, *args)
        if method == what and not killed:
            killed.append(vllm.process_id)
            os.kill(vllm.process_id, signal.SIGKILL)

    monkeypatch.setattr(vllm.process, "send", deadly)
    return killed


@pytest.mark.exhaustive
def test_an_engine_killed_while_it_draws_is_started_again_and_draws_the_same(engines, monkeypatch, caplog):
    shake(engines.model, seed=4)
    engines.vllm.sync()
    expected, _ = engines()
    killed = kill_after_sending(engines.vllm, monkeypatch)
    with caplog.at_level(logging.WARNING):
        found, ours = engines()
    assert len(killed) == 1
    assert not is_running(killed[0])
    assert engines.vllm.process_id != killed[0]
    assert "ended with signal SIGKILL" in caplog.text
    assert agreement(expected, found)[0] == 1
    assert agreement(found, ours)[0] >= 0.99


def test_what_is_begun_is_drawn_while_the_trainer_changes_its_weights(engines):
    vllm, prompts, request = engines.vllm, random_prompts(), GenerationRequest(9, 3)
    expected = generate(vllm, prompts, request)
    sampler = ResponseGenerator(vllm, vllm.options, 0)
    sampler.begin(prompts, request)
    shake(engines.model, seed=8)  # the engine has its own weights until the next sync
    with pytest.raises(RolloutError, match="Weights cannot be changed while"):
        vllm.sync()
    found = sampler.finish()
    assert agreement(expected, found)[0] == 1
    vllm.sync()
    changed, ours = generate(vllm, prompts, request), generate(engines.ours, prompts, request)
    assert agreement(expected, changed)[0] < 1
    assert agreement(changed, ours)[0] >= 0.99


@pytest.mark.exhaustive
def test_what_lies_where_is_agreed_on_once_with_an_engine_and_anew_with_the_next(engines, monkeypatch):
    vllm = engines.vllm
    vllm.sync()
    asked, send = [], vllm.process.send

    def sending(method, *args):
        asked.append(method)
        send(method, *args)

    monkeypatch.setattr(vllm.process, "send", sending)
    for _ in range(2):
        vllm.sync()
    assert asked == ["load", "prove"] * 2
    os.kill(vllm.process_id, signal.SIGKILL)
    asked.clear()
    vllm.sync()
    assert asked[-3:] == ["connect", "load", "prove"]
    vllm.sync()
    assert asked[-3:] == ["prove", "load", "prove"]


def cross_keys_and_values(vllm, monkeypatch) -> tuple[str, str]:
    """Let tensors that are put in their places land in each other's; gives their names."""
    first, second = names = [f"model.layers.1.self_attn.{part}_proj.weight" for part in "kv"]
    send, crossed = vllm.process.send, {first: second, second: first}

    def misleading(method, *args):
        if method == "connect" and vllm.weights.in_place:
            chunks = [
                [dataclasses.replace(p, name=crossed.get(p.name, p.name)) for p in ps] for ps in args[0][0].chunks
            ]
            args = ([dataclasses.replace(feed, chunks=chunks) for feed in args[0]], *args[1:])
        send(method, *args)

    monkeypatch.setattr(vllm.process, "send", misleading)
    vllm.weight_sync.connection_key = None  # the engine is told anew what it reads
    return tuple(names)


@pytest.mark.exhaustive  # tests/rollout/proof plants faults in `make test`
def test_a_tensor_in_the_wrong_place_is_named_and_at_the_first_sync_vllm_is_left_to_load_by_itself(
    engines, monkeypatch, caplog
):
    vllm = engines.vllm
    vllm.sync()
    with monkeypatch.context() as planted:
        names = cross_keys_and_values(vllm, planted)
        with pytest.raises(WeightSyncError) as caught:
            vllm.sync()
        assert {*caught.value.names} == {*names}
        os.kill(vllm.process_id, signal.SIGKILL)
        with caplog.at_level(logging.WARNING):
            vllm.sync()
    assert "model at each sync from now on" in caplog.text
    assert not vllm.weights.in_place
    assert agreement(*engines())[0] >= 0.99
    vllm.weights.in_place = True


@pytest.mark.slow
def test_an_engine_that_dies_twice_in_a_row_ends_the_run_with_its_last_lines(engines, monkeypatch):
    vllm = engines.vllm
    killed = kill_after_sending(vllm, monkeypatch)
    vllm.options = dataclasses.replace(vllm.options, start_timeout_s=0.01)
    with pytest.raises(RolloutError) as caught:
        generate(vllm, random_prompts(), GenerationRequest(0))
    last = str(caught.value).splitlines()[-1]
    assert last.startswith("The rollout engine died twice in a row. The second time: The vLLM engine (process ")
    assert "asked to start, was not ready within 0.01 s (rollout.start_timeout_s)" in last
    assert "Traceback" not in str(caught.value)
    assert not is_running(killed[0])
