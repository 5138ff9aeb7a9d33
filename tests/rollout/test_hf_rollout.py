"""The decode loop: what it records is what the model says, and what it draws depends on nothing but the request."""

import pytest
import torch
from cases import each_value_once
from roles import start_actor
from rollout.engines import by_row

from verl.ops.logprobs import log_probs_of
from verl.ops.sampling import EVALUATION, uniform
from verl.protocol import DataProto
from verl.rollout.base import GenerationRequest
from verl.rollout.hf import HFRollout
from verl.rollout.hf_rows import SlotRows
from verl.rollout.responses import ResponseGenerator

DIGITS = tuple(range(7, 17))
TEXTS = ("1+2=", "34+5=", "what is 6*7? ", "9-", "a", "x" * 40)


@pytest.fixture(scope="module")
def generate(model64, prompts):
    """Draw responses from the same weights under any options, all prompts known by the same numbers."""
    model, tokenizer = model64.load_causal_lm("cpu").requires_grad_(False), model64.load_tokenizer()

    def run(batch=None, request=None, seed=0, **options):
        rollout = HFRollout(**{"max_new_tokens": 9, "stop_token_ids": DIGITS, **options})
        engine = rollout.attach(model, tokenizer, seed)
        engine.longest_compared, engine.keeps_slots = run.longest_compared, run.keeps_slots
        sampler = ResponseGenerator(engine, rollout, tokenizer.pad_token_id)
        return sampler.generate(batch or prompts(*TEXTS), request or GenerationRequest(3, 4))

    run.model, run.tokenizer, run.longest_compared, run.keeps_slots = model, tokenizer, 0, None
    return run


def assert_same_responses(left: DataProto, right: DataProto):
    left, right = by_row(left), by_row(right)
    assert left.keys() == right.keys()
    for key, (tokens, log_probs) in left.items():
        assert tokens == right[key][0], key
        torch.testing.assert_close(log_probs, right[key][1], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"top_p": 0.8}, {"top_k": 5}, {"temperature": 1.5, "top_k": 20, "min_new_tokens": 4}],
    ids=str,
)
def test_recorded_log_probs_are_the_models_own(model64, prompts, options):
    actor = start_actor(model64, HFRollout(max_new_tokens=9, stop_token_ids=DIGITS, **options))
    rows = actor.generate(prompts(*TEXTS), GenerationRequest(0, 4)).check(strict=True)
    found = actor.compute_log_probs(rows)["old_log_probs"]
    torch.testing.assert_close(rows["rollout_log_probs"], found, rtol=0, atol=1e-10)
    assert rows["response_mask"].sum(dim=1).unique().numel() > 2


BATCHED = [
    {"max_rows": 1},
    {"max_rows": 9},
    {"share_prefix": False},
    {"drop_finished": False},
    {"share_prefix": False, "drop_finished": False, "max_rows": 8},
]


@pytest.mark.first_rows(2)
@pytest.mark.parametrize(
    ("kind", "options"),
    each_value_once(
        {"plain": {}, "filtered": {"temperature": 0.7, "top_p": 0.8, "top_k": 30}},
        {str(options): options for options in BATCHED},
    ),
)
def test_how_rows_are_batched_changes_no_response(generate, kind, options):
    assert_same_responses(generate(**kind), generate(**kind, **options))


def test_order_company_samples_groups_and_padding_change_no_response(generate, prompts):
    whole, order = generate(), [4, 2, 0, 5, 3, 1]
    shuffled = generate(prompts(*[TEXTS[i] for i in order], ids=order))
    assert shuffled["prompt_ids"].tolist() == [i for i in order for _ in range(4)]
    assert_same_responses(whole, shuffled)
    relabelled = generate(prompts(*TEXTS, groups=[50, 40, 30, 20, 10, 0]))
    assert relabelled["group_ids"].tolist() == [g for g in (50, 40, 30, 20, 10, 0) for _ in range(4)]
    assert_same_responses(whole, relabelled)
    batch = prompts(*TEXTS)
    mask = torch.nn.functional.pad(batch["prompt_mask"], (5, 0))
    tokens = torch.nn.functional.pad(batch["prompts"], (5, 0)).masked_fill(~mask, 88)
    wide = batch.select(["prompt_ids", "group_ids"]).union(
        DataProto.from_dict({"prompts": tokens, "prompt_mask": mask})
    )
    assert_same_responses(whole, generate(wide))
    among = by_row(whole)
    alone = [by_row(generate(prompts(text, ids=[number]))) for number, text in enumerate(TEXTS)]
    for some in (*alone, by_row(generate(request=GenerationRequest(3, 2)))):
        assert all(among[key][0] == tokens for key, (tokens, _) in some.items())


@pytest.mark.parametrize(
    "other",
    [{"seed": 1}, {"request": GenerationRequest(4, 4)}, {"request": GenerationRequest(3, 4, stream=EVALUATION)}],
    ids=["seed", "step", "stream"],
)
def test_the_draws_depend_on(generate, other):
    here, there = by_row(generate()), by_row(generate(**other))
    assert sum(here[key][0] != there[key][0] for key in here) > 15


def test_the_draws_depend_on_prompt_and_sample_numbers(generate, prompts):
    twins = by_row(generate(prompts("1+2=", "1+2=", ids=[0, 1])))
    assert len({tuple(tokens) for tokens, _ in twins.values()}) == 8


def test_the_state_of_torchs_own_generator_is_neither_used_nor_changed(generate):
    torch.manual_seed(1)
    first, state = generate(), torch.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert_same_responses(first, generate())


