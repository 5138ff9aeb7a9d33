"""Which ways of running a model are right for it: each is compared with a plain forward pass of each row, on a small
twin.

    twin ──> plain forward of each row ──> numbers that are wanted
         ──> every way that a run can use ──> numbers ──> equal: the way is open; else: a plainer one, and the reason

A twin counts only if it tells planted faults from what is right. What is found is kept on disk by a digest of all that
it depends on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.model_paths import finding_cache, packed_attention
from verl.model_paths.paths import PLAIN, CacheKind, ModelPaths, PathFinding, Scoring
from verl.model_paths.trial import TrialRow, alone, decoded, distance, numbers_of, random_tokens, scored, states_of
from verl.model_paths.twin import (
    LIMIT,
    ROW_TOKENS,
    NoTwin,
    Twin,
    crossed_lengths,
    has_own_code,
    layer_kinds,
    lengths_in,
    make_twin,
)
from verl.models.call import has_lm_head, takes, unwrapped
from verl.models.parallel_info import compute_device
from verl.models.pretrained import quiet_transformers
from verl.ops.logprobs import response_positions
from verl.utils.progress import report

TOLERANCE = 1e-4  # nats, of one number of the twin in float32
TOLD_APART = 10 * TOLERANCE  # a planted fault must change some number by so much
ROUNDING = 0.01  # nats; in a model that lets it grow, rounding makes no larger difference
CALM = 0.5  # of the size of weights, of a second twin for such a model
SAMPLES = 3  # responses to each prompt that is shared
LEAKED = 40  # tokens of another row that a planted fault shows
PROBE_TOKENS = 24, 37, ROW_TOKENS  # of rows of the model itself, where it has no twin
PROBE_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}  # of the spread of its numbers
PROBE_TOLERANCE = 0.02  # in narrower types
PROBED = "probed"  # in the place of lengths, of what was found without a twin
NOT_A_POLICY = "each token sees those that come after it, so it cannot be a policy. Give a causal language model."
NOT_BESIDE_OTHERS = "a row has other numbers with_others a row of the same length than alone."
NOT_REPEATABLE = "its numbers differ from one forward pass of a row to the next, so it has no log-probs to train on."


def _way(cache: CacheKind, pads: bool, rows: bool, prefix: bool = False) -> ModelPaths:
    return ModelPaths(cache=cache, pads_prompts=pads, repeats_rows=rows, drops_rows=rows, shares_prefix=prefix)


DECODING = (  # from the fastest way to the plainest: whether it pads prompts, repeats and drops rows, shares a prefix
    _way("in_place", True, True, True),
    _way("in_place", True, True),
    _way("in_place", False, True),
    _way("own", True, True),
    _way("own", False, True),
    _way("own", True, False),
    _way("own", False, False),
    _way("none", True, True),
    _way("none", False, True),
)

_log = logging.getLogger(__name__)


def plainer_decoding(paths: ModelPaths) -> ModelPaths | None:
    """The next plainer way of decoding that these paths allow; None if there is none."""
    ways = [_decoding_as(paths, option) for option in DECODING if paths.own_attention or not option.shares_prefix]
    plainer = ways[ways.index(paths) + 1 :] if paths in ways else []
    return plainer[0] if plainer else None


def _decoding_as(paths: ModelPaths, option: ModelPaths) -> ModelPaths:
    names = ("cache", "pads_prompts", "repeats_rows", "drops_rows", "shares_prefix")
    return replace(paths, **{name: getattr(option, name) for name in names})


def paths_for(model: Any, row_tokens: int, name: str = "model", *, shares_tokens: bool = False) -> ModelPaths:
    """The verified execution paths of a model for rows up to a length; checked once, and cached.

    The model takes its attention function from where these paths say.

    Args:
        name: where the configuration describes the model, for messages.
        shares_tokens: whether the tokens of a row will be divided over processes, which packed lines alone allow: then
            attention, which exchanges, is shown to be all that couples tokens.
    Raises:
        ConfigError: the model cannot be trained, whatever way it is run, or not so.
    """
    finding = finding_for(model, row_tokens, examine, _probe)
    if finding.refusal is not None:
        raise ConfigError(f"{name} is a {type(unwrapped(model)).__name__}: {finding.refusal}")
    paths = finding.paths
    if paths.own_attention and packed_attention.enable(unwrapped(model)) is not None:
        paths = replace(PLAIN, reasons=("its attention cannot be replaced",))
    if shares_tokens and paths.scoring != "packed":
        raise ConfigError(
            f"{name} is a {type(unwrapped(model)).__name__}: context parallelism (sharding.cp) needs a model whose "
            f"tokens meet in attention alone, as packed lines do, and it was not shown to be one: "
            f"{'; '.join(paths.reasons) or 'it runs as ' + paths.scoring + ' batches'}. Set sharding.cp=1."
        )
    return paths


def finding_for(
    model: Any,
    row_tokens: int,
    examine: Callable[[Any, int], PathFinding],
    probe: Callable[[str, Any, int], PathFinding],
) -> PathFinding:
    """The finding for a model and rows of up to this many tokens: from this object, the disk cache, or a new check.

    Args:
        examine: tries the ways of running it on its twin.
        probe: looks at a model that no twin stands for, for a reason.
    """
    base = unwrapped(model)
    known = vars(base).setdefault("_verl_findings", {})
    key: tuple = (examine.__name__, crossed_lengths(base.config, row_tokens))
    config_text = _config_text(base.config)
    if vars(base).setdefault("_verl_findings_of", config_text) != config_text:  # the configuration was changed
        known.clear()
        vars(base)["_verl_findings_of"] = config_text
    if (probed := (examine.__name__, PROBED)) in known:  # by its own weights: all processes that hold it took part
        return known[probed]
    if key not in known:
        reason = has_own_code(model)
        if reason is None:
            found = finding_cache.kept(base, key, functools.partial(_undisturbed, examine, base, row_tokens))
        else:
            found = _undisturbed(functools.partial(probe, reason), model, row_tokens)
        key = key if found.distances else probed
        known[key] = found
        _tell(base, found)
    return known[key]


def forget(model: Any) -> None:
    """Discard the finding of a model whose modules were changed."""
    vars(unwrapped(model)).pop("_verl_findings", None)


def _config_text(config: Any) -> str:
    return repr([(name, x) for name, x in vars(config).items() if not name.startswith("_")])


def _undisturbed(examine: Callable[[Any, int], PathFinding], model: Any, row_tokens: int) -> PathFinding:
    """Outside of what the caller computes in, and without a trace in random generators."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.autocast("cuda", enabled=False),
    ):
        return examine(model, row_tokens)


