"""Training sessions: equal to plain torch, independent of each other, continued bit by bit."""

from __future__ import annotations

import functools
import math
import shutil
from pathlib import Path

import pytest
import torch
from image_models import save_image_model
from peft import PeftModel
from random_models import save_random_model
from refusals import refusal
from trainer.runs import fit, ppo_run
from transformers import AutoModelForCausalLM

from verl import TrainingSession
from verl.algorithms.advantages import GRPO
from verl.algorithms.algorithm import Algorithm
from verl.algorithms.losses import PPOClip
from verl.engines.optimizer import AdamW
from verl.errors import ConfigError
from verl.models.lora import LoRA
from verl.models.pretrained import Pretrained
from verl.service.adapters import BASE
from verl.service.data import Datum, loss_rows
from verl.service.losses import LOSSES, loss_of
from verl.service.sampling import PromptRequest, SamplingOptions
from verl.service.sampling import sample as sampled
from verl.workers.actor import Actor, ActorWorker

TEXTS = ("1+2=3", "34+5=39", "what is 6*7? 42", "9-")


def session(model64, **options) -> TrainingSession:
    return TrainingSession(model64, **{"rank": 4, "seed": 1, "device": "cpu", **options})


def data_for(tokenizer, loss: str, width: int | None = None) -> list[Datum]:
    """Rows of several lengths with inputs of a loss; the first tokens of each are not trained on."""
    found, noise = [], torch.Generator().manual_seed(5)
    for text in TEXTS:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        count = len(ids) - 1
        weights = torch.rand(count, generator=noise, dtype=torch.float64)
        weights[: count // 2] = 0.0
        if loss == "cross_entropy":
            inputs = {"target_tokens": ids[1:], "weights": weights}
        else:
            q = -torch.rand(count, generator=noise, dtype=torch.float64) * 6
            inputs = {"target_tokens": ids[1:], "logprobs": q, "advantages": weights - 0.3 * (weights > 0)}
        if width is not None:
            targets = torch.stack([torch.tensor(ids[1:]), *(torch.tensor(ids[:-1]) for _ in range(width - 1))], dim=1)
            inputs = {"target_tokens": targets, "weights": weights[:, None].expand(-1, width)}
        found.append(Datum(ids[:-1], inputs))
    return found


def by_hand(loss: str, log_probs: torch.Tensor, x: dict) -> torch.Tensor:
    """The sum of a loss over the tokens of a row, written out token by token."""
    if loss == "cross_entropy":
        return -(log_probs * x["weights"]).sum()
    total, q, a = torch.zeros((), dtype=log_probs.dtype), x["logprobs"], x["advantages"]
    sequence = (log_probs.detach() - q).mean()
    for lp, old, adv in zip(log_probs, q, a, strict=True):
        ratio = torch.exp(lp - old)
        if loss == "importance_sampling":
            total = total - ratio * adv
        elif loss == "ppo":
            total = total - min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)
        elif loss == "cispo":
            total = total - min(max(float(ratio), 0.8), 1.2) * adv * lp
        elif loss == "dro":
            total = total - (lp * adv - 0.025 * (lp - old) ** 2)
        else:
            s = torch.exp(sequence) * torch.exp(lp - lp.detach())
            total = total - min(s * adv, s.clamp(1 - 3e-4, 1 + 4e-4) * adv)
    return total


