"""Allow-list of a saved configuration: the components and fields of it that an evaluation uses without being told to.

saved configuration ──> interpolations refused ──> allowed components with allowed fields
                                              └──> a fault for everything else that the run would use

A checkpoint may come from anybody. What is allowed runs no code, reads no variable and opens no connection; anything
else takes effect only where the user names it on the command line.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from verl.component import as_plain
from verl.compose.component_import import TARGET, import_component
from verl.protocol.serialization import PLAIN
from verl.storage.config import is_address
from verl.utils.redact import redact_tree

MAX_DEPTH = 20  # of components within components; more than any real configuration

_SAMPLING = "temperature top_k top_p max_new_tokens min_new_tokens stop_token_ids router_replay"
_EPISODE = (
    "max_turns max_tokens max_observation_tokens step_timeout_s reset_timeout_s retries on_infra history tool_format "
    "kv_cache_gib"
)
_ROWS = "max_prompt_length truncation chat_template chat_template_kwargs system_prompt on_bad_row"
_TEXTS = "completion_key messages_key max_length truncation chat_template chat_template_kwargs system_prompt on_bad_row"
_ALLOWED = {  # below `verl.`
    "data.arithmetic.ArithmeticPrompts": "digits held_out seed train_size max_prompt_length",
    "data.arithmetic.ArithmeticSFT": "digits held_out seed train_size max_length",
    "data.calculator.CalculatorPrompts": "min_digits max_digits train_size held_out seed max_prompt_length",
    "data.calculator.CalculatorSFT": (
        "max_digits pair_digits pair_share pair_calls train_size held_out seed max_length"
    ),
    "data.chat_task.ChatTaskPrompts": "task train_size held_out seed max_prompt_length system_prompt",
    "data.chat_task.ChatTaskSFT": "task train_size held_out seed max_length system_prompt",
    "data.curriculum.PassRate": "target bands falloff memory warmup_epochs",
    "data.episodes.EpisodePrompts": (
        "prompt system_prompt chat_template chat_template_kwargs train_size held_out max_prompt_length"
    ),
    "data.files.PromptFiles": f"{_ROWS} prompt_key final_assistant train_files eval_files weights",
    "data.files.SFTFiles": f"{_TEXTS} prompt_key train_files eval_files weights",
    "data.guess_number.GuessNumberPrompts": "highest repeats max_prompt_length",
    "data.guess_number.GuessNumberSFT": "highest max_guesses train_size held_out seed max_length",
    "environments.calculator.Calculator": f"{_EPISODE} max_digits suffix",
    "environments.guess_number.GuessNumber": f"{_EPISODE} max_guesses",
    "rewards.episode_reward.EpisodeReward": "",
    "rewards.function.RewardFunction": "path per_sample timeout_s on_error error_score",
    "rewards.normalization.RewardNormalization": "reward",
    "rewards.rules.ExactMatch": "answer_key ignore_whitespace correct wrong",
    "rewards.rules.Format": "pattern whole correct wrong",
    "rewards.rules.Length": "min_tokens max_tokens inside outside",
    "rewards.rules.MathAnswer": "answer_key correct wrong timeout_s",
    "rewards.rules.Overlong": "max_tokens buffer_tokens penalty",
    "rewards.weighted_sum.WeightedSum": "parts weights",
    "rollout.auto.AutoRollout": f"{_SAMPLING} max_model_len",
    "rollout.hf.HFRollout": f"{_SAMPLING} max_rows share_prefix drop_finished",
    "rollout.vllm.config.VLLMRollout": (
        f"{_SAMPLING} kv_cache_gib max_num_seqs max_num_batched_tokens max_model_len prefix_caching enforce_eager"
    ),
    "trainer.config.PPOSettings": "seed device sample_rows eval_samples eval_without_tools success_score",
    "trainer.config.SFTSettings": "seed device sample_rows",
    "workers.actor.Actor": "micro_batch_tokens autocast packing",
}
ALLOWED = {f"verl.{name}": frozenset(fields.split()) for name, fields in _ALLOWED.items()}
# Parts of which only the allowed fields are used; the others serve training, and take effect nowhere in an evaluation.
OF_TRAINING = ("actor", "trainer")
OF_MODEL = ("dtype", "attention")  # of any model; what loads is the weights of the checkpoint
NEEDED = {"ppo": ("data", "environment", "reward", "rollout"), "sft": ("data",)}
# Resources of a training machine; an evaluation uses their defaults.
RESOURCES = frozenset(
    (
        "num_workers", "max_concurrent", "journal", "call_timeout_s", "start_timeout_s", "tensor_parallel_size",
        "pipeline_parallel_size", "lora", "sleep", "num_threads", "chunk_mib",
    )
)  # fmt: skip
_CHAT_REWARDS = ("json_object", "last_number", "length_error", "common_subsequence")
OWN_FUNCTIONS = (
    *(f"verl.rewards.math_rules:{name}_score" for name in ("gsm8k", "math")),
    *(f"verl.rewards.chat_rewards:{name}" for name in _CHAT_REWARDS),
)
OWN_PATTERNS = ("<think>.*</think>.+",)  # others may backtrack without end
FILES = ("train_files", "eval_files")


@dataclasses.dataclass
class AllowedConfig:
    """The part of a saved configuration that may be used.

    Attributes:
        components: nodes by root key, without interpolations.
        faults: one sentence per value that the run would use and that the user did not name.
    """

    components: dict[str, Any] = dataclasses.field(default_factory=dict)
    faults: list[str] = dataclasses.field(default_factory=list)


def allowed_config(
    saved: Any, root: str, named: Mapping[str, Any], origin: str, replaced: Collection[str] = ()
) -> AllowedConfig:
    """Select what an evaluation may use of a saved configuration.

    Args:
        saved: the parsed `config` of a checkpoint, of any type.
        root: `ppo` or `sft`.
        named: values of the user by configuration path; a path covers everything below it.
        origin: the checkpoint, for messages.
        replaced: root keys that the caller replaces; refused values below them are left out without a fault.
    """
    if not isinstance(saved, dict):
        kind = "nothing" if saved is None else f"a {type(saved).__name__}"
        return AllowedConfig(faults=[f"{origin} holds no configuration: expected a mapping, found {kind}."])
    return _Selection(saved, named, origin, replaced).select(NEEDED[root])


class _Selection:
    def __init__(self, saved: dict[str, Any], named: Mapping[str, Any], origin: str, replaced: Collection[str]):
        self.saved, self.named, self.origin, self.replaced = saved, named, origin, replaced
        self.components: dict[str, Any] = {}
        self.faults: list[tuple[str, str]] = []  # path, sentence

    def select(self, needed: Sequence[str]) -> AllowedConfig:
        for path, value in _nodes(self.saved):
            if path.count(".") > 2 * MAX_DEPTH:
                return AllowedConfig(faults=[f"{path[:80]}: the configuration of {self.origin} is nested too deeply."])
            if isinstance(value, str) and "${" in value and not self._is_named(path):
                sentence = (  # composition would evaluate it; runs save resolved values
                    f"{path} is {_shown(value)}: the saved configuration of {self.origin} holds an interpolation, "
                    f"which is not evaluated. If you trust it, add: {_word(path, value)}."
                )
                self.faults.append((path, sentence))
        for key in OF_TRAINING:
            node = self.saved.get(key)
            if isinstance(node, dict):
                self.components[key] = _settings(node)
        for key in needed:
            if self._is_named(key):
                continue
            node = self.saved.get(key)
            if isinstance(node, dict):
                component = self._component(node, key, 0)
                self.components |= {} if component is None else {key: component}
            elif key == "environment" and node is None:
                self.components[key] = None
            else:
                sentence = f"{key} is {_shown(node)} in the configuration of {self.origin}. Add {key}=OPTION."
                self.faults.append((key, sentence))
        kept = [sentence for path, sentence in self.faults if path.partition(".")[0] not in self.replaced]
        return AllowedConfig(self.components, list(dict.fromkeys(kept)))

    def _component(self, node: dict[str, Any], path: str, depth: int) -> Any:
        """An allowed component with its allowed fields; None if its class is refused."""
        where = f"{path}.{TARGET}"
        is_chosen = self._is_named(where)
        target = self.named.get(where, node.get(TARGET))
        if not isinstance(target, str) or not (is_chosen or target in ALLOWED) or depth > MAX_DEPTH:
            self._refuse(path, node)
            return None
        is_own = target.startswith("verl.")
        fields, defaults = ALLOWED.get(target, frozenset[str]()), _defaults(target) if is_own else {}
        allowed: dict[str, Any] = {TARGET: target}
        for key, value in node.items():
            below = f"{path}.{_name(key)}"
            if key == TARGET or self._is_named(below):
                continue
            if key == "chat_template" and isinstance(value, str) and "{" not in value:
                continue  # a file or a name: the model is saved with what it holds
            # Not a bool, which may be `trust_remote_code`.
            is_number = is_chosen and (value is None or type(value) in (int, float))
            is_component = isinstance(value, dict) and TARGET in value  # judged by itself
            if not is_own or is_component or is_number or (key in fields and _stays_here(key, value)):
                allowed[key] = self._value(value, below, depth + 1)
            elif key not in RESOURCES and (
                key not in defaults or type(defaults[key]) is not type(value) or defaults[key] != value
            ):
                self._refuse(below, value)
        return allowed

    def _value(self, value: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH:
            self._refuse(path, "nested too deeply")
        elif isinstance(value, dict) and TARGET in value:
            return self._component(value, path, depth)
        elif isinstance(value, dict):
            return {key: self._value(item, f"{path}.{_name(key)}", depth + 1) for key, item in value.items()}
        elif isinstance(value, list):
            return [self._value(item, f"{path}.{index}", depth + 1) for index, item in enumerate(value)]
        else:
            return value
        return None

    def _refuse(self, path: str, value: Any) -> None:
        if isinstance(value, dict) and TARGET in value:
            words = list(_assignments(value, path))
            path, value = f"{path}.{TARGET}", value[TARGET]
        else:
            words = [_word(path, value)]
        sentence = (
            f"{path} is {_shown(value)}: the saved configuration of {self.origin} names this, and checkpoints are not "
            f"trusted to choose code, files or servers. If you trust it, add: {' '.join(words)}."
        )
        self.faults.append((path, sentence))

    def _is_named(self, path: str) -> bool:
        return any(path == name or path.startswith(f"{name}.") for name in self.named)


def _nodes(tree: Any) -> Iterator[tuple[str, Any]]:
    """Every node with its path, without recursion, since the nesting is not known."""
    waiting = [("", tree)]
    while waiting:
        path, node = waiting.pop()
        yield path, node
        items: Iterable[Any] = node.items() if isinstance(node, dict) else ()
        items = enumerate(node) if isinstance(node, list) else items
        waiting += [(f"{path}.{_name(key)}" if path else _name(key), item) for key, item in items]


def _name(key: Any) -> str:
    """A key as part of a path, without what a terminal would interpret."""
    text = str(key)
    return text if re.fullmatch(r"\w{1,80}", text) else ascii(text)[1:-1][:80]


def _settings(node: dict[str, Any]) -> dict[str, Any]:
    """The allowed plain settings of a part that otherwise serves training."""
    fields = ALLOWED.get(str(node.get(TARGET)), frozenset[str]())
    settings = {name: node[name] for name in sorted(fields & node.keys()) if type(node[name]) in PLAIN}
    model = node.get("model")
    if isinstance(model, dict):
        settings["model"] = {name: model[name] for name in OF_MODEL if isinstance(model.get(name), str)}
    return settings


def _stays_here(key: str, value: Any) -> bool:
    """Whether a value of an allowed field names neither code and patterns of others nor files elsewhere."""
    if key == "path":
        return value in OWN_FUNCTIONS
    if key == "pattern":
        return value in OWN_PATTERNS
    return key not in FILES or (isinstance(value, list) and not any(is_address(str(item)) for item in value))


def _defaults(target: str) -> dict[str, Any]:
    """The plain defaults of the fields of one of our components."""
    kind = import_component(target)
    if isinstance(kind, str):
        return {}
    defaults: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.default is not dataclasses.MISSING:
            defaults[field.name] = as_plain(field.default)
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = as_plain(field.default_factory())
    return defaults


def _assignments(node: dict[str, Any], path: str) -> Iterator[str]:
    """The words of a command line that name a component, and the fields of one of ours."""
    yield _word(f"{path}.{TARGET}", node[TARGET])
    if not str(node[TARGET]).startswith("verl."):
        return
    for key, value in node.items():
        if isinstance(value, dict) and TARGET in value:
            yield from _assignments(value, f"{path}.{key}")
        elif key != TARGET and value not in (None, {}, []):
            yield _word(f"{path}.{key}", value)


def _word(path: str, value: Any) -> str:
    """A word for a shell that assigns a value, without secrets."""
    value = redact_tree({path.rpartition(".")[2]: value})[path.rpartition(".")[2]]
    text = value if isinstance(value, str) and re.fullmatch(r"[\w./:-]+", value) else _in_grammar(value)
    return f"'{path}={text}'".replace("\n", "\\n") if "'" not in text else json.dumps(f"{path}={text}")


def _in_grammar(value: Any) -> str:
    """A value as the grammar of overrides reads it."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_in_grammar(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_in_grammar, value)) + "]"
    return json.dumps(value, ensure_ascii=True)


def _shown(value: Any) -> str:
    text = repr(redact_tree(value))
    return text if len(text) <= 200 else f"{text[:200]}..."