def examine(model: Any, row_tokens: int) -> PathFinding:
    """Try every way of running a model on its twin."""
    if model.config.is_encoder_decoder:
        return PathFinding(
            PLAIN, "it is an encoder-decoder, and a policy is one decoder. Give a causal language model of its kind."
        )
    try:
        finding = Examination(make_twin(model, row_tokens), model, row_tokens).run()
        if finding.refusal is not None and finding.distances.get("causality", 1.0) < ROUNDING:
            calm = Examination(make_twin(model, row_tokens, sharpness=CALM), model, row_tokens).run()
            return finding if calm.refusal is not None else calm
        return finding
    except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
        kind = "" if isinstance(error, NoTwin) else f"{type(error).__name__}: "
        return _probe(f"{kind}{error}", model, row_tokens)


def _probe(reason: str, model: Any, row_tokens: int) -> PathFinding:
    """Check on short rows of the model itself, if no small copy can be built."""
    why = f"no small model of its kind could be tried ({reason})"
    return PathFinding(replace(PLAIN, reasons=(why,)), _causality_of_the_model(model))


class Examination:
    """Trials of one twin.

    Attributes:
        distances: largest difference in nats, by what was tried.
        reasons: why a way is not open.
    """

    def __init__(self, twin: Twin, model: Any, row_tokens: int):
        self.twin, self.model, self.row_tokens = twin, model, row_tokens
        self.distances: dict[str, float] = {}
        self.reasons: list[str] = []
        self.rows = _scoring_rows(twin)
        self.wanted = [alone(twin.model, row) for row in self.rows]

    def run(self) -> PathFinding:
        if (refusal := self._leaves_out() or self._not_causal()) is not None:
            return PathFinding(PLAIN, refusal, self.distances)
        if (blind := self.blind_for()) is not None:
            why = f"a small model of its kind does not tell {blind} from what is right"
            return PathFinding(replace(PLAIN, reasons=(why,)), None, self.distances)
        scoring = self._batched_rows()
        if scoring is None:
            return PathFinding(PLAIN, NOT_BESIDE_OTHERS, self.distances)
        trains = self._computes_the_same_in_training()
        paths = self._decoding(self._packed(ModelPaths(scoring=scoring, trains=trains)))
        if paths is None:
            return PathFinding(PLAIN, "its tokens have other numbers when they are drawn one by one.", self.distances)
        return PathFinding(replace(paths, reasons=tuple(self.reasons)), None, self.distances)

    # What the model is

    def _leaves_out(self) -> str | None:
        """Some attention functions take no notice of what they do not know, such as a cap on scores; eager knows it."""
        model, before = self.twin.model, self.twin.model.config._attn_implementation
        if before == "eager":
            return None
        try:
            with quiet_transformers():
                model.set_attn_implementation("eager")
            eager = alone(model, self.rows[0])
        except Exception:  # noqa: BLE001 - a model that has none
            return None
        finally:
            with quiet_transformers():
                model.set_attn_implementation(before)
        self.distances["eager attention"] = far = distance(self.wanted[:1], [eager])
        if far <= TOLD_APART:
            return None
        return (
            f"its attention is {before}, which leaves something out: its numbers differ from those of eager attention "
            f"by {far:.2g} nats. Set attention=eager."
        )

    def _not_causal(self) -> str | None:
        model, row, wanted = self.twin.model, self.rows[0], self.wanted[0]
        if distance([alone(model, row)], [wanted]) > TOLERANCE:
            return NOT_REPEATABLE
        cuts = {len(row.response) // 2, len(row.response) - 1}
        cuts |= {n - len(row.prompt) + by for n in self.twin.lengths for by in (-1, 0, 1)}
        kept = [cut for cut in sorted(cuts) if 0 < cut < len(row.response)]
        self.distances["causality"] = max(
            distance([alone(model, TrialRow(row.prompt, row.response[:cut]))], [wanted[:cut]]) for cut in kept
        )
        if self.distances["causality"] <= TOLERANCE:
            return None
        if self.twin.lengths and _is_causal_below(self.model):
            crossed = crossed_lengths(self.model.config, self.row_tokens)
            limits = ", ".join(f"{path} {n}" for path, n in lengths_in(self.model.config).items() if n in crossed)
            return (
                f"the numbers of a token change with the length of its row once that exceeds a limit ({limits}), "
                "so that "
                "what is drawn later changes what was drawn before. Rows of this run may be longer: lower "
                "data.max_prompt_length or rollout.max_new_tokens to stay below, or choose another model."
            )
        return NOT_A_POLICY

    def blind_for(self) -> str | None:
        """A planted fault that is too small to be seen. One that changes nothing at all is none for this model."""
        for name, least, found in self._planted():
            report()
            self.distances[f"planted: {name}"] = far = distance([found], self.wanted[:1])
            if least < far < TOLD_APART:
                return name
        return None

    def _planted(self) -> Iterator[tuple[str, float, Tensor]]:
        """Names, the change up to which a fault is none (below 0: it is always one), and the numbers with it."""
        model, row = self.twin.model, self.rows[0]
        for place in self.twin.lengths:
            for by in (-1, 1):
                other = make_twin(self.model, self.row_tokens, moved=(place, by), sharpness=self.twin.sharpness)
                name = f"a change at {place} tokens that comes at {place + by}"
                yield name, TOLERANCE if place in self.twin.parts else 0.0, alone(other.model, row)
        places = torch.arange(len(row.tokens))[None]
        if takes(model, "position_ids"):
            shifted = places + (places >= len(row.prompt) + 5)
            yield "positions that are one too high", 0.0, alone(model, row, position_ids=shifted)
        other = self.rows[1].prompt
        for name, before in (("visible padding", other[:5] * 0), ("a leaked segment", other[:LEAKED])):
            line = torch.cat([before, row.tokens])[None]
            inputs = {}
            if takes(model, "position_ids"):
                inputs["position_ids"] = torch.cat([torch.arange(len(before)), places[0]])[None]
                inputs["attention_mask"] = torch.ones(1, 1, line.shape[1], line.shape[1], dtype=torch.bool).tril()
            try:
                states = states_of(model, input_ids=line, **inputs)
            except Exception:  # noqa: BLE001 - a model that takes no mask of its own
                states = states_of(model, input_ids=line)
            yield name, -1.0, numbers_of(model, response_positions(states, len(row.response))[0], row.response)

    # How it may be run

    def _computes_the_same_in_training(self) -> bool:
        model = self.twin.model.train()
        why = self._tried("training mode", lambda: [alone(model, row) for row in self.rows], self.wanted)
        model.eval()
        if why is not None:
            self.reasons.append(f"training mode: {why}")
        return why is None

    def _batched_rows(self) -> Scoring | None:
        forms: tuple[Scoring, ...] = ("padded", "right_padded", "equal_lengths")
        for form in forms:
            rows = [row for row in self.rows for _ in range(2)] if form == "equal_lengths" else self.rows
            wanted = [x for x in self.wanted for _ in range(2)] if form == "equal_lengths" else self.wanted
            why = self._tried(form, lambda rows=rows, form=form: self._score(rows, ModelPaths(scoring=form)), wanted)
            if why is None:
                return form
            self.reasons.append(f"rows as {form.replace('_', ' ')} batches: {why}")
        return None

    def _packed(self, paths: ModelPaths) -> ModelPaths:
        """The paths with packed lines, and with our attention function, as far as they are right."""
        twin, before = self.twin.model, self.twin.model.config._attn_implementation
        if paths.scoring != "padded":
            return paths
        if (why := packed_attention.enable(twin)) is not None:
            self.reasons.append(f"packed lines: {why}")
            return paths
        own = replace(paths, own_attention=True)
        if self._tried("own attention", lambda: self._score(self.rows, own), self.wanted) is not None:
            packed_attention.disable(twin, before)
            return paths
        if (why := self._cannot_be_packed()) is not None:
            self.reasons.append(f"packed lines: {why}")
            return own
        packed = replace(own, scoring="packed")
        why = self._tried("packed", lambda: self._score(self.rows, packed), self.wanted)
        if why is not None:
            self.reasons.append(f"packed lines: {why}")
            return own
        shared = replace(packed, shares_prompts=True)
        why = self._tried("packed, shared prompts", lambda: self._score(self.rows, shared), self.wanted)
        if why is not None:
            self.reasons.append(f"packed lines with shared prompts: {why}")
        return packed if why is not None else shared

    def _cannot_be_packed(self) -> str | None:
        """Why packed sequences cannot be used, determined by one forward pass."""
        with packed_attention.recording() as record:
            states_of(self.twin.model, input_ids=self.rows[0].tokens[None])
        kinds = layer_kinds(self.twin.model)
        if None in record.shapes:
            return "it has masks that are neither causal nor sliding"
        if kinds is None or len(record.modules) < len(kinds):
            known = "unknown" if kinds is None else len(kinds)
            return f"{len(record.modules)} of its {known} layers take their attention from outside"
        return None

    def _decoding(self, paths: ModelPaths) -> ModelPaths | None:
        if not has_lm_head(self.twin.model):
            return paths
        long, short = _decoding_rows(self.twin)
        wanted = [[alone(self.twin.model, row) for row in rows] for rows in (long, short)]
        for option in DECODING:
            if (option.shares_prefix and not paths.own_attention) or (
                option.cache == "none" and option.pads_prompts and paths.scoring not in ("padded", "packed")
            ):
                continue
            whole, name = _decoding_as(paths, option), decoding_name(option)
            why = self._tried(
                name,
                lambda whole=whole: [
                    *decoded(self.twin.model, long, SAMPLES, whole),
                    *decoded(self.twin.model, short, 1, whole),
                ],
                [*wanted[0], *wanted[1]],
            )
            if why is None:
                return whole
            self.reasons.append(f"{name}: {why}")
        return None

    def _score(self, rows: Sequence[TrialRow], paths: ModelPaths) -> list[Tensor]:
        return scored(self.twin.model, rows, paths)

    def _tried(self, name: str, run: Callable[[], list[Tensor]], wanted: Sequence[Tensor]) -> str | None:
        """None if a way gives what is wanted, or what is wrong with it."""
        report()
        try:
            self.distances[name] = far = distance(run(), wanted)
        except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
            self.distances[name] = float("inf")
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
        return None if far <= TOLERANCE else f"its numbers differ by {far:.2g} nats"


def decoding_name(option: ModelPaths) -> str:
    """How these paths decode, in words."""
    parts = {
        "in_place": "decoding with a cache in place",
        "own": "decoding with the model's own cache",
        "none": "decoding without a cache",
    }
    more = [", prompts padded"] * option.pads_prompts + [", rows repeated and dropped"] * option.repeats_rows
    return parts[option.cache] + "".join(more) + ", prefix shared" * option.shares_prefix


def _scoring_rows(twin: Twin) -> list[TrialRow]:
    """A long row, a group with one prompt, rows that end just behind each change, and a short one."""

    def row(prompt: int, response: int, seed: int, of: int | None = None) -> TrialRow:
        tokens = random_tokens(prompt, twin.token_ids, 1000 + (seed if of is None else of))
        return TrialRow(tokens, random_tokens(response, twin.token_ids, seed))

    rows = [row(3, ROW_TOKENS - 3, 0), row(150, 40, 1), *(row(150, n, 1 + n, of=1) for n in (1, 6, 17, 3))]
    rows += [row(max(1, n - 2), 6, 100 + place) for place, n in enumerate(twin.lengths)]
    return [*rows, row(9, 9, 5), TrialRow(rows[0].prompt, with_pad(twin, rows[1].response))]


def with_pad(twin: Twin, response: Tensor) -> Tensor:
    """A response in which the model has drawn its own pad token."""
    pad = getattr(twin.model.config.get_text_config(), "pad_token_id", None)
    if pad is None or len(response) < 4:
        return response
    return torch.cat([response[:2], torch.tensor([pad]), response[3:]])


def _decoding_rows(twin: Twin) -> tuple[list[TrialRow], list[TrialRow]]:
    """Groups of `SAMPLES` rows whose prompts end just before each change, and single rows that decode across some."""
    first, end = twin.token_ids
    stop = end - 1
    lengths = [70, 66, *(max(2, n - 2) for n in twin.lengths), ROW_TOKENS - 12, 9]
    long, short = [], []
    for place, length in enumerate(lengths):
        prompt = random_tokens(length, (first, stop), 2000 + place)
        for sample, tokens in enumerate((3, 12, 7)):
            response = random_tokens(tokens - 1, (first, stop), 3000 + 10 * place + sample)
            long.append(TrialRow(prompt, torch.cat([with_pad(twin, response), torch.tensor([stop])])))
    for place, (length, tokens) in enumerate(((5, 50), (9, 20), (12, 33))):
        prompt = random_tokens(length, (first, stop), 4000 + place)
        response = random_tokens(tokens - 1, (first, stop), 5000 + place)
        short.append(TrialRow(prompt, torch.cat([response, torch.tensor([stop])])))
    return long, short


def _is_causal_below(model: Any) -> bool:
    """Whether a model is causal as long as rows cross none of the lengths of its configuration."""
    try:
        twin = make_twin(model, 1)
    except NoTwin:
        return False
    row = _scoring_rows(twin)[0]
    cut = len(row.response) // 2
    found = alone(twin.model, TrialRow(row.prompt, row.response[:cut]))
    return distance([found], [alone(twin.model, row)[:cut]]) <= TOLERANCE


@torch.no_grad()
def _causality_of_the_model(model: Any) -> str | None:
    """Why a model without a twin cannot be trained, by rows of its own."""
    if next(model.parameters()).device.type == "meta":
        return None  # its weights come later, and with them the first batch
    device = compute_device(model)
    size = model.config.get_text_config().vocab_size
    limits = [n for path, n in lengths_in(model.config).items() if LIMIT.search(path.rpartition(".")[2])]
    tolerance = PROBE_TOLERANCES.get(next(model.parameters()).dtype, PROBE_TOLERANCE)
    for tokens in sorted({min(n, *limits, PROBE_TOKENS[-1]) for n in PROBE_TOKENS}):
        ids = random_tokens(tokens, (min(8, size - 1), size), 0).to(device)
        half = max(1, tokens // 2)
        try:
            batches = ids[None], ids[None], ids[None, :half], torch.stack([ids, ids.flip(0)])
            whole, again, part, with_others = (states_of(model, input_ids=x)[0, :half].double() for x in batches)
        except Exception as error:  # noqa: BLE001 - whatever a model's own code has against it
            return f"it cannot read a row of {tokens} tokens ({type(error).__name__}: {error})."
        spread = whole.std().clamp(min=1e-12)
        if float((whole - again).abs().mean() / spread) > tolerance:
            return NOT_REPEATABLE
        if float((whole - part).abs().mean() / spread) > tolerance:
            return NOT_A_POLICY
        if float((whole - with_others).abs().mean() / spread) > tolerance:
            return NOT_BESIDE_OTHERS
    return None


def _tell(model: Any, finding: PathFinding) -> None:
    """Log once which execution paths are not used for a model."""
    kind, paths = type(model).__name__, finding.paths
    for reason in paths.reasons:
        _log.debug("%s: %s", kind, reason)
    slow = []
    if paths.scoring in ("right_padded", "equal_lengths"):
        slow.append(f"rows are scored as {paths.scoring.replace('_', ' ')} batches")
    if has_lm_head(model) and paths.cache == "none":
        slow.append("every token is computed from its whole row, without a cache")
    elif has_lm_head(model) and not paths.pads_prompts:
        slow.append("only prompts of one length are decoded together")
    if not paths.trains:
        slow.append("it is trained in evaluation mode, without gradient checkpointing")
    if slow and finding.refusal is None:
        _log.warning(
            "%s takes a plain path: %s. %s", kind, "; ".join(slow), " ".join(f"{r}." for r in paths.reasons[:3])
        )