def step_by_hand(model64, start: dict, shape, loss: str, data: list[Datum]) -> tuple[float, dict]:
    """One step of torch's AdamW on a peft model of the same weights, row by row."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForCausalLM.from_pretrained(model64.path, dtype=torch.float64)
    layers = sorted({name.split(".")[-3] for name in start})
    model = get_peft_model(base, LoraConfig(r=shape.rank, lora_alpha=shape.alpha, target_modules=layers))
    own = {n.replace(".default.", "."): p for n, p in model.named_parameters() if "lora_" in n}
    with torch.no_grad():
        for name, p in own.items():
            p.copy_(start[name])
    optimizer = torch.optim.AdamW(own.values(), lr=1e-2, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.1)
    total = torch.zeros((), dtype=torch.float64)
    for datum in data:
        logits = model(input_ids=torch.tensor(datum.tokens)[None]).logits[0]
        targets = torch.as_tensor(datum.inputs["target_tokens"])
        log_probs = logits.log_softmax(-1)
        if targets.dim() == 2:
            total = total - (log_probs.gather(1, targets) * datum.inputs["weights"]).sum()
        else:
            total = total + by_hand(loss, log_probs.gather(1, targets[:, None])[:, 0], dict(datum.inputs))
    total.backward()
    optimizer.step()
    return float(total), {name: p.detach() for name, p in own.items()}


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(("loss", "width"), [*((name, None) for name in LOSSES), ("cross_entropy", 3)])
def test_forward_backward_and_optim_step_make_the_step_of_plain_torch(loss, width, model64):
    one = session(model64)
    start, data = one.weights(), data_for(one.tokenizer, loss, width)
    before = one.forward(data, loss)
    output = one.forward_backward(data, loss)
    metrics = one.optim_step(lr=1e-2, weight_decay=0.1)
    expected, weights = step_by_hand(model64, start, one.lora, loss, data)
    assert output.loss == pytest.approx(expected, rel=1e-9)
    assert (before.loss, metrics["is_skipped"], one.updates) == (pytest.approx(output.loss, rel=1e-12), 0.0, 1)
    assert all(torch.equal(a, b) for a, b in zip(before.log_probs, output.log_probs, strict=True))
    after = one.weights()
    assert after.keys() == weights.keys()
    assert max(float((after[name] - weights[name]).abs().max()) for name in after) < 1e-9
    assert any(not torch.equal(after[name], start[name]) for name in after)


def test_a_step_of_grpo_is_that_of_the_trainer(model64, tmp_path, monkeypatch):
    """The session gets what the actor of the trainer has sampled and scored, each token with its share in the mean."""
    seen: dict = {}
    update = ActorWorker.update

    def adapter(worker) -> dict:
        return {n.replace(".default.", "."): p for n, p in worker.model.named_parameters() if "lora_" in n}

    @functools.wraps(update)
    def noting(worker, batch):
        seen["before"] = {name: p.detach().clone() for name, p in adapter(worker).items()}
        seen["metrics"], seen["batch"] = update(worker, batch), batch
        seen["after"] = {name: p.detach().clone() for name, p in adapter(worker).items()}
        return seen["metrics"]

    monkeypatch.setattr(ActorWorker, "update", noting)
    optimizer = AdamW(lr=1e-2, max_grad_norm=0.5)
    lora = LoRA(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj"))
    algorithm = Algorithm(advantage=GRPO(), policy_loss=PPOClip(), aggregation="seq-mean-token-mean")
    actor = Actor(model=model64, optimizer=optimizer, lora=lora)
    fit(ppo_run(model64, algorithm, actor=actor, critic=None, reference=None, total_steps=1), tmp_path / "run")
    x, data = seen["batch"].batch, []
    for row, mask in enumerate(x["response_mask"]):
        width = x["input_ids"].shape[1] - len(mask)
        prompt = x["input_ids"][row][:width][x["attention_mask"][row][:width].bool()].tolist()
        response, zeros = x["responses"][row][mask].tolist(), [0.0] * (len(prompt) - 1)
        share = x["advantages"][row][mask].double() / int(mask.sum()) / len(x["responses"])
        old = x["old_log_probs" if "old_log_probs" in x else "rollout_log_probs"][row][mask].tolist()
        inputs = {"target_tokens": [*prompt[1:], *response], "logprobs": zeros + old}
        data.append(Datum([*prompt, *response[:-1]], inputs | {"advantages": zeros + share.tolist()}))
    one = session(model64, alpha=8.0, mlp=False, unembedding=False)
    weights = one.weights()
    assert seen["before"].keys() < weights.keys()
    for name in weights.keys() - seen["before"].keys():
        weights[name].zero_()  # layers that the trainer's adapter has not
    one.base.set_weights(one.name, {**weights, **seen["before"]})
    output = one.forward_backward(data, "ppo")
    metrics = one.optim_step(lr=1e-2, betas=optimizer.betas, eps=optimizer.eps, max_grad_norm=0.5)
    assert output.loss == pytest.approx(seen["metrics"]["loss"], abs=1e-12)
    assert metrics["grad_norm"] == pytest.approx(seen["metrics"]["grad_norm"], rel=1e-9)
    found = one.weights()
    assert max(float((found[name] - x).abs().max()) for name, x in seen["after"].items()) < 1e-9


def test_gradients_of_several_calls_are_added_and_micro_batches_change_nothing(model64):
    whole, parts = session(model64), session(model64, micro_batch_tokens=8)
    data = data_for(whole.tokenizer, "ppo")
    whole.forward_backward(data, "ppo", clip_high_threshold=1.3)
    for datum in data:
        parts.forward_backward([datum], "ppo", clip_high_threshold=1.3)
    norms = [x.optim_step(lr=1e-2, max_grad_norm=0.1)["grad_norm"] for x in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-9)
    a, b = whole.weights(), parts.weights()
    assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-9


@pytest.mark.first_rows(1)
@pytest.mark.parametrize(
    ("loss", "is_shared"), [("ppo", True), ("cross_entropy", True), ("gspo", True), ("dro", False)]
)
def test_a_prompt_without_influence_is_read_once_for_its_rows(loss, is_shared, model64):
    whole, parts, cut = session(model64), session(model64), session(model64, micro_batch_tokens=40)
    noise = torch.Generator().manual_seed(3)
    data, responses = [], (5, 3, 6)
    for prompt in (list(range(5, 25)), list(range(9, 40))):
        for count in responses:
            response = torch.randint(5, 40, (count,), generator=noise).tolist()
            zeros, values = [0.0] * (len(prompt) - 1), torch.rand(count, generator=noise, dtype=torch.float64).tolist()
            inputs = {"target_tokens": [*prompt[1:], *response], "advantages": [*zeros, *values]}
            if loss == "cross_entropy":
                inputs["weights"] = inputs.pop("advantages")
            else:
                inputs["logprobs"] = [*zeros, *(-x for x in values)]
            if loss == "gspo":
                inputs["sequence_ratio_mask"] = [*zeros, *[1.0] * count]
            data.append(Datum([*prompt, *response[:-1]], inputs))
    rows = loss_rows(data, *loss_of(loss, {}), whole.base.vocabulary, whole.base.longest)
    read = sum(int(micro.packing.tokens.numel()) for micro in whole.engine.micro_batches(rows.batch) if micro.packing)
    assert (read == 20 + 31 + 2 * (sum(responses) - len(responses))) is is_shared
    for shared in (whole, cut):
        output = shared.forward_backward(data, loss)
        for datum, log_probs, losses in zip(data, output.log_probs, output.per_token, strict=True):
            alone = (parts.forward_backward if shared is whole else parts.forward)([datum], loss)
            torch.testing.assert_close(alone.log_probs[0], log_probs, rtol=0, atol=1e-10)
            torch.testing.assert_close(alone.per_token[0], losses, rtol=0, atol=1e-10)
    norms = [x.optim_step(lr=1e-2)["grad_norm"] for x in (whole, parts, cut)]
    assert norms == pytest.approx(norms[:1] * 3, rel=1e-9)


def steps(one: TrainingSession, number: int, begin: int = 0) -> list:
    """Calls of a training loop; returns all that they give."""
    found: list = []
    for step in range(begin, begin + number):
        prompts = [one.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS[:2]]
        samples = one.sample(prompts, num_samples=2, max_new_tokens=5)
        rows = []
        for prompt, group in zip(prompts, samples, strict=True):
            for index, sample in enumerate(group):
                count, new = len(prompt) - 1, len(sample.tokens)
                rows.append(
                    Datum(
                        [*prompt, *sample.tokens[:-1]],
                        {
                            "target_tokens": [*prompt[1:], *sample.tokens],
                            "logprobs": [0.0] * count + sample.log_probs,
                            "advantages": [0.0] * count + [1.0 - 2 * index + 0.1 * step] * new,
                        },
                    )
                )
        output = one.forward_backward(rows, "importance_sampling")
        found += [samples, output.loss, one.optim_step(lr=1e-2)]
    return found


def same_bits(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_two_adapters_side_by_side_are_each_as_alone(model32):
    alone = [session(model32, seed=1, rank=4), session(model32, seed=2, rank=8, unembedding=False)]
    expected = [(steps(one, 3), one.weights()) for one in alone]
    first = session(model32, seed=1, rank=4)
    second = first.another(8, seed=2, unembedding=False)
    found: list[list] = [[], []]
    for step in range(3):
        for one, said in zip((first, second), found, strict=True):
            said += steps(one, 1, step)
    assert found == [said for said, _ in expected]
    assert all(same_bits(x.weights(), weights) for x, (_, weights) in zip((first, second), expected, strict=True))


def test_a_gradient_that_waits_is_not_touched_by_the_step_of_another_adapter(model64):
    first = session(model64)
    second, data = first.another(4, seed=9), data_for(first.tokenizer, "cross_entropy")
    twin = session(model64)
    for one in (first, twin):
        one.forward_backward(data)
    second.forward_backward(data)
    second.optim_step(lr=1.0, max_grad_norm=1e-3)
    assert first.optim_step(lr=1e-2) == twin.optim_step(lr=1e-2)
    assert same_bits(first.weights(), twin.weights())


def test_a_saved_session_continues_bit_by_bit(model32, tmp_path):
    one = session(model32)
    steps(one, 2)
    one.save(tmp_path / "saved")
    expected = steps(one, 2, 2), one.weights()
    other = session(model32)
    other.load(tmp_path / "saved")
    assert (steps(other, 2, 2), other.updates) == (expected[0], 4)
    assert same_bits(other.weights(), expected[1])


def test_weights_alone_begin_a_new_optimizer(model64, tmp_path):
    one, data = session(model64), data_for(session(model64).tokenizer, "cross_entropy")
    for _ in range(2):
        one.forward_backward(data)
        one.optim_step(lr=1e-2)
    one.save(tmp_path / "saved")
    other = session(model64, seed=7)
    other.load(tmp_path / "saved", optimizer=False)
    assert (other.updates, same_bits(one.weights(), other.weights())) == (0, True)
    for x in (one, other):
        x.forward_backward(data)
        x.optim_step(lr=1e-2)
    assert not same_bits(one.weights(), other.weights())


def test_a_saved_adapter_opens_with_peft_and_has_the_same_log_probs(model64, tmp_path):
    one = session(model64)
    steps(one, 1)
    one.save(tmp_path / "saved")
    base = AutoModelForCausalLM.from_pretrained(model64.path, dtype=torch.float64)
    model = PeftModel.from_pretrained(base, str(tmp_path / "saved"))
    (datum, *_) = data_for(one.tokenizer, "cross_entropy")
    logits = model(input_ids=torch.tensor(datum.tokens)[None]).logits[0].log_softmax(-1)
    expected = logits.gather(1, torch.tensor(datum.inputs["target_tokens"])[:, None])[:, 0]
    assert torch.allclose(one.forward([datum]).log_probs[0], expected, atol=1e-10)


@pytest.fixture(scope="module")
def saved(model64, tmp_path_factory) -> tuple[TrainingSession, Path]:
    """A session after a step, and where it was saved."""
    one, directory = session(model64), tmp_path_factory.mktemp("session") / "saved"
    steps(one, 1)
    one.save(directory)
    return one, directory


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "optimizer.safetensors", "session.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_a_damaged_session_is_named_and_changes_nothing(file, damage, saved, tmp_path):
    one, directory = saved
    shutil.copytree(directory, tmp_path / "saved")
    path, before = tmp_path / "saved" / file, one.weights()
    content = path.read_bytes()
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(content[:-9] if damage == "cut" else content[:40] + bytes([content[40] ^ 1]) + content[41:])
    with pytest.raises(ConfigError, match="saved"):
        one.load(tmp_path / "saved")
    assert same_bits(one.weights(), before)


def test_a_session_of_another_shape_and_a_directory_in_use_are_refused(model64, tmp_path):
    one = session(model64)
    one.save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="rank=4"):
        one.another(8).load(tmp_path / "saved")
    with pytest.raises(ConfigError, match="something already"):
        one.save(tmp_path / "saved")
    one.save(tmp_path / "to_sample", optimizer=False)
    with pytest.raises(ConfigError, match="optimizer=False"):
        one.load(tmp_path / "to_sample")


def test_a_closed_session_says_so_and_may_be_closed_again(model64):
    with session(model64) as one:
        one.close()
    for call in (lambda: one.sample([[5, 6]]), lambda: one.forward_backward([Datum([5], {"target_tokens": [6]})])):
        with refusal("this"):
            call()


def test_settings_of_a_session_that_cannot_work_are_refused(model64, tmp_path):
    for name, value in (("micro_batch_tokens", 0), ("device", "cuda:99")):
        with refusal(name, value=value):
            TrainingSession(model64, **{name: value})  # type: ignore
    with session(model64) as one:
        one.save(tmp_path)
        with refusal("temperature", value=1e-40):
            one.sample([[5, 6]], temperature=1e-40)
    with refusal("model", value=tmp_path):  # its adapter would be saved without the first one
        TrainingSession(tmp_path)


# -- samples


def test_a_sample_has_the_log_probs_of_a_forward_pass_and_does_not_depend_on_others(model64):
    one = session(model64)
    prompts = [one.tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    together = one.sample(prompts, num_samples=3, max_new_tokens=6, seed=3, temperature=1.0)
    (alone,) = one.sample(prompts[1:2], num_samples=3, max_new_tokens=6, seed=3)
    assert [x.tokens for x in alone] == [x.tokens for x in together[1]]
    for prompt, samples in zip(prompts, together, strict=True):
        for x in samples:
            row = Datum([*prompt, *x.tokens[:-1]], {"target_tokens": [*prompt[1:], *x.tokens]})
            found = one.forward([row]).log_probs[0][len(prompt) - 1 :]
            assert torch.allclose(found, torch.tensor(x.log_probs, dtype=torch.float64), atol=1e-9)


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("stop", [None, ("1", "7")])
def test_rows_of_several_adapters_in_one_batch_are_sampled_as_each_alone(stop, tokenizer, tmp_path):
    path = save_random_model(tmp_path, "qwen2", torch.float64, max_position_embeddings=128)
    tokenizer.save_pretrained(path)
    first = session(Pretrained(path=str(path), dtype="float64"))
    second, long = first.another(2, seed=7), list(range(3, 90))  # prompts of this length are shared by their samples
    for one in (first, second):
        one.forward_backward(data_for(one.tokenizer, "cross_entropy"))
        one.optim_step(lr=0.05)
    base, options = first.base, SamplingOptions(max_new_tokens=5, stop=stop)

    def drawn(*named: tuple[str | None, str]) -> list:
        names = [name for name, _ in named]
        prompts = [PromptRequest(long, 3, (1,), weights) for _, weights in named]
        prompts += [PromptRequest(long[:9], 2, (2,), weights) for _, weights in named]
        with base.sampling_from(*names) as engine:
            return sampled(engine, base.tokenizer, prompts, options, base.longest)

    names = (first.name, second.name, None)
    alone = [drawn((name, "")) for name in names]
    together = drawn(*((name, name or BASE) for name in names))
    expected = [alone[i][k] for k in (0, 1) for i in range(3)]
    assert [[x.tokens for x in group] for group in together] == [[x.tokens for x in group] for group in expected]
    for mine, its in zip(together, expected, strict=True):
        for x, y in zip(mine, its, strict=True):
            torch.testing.assert_close(torch.tensor(x.log_probs), torch.tensor(y.log_probs), rtol=0, atol=1e-6)
    assert len({str([x.log_probs for x in group]) for group in together}) == 6


@pytest.mark.first_rows(1)
@pytest.mark.parametrize("stop", [(), ("no such text",)])
def test_prompts_that_join_a_batch_are_sampled_as_each_alone(stop, tokenizer, tmp_path):
    path = save_random_model(tmp_path, "qwen2", torch.float64, max_position_embeddings=128)
    tokenizer.save_pretrained(path)
    one = session(Pretrained(path=str(path), dtype="float64"))
    base, options = one.base, SamplingOptions(max_new_tokens=8, stop=stop)
    prompts = [PromptRequest(list(range(3, 3 + count)), 3, (index,)) for index, count in enumerate((80, 9, 90, 80))]
    steps = [(), prompts[1:2], (), prompts[2:]]

    def drawn(begun, late) -> list:
        with base.sampling_from(one.name) as engine:
            return sampled(engine, base.tokenizer, begun, options, base.longest, late=late)

    together = drawn(prompts[:1], lambda: steps.pop(0) if steps else ())
    assert not steps
    for prompt, samples in zip(prompts, together, strict=True):
        (alone,) = drawn([prompt], tuple)
        assert [x.tokens for x in samples] == [x.tokens for x in alone]
        for x, y in zip(samples, alone, strict=True):
            torch.testing.assert_close(torch.tensor(x.log_probs), torch.tensor(y.log_probs), rtol=0, atol=1e-6)


def test_samples_differ_from_call_to_call_and_a_seed_repeats_them(model64):
    one = session(model64)
    prompt = [one.tokenizer("1+2=", add_special_tokens=False)["input_ids"]]
    calls = [one.sample(prompt, 4, max_new_tokens=8) for _ in range(2)]
    seeded = [one.sample(prompt, 4, max_new_tokens=8, seed=seed) for seed in (1, 1, 2)]
    assert calls[0] != calls[1]
    assert seeded[0] == seeded[1] != seeded[2]


def test_stops_end_a_sample_and_stay_in_it(model64):
    one = session(model64)
    prompt = [one.tokenizer("1+2=", add_special_tokens=False)["input_ids"]]
    (free,) = one.sample(prompt, 1, max_new_tokens=12, seed=1, stop=[])
    tokens = free[0].tokens
    assert (len(tokens), free[0].is_stopped) == (12, False)
    text = one.tokenizer.decode(tokens[3:5])
    expected = next(n for n in range(1, 13) if text in one.tokenizer.decode(tokens[:n]))
    for stop in (text, [text], [tokens[4]]):
        (found,) = one.sample(prompt, 1, max_new_tokens=12, seed=1, stop=stop)
        limit = expected if not isinstance(stop, list) or stop[0] == text else tokens.index(tokens[4]) + 1
        ends = one.tokenizer.eos_token_id
        if ends not in tokens[:limit]:
            assert (found[0].tokens, found[0].is_stopped) == (tokens[:limit], True)
    (cold,) = one.sample(prompt, 2, max_new_tokens=5, temperature=0.0)
    assert cold[0].tokens == cold[1].tokens


# -- refusals


INPUTS, SUPERVISED = "data[0].loss_fn_inputs", "cross_entropy"
TARGETS, CLIP_LOW = f"{INPUTS}.target_tokens", "loss_fn_config.clip_low_threshold"


def one_token(**inputs) -> list[Datum]:
    return [Datum([1], {"target_tokens": [1]} | inputs)]


BAD = [  # data, loss, settings, and what is blamed
    ([], SUPERVISED, {}, "data"),
    ([Datum([], {"target_tokens": []})], SUPERVISED, {}, "data[0].model_input"),
    ([Datum([9999], {"target_tokens": [1]})], SUPERVISED, {}, "data[0].model_input"),
    ([Datum("ab", {"target_tokens": [1]})], SUPERVISED, {}, "data[0].model_input"),
    ([Datum([1], {})], SUPERVISED, {}, INPUTS),
    (one_token(target_tokens=[-1]), SUPERVISED, {}, TARGETS),
    (one_token(target_tokens=[1, 2]), SUPERVISED, {}, TARGETS),
    (one_token(weights=[1.0, 2.0]), SUPERVISED, {}, f"{INPUTS}.weights"),
    (one_token(weights=[math.inf]), SUPERVISED, {}, f"{INPUTS}.weights"),
    (one_token(mask=[1.0]), SUPERVISED, {}, INPUTS),
    (one_token(logprobs=[0.0]), "ppo", {}, INPUTS),
    (one_token(), "ppoo", {}, "loss_fn"),
    (one_token(), "ppo", {"clip": 1}, "loss_fn_config.clip"),
    (one_token(), "dro", {"beta": math.nan}, "loss_fn_config.beta"),
    (one_token(), "ppo", {"clip_low_threshold": 2.0}, CLIP_LOW),
]


def test_data_that_do_not_fit_are_named_and_leave_the_gradients(model64):
    one, twin = session(model64), session(model64)
    good = data_for(one.tokenizer, "cross_entropy")
    for x in (one, twin):
        x.forward_backward(good)
    for data, loss, settings, path in BAD:
        with refusal(path):
            one.forward_backward(data, loss, **settings)
    assert one.optim_step(lr=1e-2) == twin.optim_step(lr=1e-2)
    assert same_bits(one.weights(), twin.weights())


@pytest.mark.parametrize(
    ("name", "value", "path"),
    [
        ("lr", -1.0, "lr"),
        ("lr", math.nan, "lr"),
        ("betas", (0.9, 1.0), "betas[1]"),
        ("eps", math.inf, "eps"),
        ("max_grad_norm", -2.0, "max_grad_norm"),
    ],
)
def test_values_of_a_step_are_checked_before_it(name, value, path, model64):
    one = session(model64)
    one.forward_backward(data_for(one.tokenizer, "cross_entropy"))
    with refusal(path):
        one.optim_step(**{name: value})
    assert one.optim_step()["is_skipped"] == 0.0
    with pytest.raises(RuntimeError, match="forward_backward"):
        one.optim_step()


@pytest.mark.first_rows(3)
@pytest.mark.parametrize(
    ("options", "path"),
    [
        ({"num_samples": 0}, "num_samples"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"stop": ["x" * 300]}, "stop"),
        ({"stop": [10**6]}, "stop"),
    ],
)
def test_options_of_sampling_are_checked(options, path, model64):
    with refusal(path):
        session(model64).sample([[5, 6]], **options)


def test_a_prompt_without_room_for_a_response_is_refused(model64):
    one = session(model64)
    for prompts in ([[5] * one.base.longest], [5, 6]):  # the second is one prompt, not several
        with refusal("prompt"):
            one.sample(prompts)
    (short,) = one.sample([[5] * (one.base.longest - 2)], max_new_tokens=9, stop=[])
    assert len(short[0].tokens) == 2


def test_shapes_of_adapters_choose_layers(model64):
    one = session(model64, mlp=False, unembedding=False)
    names = {name.split(".")[-3] for name in one.weights()}
    assert names == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert one.lora.alpha == 32.0
    with refusal("rank"):
        one.another(0)


def test_adapters_of_an_image_text_model_leave_its_tower_out(tmp_path):
    one = session(save_image_model(tmp_path, "qwen2_5_vl"), unembedding=False)
    assert {name.split(".")[3] for name in one.weights()} == {"language_model"}


def test_the_loop_of_the_documents_runs(model64):
    """The loop of docs/serving.md runs as it stands there."""
    text = (Path(__file__).parents[2] / "docs/serving.md").read_text()
    code = text.partition("<!-- session -->")[2].partition("```python\n")[2].partition("```")[0]
    assert "optim_step" in code
    assert code.count("\n") <= 40
    exec(code.replace('"MODEL"', "MODEL").replace("range(100)", "range(2)"), {"MODEL": model64.path})