def test_greedy_takes_the_likeliest_token_and_ignores_the_noise(generate):
    rows = generate(request=GenerationRequest(3, 1, greedy=True), temperature=0.7)
    assert_same_responses(
        rows, generate(request=GenerationRequest(9, 1, greedy=True), seed=5, temperature=0.7, max_rows=1)
    )
    for row in rows:
        text = row["input_ids"][row["attention_mask"].bool()][None]
        length = int(row["response_mask"].sum())
        logits = generate.model(text).logits[:, -length - 1 : -1]
        assert torch.equal(logits.argmax(dim=-1), text[:, -length:])


def test_a_stop_token_ends_a_row_and_belongs_to_it(generate):
    rows = generate(request=GenerationRequest(0, 20))
    stops = torch.tensor([1, *DIGITS])
    lengths, responses = rows["response_mask"].sum(dim=1), rows["responses"]
    is_stop = torch.isin(responses, stops) & rows["response_mask"]
    assert is_stop.sum(dim=1).max() == 1
    for length, stop in zip(lengths.tolist(), is_stop.tolist(), strict=True):
        assert length == 9 or stop[length - 1]
    assert 20 < int(is_stop.sum()) < len(rows)
    assert not responses[~rows["response_mask"]].any()


def test_no_stop_token_is_drawn_before_the_minimum(generate):
    many = GenerationRequest(0, 20)
    free, held = generate(request=many), generate(request=many, min_new_tokens=4)
    assert free["response_mask"].sum(dim=1).min() == 1
    assert held["response_mask"].sum(dim=1).min() == 5  # four tokens of its own, then the first that may stop
    assert generate(request=many, min_new_tokens=9)["response_mask"].all()
    greedy = generate(request=GenerationRequest(0, greedy=True), min_new_tokens=9, stop_token_ids=tuple(range(90)))
    assert greedy["responses"].min() >= 90


def test_no_prompts_give_no_rows(generate, prompts):
    rows = generate(prompts()[:0])
    assert len(rows) == 0
    assert rows["responses"].shape == (0, 0)


def test_decoding_ends_when_every_row_has(generate, monkeypatch):
    calls, generate.longest_compared, generate.keeps_slots = [], 10**6, True
    forward = generate.model.forward
    monkeypatch.setattr(
        generate.model, "forward", lambda *a, **k: calls.append(k["input_ids"].shape) or forward(*a, **k)
    )
    rows = generate(stop_token_ids=tuple(range(102)))
    assert rows["responses"].shape[1] == 1
    assert calls == [(6, 40)]  # one prefill of six prompts for 24 rows, and no step after it


def test_finished_rows_leave_the_batch(generate, monkeypatch):
    calls, generate.longest_compared, generate.keeps_slots = [], 10**6, True
    forward = generate.model.forward
    monkeypatch.setattr(
        generate.model, "forward", lambda *a, **k: calls.append(k["input_ids"].shape) or forward(*a, **k)
    )
    rows = generate(stop_token_ids=tuple(range(7, 40)))
    sizes = [shape[0] for shape in calls[1:]]
    unfinished = [int(column.sum()) for column in rows["response_mask"].T][1:]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 12
    assert all(live <= size <= max(live / 0.875, live + 1) for live, size in zip(unfinished, sizes, strict=True))


def test_each_token_is_the_inverse_cdf_of_its_own_noise(generate):
    for row in generate(request=GenerationRequest(3, 1)):
        text = row["input_ids"][row["attention_mask"].bool()][None]
        length = int(row["response_mask"].sum())
        cdf = generate.model(text).logits[0, -length - 1 : -1].softmax(dim=-1).cumsum(dim=-1)
        noise = uniform(0, 3, row["prompt_ids"], row["sample_ids"], torch.arange(length))
        assert (cdf > noise[:, None]).int().argmax(dim=-1).tolist() == text[0, -length:].tolist()


@pytest.mark.parametrize(("option", "kept"), [({"top_k": 3}, 3), ({"top_p": 0.05}, 6)])
def test_what_is_cut_off_is_never_drawn(generate, prompts, option, kept):
    rows = generate(prompts("1+2=", ids=[7]), GenerationRequest(0, 500), max_new_tokens=1, **option)
    logits = generate.model(rows["prompts"][:1]).logits[:, -1]
    best = logits.topk(kept).indices[0].tolist()
    drawn = set(rows["responses"][:, 0].tolist())
    assert 1 <= len(drawn) <= kept
    assert drawn <= set(best)
    assert rows["rollout_log_probs"].exp().sum() < 500  # of the whole vocabulary, not of what was left
    expected = log_probs_of(logits.expand(500, -1), rows["responses"][:, 0])
    torch.testing.assert_close(rows["rollout_log_probs"][:, 0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("num_changed", "keeps_slots"), [(1, True), (None, False)])
def test_slots_are_judged_by_all_logits_and_not_by_the_one_that_rounding_hits_hardest(
    num_changed, keeps_slots, model32, monkeypatch
):
    read = SlotRows.read

    def rounded(rows, tokens):
        following = read(rows, tokens)
        changed = following.logits[:, :num_changed]
        changed += 2 * (torch.arange(changed.shape[1]) % 2) + 0.4
        return following

    monkeypatch.setattr(SlotRows, "read", rounded)
    engine = start_actor(model32, autocast="bfloat16").generator.engine
    with engine.computing(), torch.no_grad():
        engine.paths(16)
    assert engine.keeps_slots is keeps_slots
