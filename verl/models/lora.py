"""LoRA adapters through peft: few trained parameters; the frozen base model serves as reference policy."""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from verl.component import Description, component
from verl.models.model_files import quiet_transformers


@component
class LoRA(Description):
    """A low-rank update W + (alpha / rank) B A of each chosen linear layer, with only A and B trained.

    Source: Hu et al. 2021, arXiv:2106.09685, eq. 3.

    Args:
        rank: rank of the update.
        alpha: the update is scaled by alpha / rank.
        target_modules: names of layers, or only `all-linear` for every linear layer except the output head.
    """

    rank: PositiveInt = 8
    alpha: PositiveFloat = 16.0
    target_modules: tuple[str, ...] = ("all-linear",)

    def faults(self) -> Iterator[str]:
        if not self.target_modules:
            yield "target_modules is empty: list names of layers, or set [all-linear]."

    def apply(self, model: Any, *, causal_lm: bool) -> Any:
        """Add the adapter to a model. A is random (global generator) and B zero, so the output is unchanged at first.
        Frozen modules get none.

        Args:
            model: Hugging Face model.
            causal_lm: whether it has a language-model head.
        Raises:
            ConfigError: a name matches no layer, or one whose weight another layer shares.
        """
        from peft import LoraConfig, get_peft_model

        from verl.errors import ConfigError

        targets = "all-linear" if self.target_modules == ("all-linear",) else list(self.target_modules)
        config = LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,  # pyright: ignore[reportArgumentType] - an int by its annotation, a factor in use
            target_modules=targets,
            exclude_modules=frozen_modules(model),
            task_type="CAUSAL_LM" if causal_lm else "FEATURE_EXTRACTION",
        )
        try:
            with quiet_transformers():  # peft reads what transformers will rename
                adapted = get_peft_model(model, config)
        except ValueError as error:
            raise ConfigError(f"lora.target_modules is {list(self.target_modules)}: {error}") from error
        if tied := tied_adapted(adapted):
            raise ConfigError(
                f"lora.target_modules is {list(self.target_modules)}: {', '.join(tied)} shares its weight with "
                "another layer (tie_word_embeddings), which an adapter of one of them cannot keep. Leave it out."
            )
        base = config.base_model_name_or_path
        if base is not None and (fault := second_adapter_fault(base)) is not None:
            raise ConfigError(f"lora is set, and model {fault}")
        if base is not None and Path(base).is_dir():  # saved with the adapter, which may be opened from anywhere
            config.base_model_name_or_path = str(Path(base).resolve())  # not `latest`, which moves
        return adapted


def second_adapter_fault(path: str) -> str | None:
    """Why a model from this path gets no adapter: it is an adapter, merged, which no saved adapter could name."""
    if not (Path(path) / "adapter_config.json").is_file():
        return None
    return (
        f"is the adapter {path}: one on top of it would be saved without it. Write the whole model by `verl "
        f"checkpoint export {path} DIR --merge`, and give DIR."
    )


def frozen_modules(model: Any) -> str | None:
    """A pattern of the names of all modules below those that are frozen as a whole; None if none is."""
    kept: list[str] = []
    for name, module in model.named_modules():
        parameters = list(module.parameters())
        if parameters and not any(p.requires_grad for p in parameters) and not name.startswith(tuple(kept)):
            kept.append(f"{name}.")
    return rf"({'|'.join(re.escape(name) for name in kept)}).*" if kept else None


def tied_adapted(model: Any) -> dict[str, Any]:
    """The adapted layers of a peft model whose own weight belongs to another layer too, by name."""
    owners = Counter(id(x) for _, x in model.named_parameters(remove_duplicate=False))
    layers = {name: x for name, x in model.named_modules() if hasattr(x, "base_layer")}
    return {name: x for name, x in layers.items() if any(owners[id(p)] > 1 for p in x.base_layer.parameters())}


def merged_model(adapted: Any) -> Any:
    """A peft model without its adapter, which its weights then have; tied weights that differ by it are untied."""
    for layer in tied_adapted(adapted).values():
        layer.base_layer.weight = copy.deepcopy(layer.base_layer.weight)
    return with_untied_config(adapted.merge_and_unload())


def with_untied_config(model: Any) -> Any:
    """The model; a head that is not its embedding is no longer tied by the configuration, with which it is saved."""
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    if head is not None and model._tied_weights_keys and model.get_input_embeddings().weight is not head.weight:
        model.config.tie_word_embeddings = config.tie_word_embeddings = False
    return model


def with_adapter(base: Any, path: str) -> Any:
    """A model with the adapter of a directory, its embeddings resized to those that were saved with the adapter.

    Raises:
        ConfigError: names in the file differ from those of the adapted model, which would keep its initial values.
    """
    from peft import PeftModel, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    from verl.errors import ConfigError

    weights = load_peft_weights(path, device="cpu")
    embedding = base.get_input_embeddings()
    name = next((name for name, module in base.named_modules() if module is embedding), None)
    saved = weights.get(f"base_model.model.{name}.weight")
    if saved is not None and len(saved) != len(embedding.weight):
        base.resize_token_embeddings(len(saved), mean_resizing=False)
    model: Any = PeftModel.from_pretrained(base, path)
    report = set_peft_model_state_dict(model, weights)
    kinds = getattr(model.base_model, "prefix", None), ".modules_to_save."
    missing = [x for x in report.missing_keys if f".{model.active_adapter}" in x and any(k in x for k in kinds if k)]
    unexpected = [x for x in report.unexpected_keys if kinds[1] not in x]  # peft saves resized ones under two names
    for names, fault in ((missing, "are missing"), (unexpected, "belong to no layer of its base model")):
        if names:
            raise ConfigError(
                f"path is {path!r}: {len(names)} weights of the adapter {fault}, such as {names[0]}. Give an adapter "
                f"of {model.peft_config[model.active_adapter].base_model_name_or_path}, as save_pretrained of peft "
                "writes it."
            )
    return model


def head_options(path: str, adapter: Mapping[str, Any]) -> dict[str, Any]:
    """Options of loading the base model below an adapter that comes with a whole classification head.

    Args:
        path: directory of the adapter.
        adapter: its adapter_config.json.
    """
    heads = adapter.get("modules_to_save") or () if adapter.get("task_type") == "SEQ_CLS" else ()
    if not heads:
        return {}
    if (Path(path) / "config.json").is_file():  # of the classification model
        from transformers import AutoConfig

        return {"absent": heads, "config": AutoConfig.from_pretrained(path)}
    from peft.utils import load_peft_weights

    rows = [len(x) for name, x in load_peft_weights(path, device="cpu").items() if {*name.split(".")} & {*heads}]
    return {"absent": heads, "num_labels": rows[-1]} if rows else {}


@contextlib.contextmanager
def adapter_off(model: Any) -> Iterator[None]:
    """Inside this context the adapter is off, which gives the reference policy without a second copy."""
    with model.disable_adapter():
        yield
