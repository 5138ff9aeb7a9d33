"""Hugging Face models from a directory or the hub; base class of model components."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from verl.component import Description, component
from verl.errors import ConfigError
from verl.models.gguf import gguf_faults, is_gguf, unavailable, unpacked
from verl.models.images import ImageProcessor, is_image_text
from verl.models.lora import head_options, merged_model, with_adapter, with_untied_config
from verl.models.model_files import (
    SafetensorsReader,
    asks_hub,
    damage_explained,
    directory_faults,
    is_local,
    path_faults,
    quiet_transformers,
    read_model_json,
    unloadable_error,
)
from verl.models.structure import expert_count

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
_Model = TypeVar("_Model", bound="PreTrainedModel")

# Attributes for multiplicative noise on hidden states in training (Mixtral, MiniMax, DBRX). router_jitter_noise is
# not among them: in PhiMoE it is a threshold that is also used in evaluation.
ROUTER_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")

LENGTH_WARNING = "sequence-length-is-longer-than-the-specified-maximum"  # of transformers
DEQUANTISED = ("fp8", "mxfp4", "compressed-tensors")  # methods of which transformers gives plain weights
VALUE_HEAD_FILE = "value_head.safetensors"  # next to the weights of a critic's backbone
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@component
class ModelSource(Description):
    """Base class of components that provide a language model.

    Dropout and router noise are turned off in every model: the ratio pi_new / pi_old of policy-gradient methods
    compares two forward passes of one text, which must be equal for equal weights.

    Args:
        dtype: dtype of the parameters.
        compile: compile the layers of the model, where it scores and is trained: fewer and larger kernels, and a
            minute or more at the first start. Changes no result but by rounding. `auto` compiles dense models of a
            width of 512 and more on one GPU, in packed lines, where a trial agrees with the plain layers.
        freeze: modules that are not trained, by their name or the end of their path, such as `embed_tokens`; `vision`
            is the vision tower. null freezes that of an image-text model, and nothing of a text model; `[]` nothing.
    """

    dtype: Dtype = "float32"
    compile: bool | Literal["auto"] = "auto"
    freeze: tuple[str, ...] | None = None

    def load_causal_lm(self, device: str) -> PreTrainedModel:
        """The model with its language-model head, on `device`, in evaluation mode."""
        raise NotImplementedError

    def load_backbone(self, device: str) -> PreTrainedModel:
        """The model without a head: token ids to hidden states [B S D]."""
        raise NotImplementedError

    def load_skeleton(self, kind: Literal["causal_lm", "backbone"]) -> PreTrainedModel | None:
        """The model without weights, which are then read in slices from its attribute `weight_files`.

        None if weights cannot be read in slices.
        """
        return None

    def at(self, path: str) -> ModelSource:
        """This component with the weights of a directory that a run has saved."""
        return Pretrained(path=path, dtype=self.dtype, compile=self.compile, freeze=self.freeze)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, padding on the left, with a pad token."""
        raise NotImplementedError

    def load_config(self) -> PretrainedConfig:
        """The model's configuration, without its weights."""
        raise NotImplementedError

    def max_positions(self) -> int | None:
        """The context length in tokens; None if unknown before loading."""
        raise NotImplementedError

    def vocabulary(self) -> int | None:
        """The number of tokens that have an embedding; None if unknown before loading."""
        return None

    def attention_heads(self) -> tuple[int, int] | None:
        """The numbers of attention heads and of key-value heads; None if unknown before loading."""
        return None

    def layer_count(self) -> int | None:
        """The number of layers; None if unknown before loading."""
        return None

    def experts(self) -> tuple[str, int | None] | None:
        """`model_type` and the number of experts per layer (None without experts); None if unknown before loading."""
        return None

    def policy_fault(self) -> str | None:
        """Why this cannot be a policy or a critic, by its configuration; None if no reason is found."""
        return None

    def directory(self, patterns: Sequence[str] = ()) -> Path | None:
        """The directory of the weights, which may hold a value head too; None if there is none."""
        return None


def without_dropout(model: _Model) -> _Model:
    """Set every dropout probability of a model, and the noise of expert routers, to zero."""
    import torch

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):  # many families store the probability and call F.dropout
            if isinstance(value, float) and ("drop" in name or name in ROUTER_NOISE):
                setattr(module, name, 0.0)
    return model


def unset_what_is_not_saved(generation: Any) -> None:
    """Unset values that transformers reads but refuses to save, such as a temperature without `do_sample`, which has
    no effect.
    """
    try:
        generation.validate(strict=True)
    except ValueError as error:
        for name in re.findall(r"^- `(\w+)`", str(error), re.MULTILINE):
            setattr(generation, name, None)


# Names of the context length; MPT has no position beyond `max_seq_len`
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Inside this context models are created with parameters on the meta device; buffers, which are not in files, are
    real.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        yield


@component
class Pretrained(ModelSource):
    """A model written by `save_pretrained`, or one on the Hugging Face hub.

    For the directory of a peft adapter, the adapter is merged into the weights of its base model.

    Args:
        path: a directory with config.json, a hub name such as `Qwen/Qwen2-0.5B`, a GGUF file, which is dequantised on
            first use and cached, or `warm-start://NAME`: the output of `verl sft experiment=NAME`, which is trained on
            first use and cached.
        attention: attention implementation of transformers; `eager` is slow, but works for every model.
        tokenizer_path: directory of the tokenizer; null for `path`.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code of the model repository. Off by default, since it can do anything.
        images: load the image-text model of a family that also has a model for text alone, such as Qwen3.5; a family
            without one is always loaded so.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "./my_model, a saved directory, or a hub name"}

    path: str
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    tokenizer_path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False
    images: bool = False

    def at(self, path: str) -> Pretrained:
        return replace(self, path=path, revision=None)

    def files(self) -> str:
        """The directory or hub name that transformers reads: `path`, or for a GGUF file where it is dequantised."""
        return unpacked(self.path, self.dtype) if is_gguf(self.path) else self.path

    def faults(self) -> Iterator[str]:
        yield from gguf_faults(self.path) if is_gguf(self.path) else path_faults(self.path)
        if self.tokenizer_path is not None and is_local(self.tokenizer_path) and not Path(self.tokenizer_path).is_dir():
            yield f"tokenizer_path is {self.tokenizer_path!r}: no such directory."
        elif self.tokenizer_path is not None and is_local(self.tokenizer_path):
            faults = directory_faults(Path(self.tokenizer_path), needs_weights=False)
            yield from (f"tokenizer_path is {self.tokenizer_path!r}: {fault}" for fault in faults)

    def machine_faults(self) -> Iterator[str]:
        if (fault := unavailable(self.path)) is not None:
            yield fault
        packages = ("flash_attn", "kernels")  # transformers takes either
        if self.attention.startswith("flash") and not any(map(importlib.util.find_spec, packages)):
            yield (
                f"attention is {self.attention!r}: needs the package flash_attn, which is not installed. Run: "
                "pip install flash-attn, or set attention=sdpa."
            )

    def load_causal_lm(self, device: str) -> Any:
        self._refuse_encoder_decoders()
        return self._load(self._policy_class(), device)

    def _policy_class(self) -> Any:
        """The auto class of transformers for a policy: of an image-text model, if its family has no other."""
        from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

        config = self.load_config()
        takes = is_image_text(config) and (self.images or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING)
        return AutoModelForImageTextToText if takes else AutoModelForCausalLM

    def load_backbone(self, device: str) -> Any:
        from transformers import AutoModel

        self._refuse_encoder_decoders()
        adapted = {"CAUSAL_LM": self.load_causal_lm, "SEQ_CLS": self.load_classifier}
        if (load := adapted.get(str((self.adapter() or {}).get("task_type")))) is not None:
            return load(device).base_model
        return self._load(AutoModel, device)

    def load_skeleton(self, kind: Literal["causal_lm", "backbone"]) -> Any:
        """See `ModelSource.load_skeleton`. From a directory with safetensors whose names are those of the model."""
        from transformers import AutoModel, GenerationConfig

        directory = self.directory()
        if directory is None or not (directory / "config.json").is_file():
            return None
        if self.adapter() is not None or self.trust_remote_code:
            return None
        config = self.load_config()
        if getattr(config, "quantization_config", None) is not None:
            return None
        self._refuse_lost_caps(config.get_text_config())
        auto_class = self._policy_class() if kind == "causal_lm" else AutoModel
        with quiet_transformers(), without_weights():
            try:
                model = auto_class.from_config(config, dtype=self._torch_dtype(), **self._implementations())
            except Exception:  # noqa: BLE001 - loading the whole model reports the fault
                return None
        # buffers that no file holds are computed in float32 and cast, as `from_pretrained` does: `from_config` computes
        # them in the type of the model, which is too coarse for tables of positions in bfloat16
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True  # read from a file later; transformers leaves such tensors alone
        model.initialize_weights()
        model.tie_weights()
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
            unset_what_is_not_saved(model.generation_config)
        model.weight_files = SafetensorsReader(directory, model.base_model_prefix)
        named = dict(model.named_parameters())
        shared = dict(model.named_parameters(remove_duplicate=False)).keys() - named
        if not model.weight_files.holds(named) or any(map(model.weight_files.name_of, shared)):
            return None  # names that transformers converts, missing weights, which loading the whole model refuses, or
            # a tied head in the file, which is another one where its values differ
        return without_dropout(model).eval()

    def directory(self, patterns: Sequence[str] = ("*.safetensors", "*.json")) -> Path | None:
        """The local directory of the files; those of a hub model that match are downloaded to the cache. None if that
        fails, which loading the model reports.
        """
        files = self.files()
        if is_local(files):
            return Path(files) if Path(files).is_dir() else None
        from huggingface_hub import snapshot_download

        try:
            asks_hub()
            return Path(snapshot_download(self.path, revision=self.revision, allow_patterns=[*patterns]))
        except Exception:  # noqa: BLE001 - no network, no such name, gated: loading reports it
            return None

    def load_classifier(self, device: str) -> Any:
        """The model with a sequence-classification head, for reward models, in evaluation mode."""
        from transformers import AutoModelForSequenceClassification

        if (self.adapter() or {"task_type": "SEQ_CLS"}).get("task_type") != "SEQ_CLS":
            raise ConfigError(
                f"path is {self.path!r}: an adapter without a classification head (task_type SEQ_CLS). Give that of a "
                "reward model."
            )
        try:
            return self._load(AutoModelForSequenceClassification, device)
        except ValueError as error:
            if isinstance(error, ConfigError) or "Unrecognized configuration class" not in str(error):
                raise
            raise ConfigError(
                f"path is {self.path!r}: transformers has no sequence-classification model of its family. Give "
                "another reward model."
            ) from error

    def classifier_fault(self) -> str | None:
        """Why this cannot be a sequence-classification model, by its configuration; None if no reason is found."""
        config = read_model_json(Path(self.files()) / "config.json") or {}
        kind = next(iter(config.get("architectures") or ()), None)
        if kind is None or self.trust_remote_code or "SequenceClassification" in kind:
            return None
        return f"path is {self.path!r}: a {kind}: expected a sequence-classification model."

    def policy_fault(self) -> str | None:
        """See `ModelSource.policy_fault`: encoder-decoder models, quantised weights, and caps that sdpa leaves out, are
        refused."""
        config = self._config()
        quantised = config.get("quantization_config")
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        if method is not None and method not in DEQUANTISED:
            return (
                f"path is {self.path!r}: its weights are quantised by {method}, which cannot be trained. Give the "
                "directory of the model in bfloat16 or float32."
            )
        if not config.get("is_encoder_decoder"):
            return self._cap_fault(config.get("attn_logit_softcapping"))
        kind = next(iter(config.get("architectures") or ()), config.get("model_type"))
        return f"path is {self.path!r}: a {kind}, an encoder-decoder. Give a causal language model."

    def labels(self) -> list[str] | None:
        """The label names of a classifier; None if unknown before loading."""
        config = read_model_json(Path(self.files()) / "config.json")
        if config is None:
            return None
        names = config.get("id2label")  # transformers omits it for two labels without names
        return list(names.values()) if names else ["LABEL_0", "LABEL_1"]

    def load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        path = self.tokenizer_path or self.files()
        with self._failure_explained(path, "its tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(
                path, revision=self.revision, trust_remote_code=self.trust_remote_code, padding_side="left"
            )
        if len(tokenizer) == len(tokenizer.get_added_vocab()):  # transformers makes an empty one without any file
            name = "path" if self.tokenizer_path is None else "tokenizer_path"
            raise ConfigError(
                f"{name} is {path!r}: it has no tokenizer (tokenizer.json). Set tokenizer_path to a directory that has "
                "the tokenizer of this model."
            )
        known = self.vocabulary() or len(tokenizer)
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id >= known:  # one that was added has no embedding
            tokenizer.pad_token = tokenizer.eos_token
        tokenizer.deprecation_warnings[LENGTH_WARNING] = True  # limits of the data have messages of their own
        base = self if (adapter := self.adapter()) is None else self._base(adapter)
        if self._config().get("vision_config") and (directory := base.directory(("*.json",))) is not None:
            tokenizer.image_processor = ImageProcessor.of(directory, tokenizer)
        return tokenizer

    def _base(self, adapter: Mapping[str, Any]) -> Pretrained:
        return replace(self, path=adapter["base_model_name_or_path"], revision=adapter.get("revision"))

    def load_config(self) -> Any:
        from transformers import AutoConfig

        path = self.base_path()
        with self._failure_explained(path, "its configuration"):
            return AutoConfig.from_pretrained(path, revision=self.revision, trust_remote_code=self.trust_remote_code)

    @contextlib.contextmanager
    def _failure_explained(self, path: str, part: str) -> Iterator[None]:
        """Around loading a part with transformers or peft: any error but a lack of memory becomes one about `path`."""
        try:
            with damage_explained(path):
                if not is_local(path):
                    asks_hub()
                yield
        except ConfigError:
            raise
        except Exception as error:
            if isinstance(error, MemoryError):
                raise
            if self.trust_remote_code or "trust_remote_code" not in str(error):
                raise unloadable_error(path, part, error) from error
            raise ConfigError(
                f"trust_remote_code is false: {path} contains Python code, which would run with your permissions. If "
                "you trust its author, set it to true."
            ) from error

    def max_positions(self) -> int | None:
        return self._count_of(CONTEXT_KEYS)

    def vocabulary(self) -> int | None:
        return None if self.adapter() else self._count_of(("vocab_size",))  # an adapter may bring more embeddings

    def _count_of(self, keys: Sequence[str]) -> int | None:
        config = self._config()
        texts = (config, config.get("text_config"))
        counts = (_count(text.get(key)) for text in texts if isinstance(text, Mapping) for key in keys)
        return next(filter(None, counts), None)

    def attention_heads(self) -> tuple[int, int] | None:
        config = self._config()
        heads = _count(config.get("num_attention_heads"))
        return None if heads is None else (heads, _count(config.get("num_key_value_heads")) or heads)

    def layer_count(self) -> int | None:
        return _count(self._config().get("num_hidden_layers"))

    def experts(self) -> tuple[str, int | None] | None:
        config = self._config()
        return (config["model_type"], expert_count(config)) if "model_type" in config else None

    def base_path(self) -> str:
        """Directory or hub name of the model; for an adapter that of its base model."""
        return self.files() if (adapter := self.adapter()) is None else self._base(adapter).base_path()

    def _config(self) -> dict[str, Any]:
        """config.json of the model, for an adapter that of its base model; empty without one."""
        return read_model_json(Path(self.base_path()) / "config.json") or {}

    def adapter(self) -> dict[str, Any] | None:
        """The configuration of the adapter at `path`; None if it is a model."""
        adapter = None if is_gguf(self.path) else read_model_json(Path(self.path) / "adapter_config.json")
        base = None if adapter is None else adapter.get("base_model_name_or_path")
        if adapter is not None and not (isinstance(base, str) and base):
            raise ConfigError(
                f"path is {self.path!r}: an adapter without the name of its base model. Set "
                "base_model_name_or_path in its adapter_config.json."
            )
        return adapter

    def _load(self, auto_class: Any, device: str, **options: Any) -> Any:
        if (adapter := self.adapter()) is None:
            with self._failure_explained(self.path, "the model"):
                return self._load_whole(auto_class, device, **options)
        with self._failure_explained(self.path, "the adapter"):
            below = self._base(adapter)._load(auto_class, device, **head_options(self.path, adapter))
            with quiet_transformers():
                model = merged_model(with_adapter(below, self.path)).requires_grad_(True).eval()
            model.name_or_path = self.path  # not that of the base model, whose weights it has no longer
            return model

    def _load_whole(self, auto_class: Any, device: str, absent: Sequence[str] = (), **options: Any) -> Any:
        from transformers import AutoModel

        config = self.load_config()
        if isinstance(quantised := getattr(config, "quantization_config", None), dict):
            quantised["dequantize"] = True  # else a GPU would get layers of eight or four bits, which nothing trains
            options.setdefault("config", config)
        with quiet_transformers():
            try:
                model, report = auto_class.from_pretrained(
                    self.files(),
                    dtype=self._torch_dtype(),
                    revision=self.revision,
                    trust_remote_code=self.trust_remote_code,
                    **self._implementations(),
                    **options,
                    ignore_mismatched_sizes=True,  # reported, and refused below by name
                    output_loading_info=True,
                )
            except (ValueError, ImportError) as error:
                if "Unrecognized configuration class" in str(error):
                    kind = type(self.load_config()).__name__
                    raise ConfigError(
                        f"path is {self.path!r}: transformers has no {auto_class.__name__} for a {kind}. Give the "
                        "directory of a causal language model."
                    ) from error
                if "trust_remote_code" in str(error) or (
                    "attention" not in str(error) and "flash_attn" not in str(error)
                ):
                    raise
                raise ConfigError(f"attention is {self.attention!r}: {error} Set attention=eager.") from error
        if quantised is not None:
            model._weight_conversions = None  # of the scales: it is saved as a model of plain weights
        self._refuse_holes(report, absent)
        if (unused := sorted(report["unexpected_keys"])) and auto_class is not AutoModel:  # which leaves out heads
            _log.warning(
                "%s: %d weights of its files are no part of a %s and are left out, such as %s",
                self.path, len(unused), type(model).__name__, unused[0],
            )  # fmt: skip
        self._refuse_lost_caps(model.config.get_text_config())
        self._fill_attributes(model, auto_class)
        if (generation := getattr(model, "generation_config", None)) is not None:
            unset_what_is_not_saved(generation)
        # Tensors of a memory-mapped file are not aligned, and on some processors the last bits of a product depend on
        # that: a model loaded from its own checkpoint would compute slightly different values. The copy is also safe
        # from later changes of the file.
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu":
                tensor.data = tensor.data.clone()
        return with_untied_config(without_dropout(model)).to(device).eval()

    def _fill_attributes(self, model: Any, auto_class: Any) -> None:
        """Compute tensors that are plain attributes of a module (TrOCR's positions): transformers leaves them without
        data.
        """
        import torch

        empty = [
            (name, key)
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if isinstance(value, torch.Tensor) and value.is_meta
        ]
        if empty:
            with quiet_transformers(), without_weights():
                computed = auto_class.from_config(model.config, dtype=self._torch_dtype())
            for name, key in empty:
                setattr(model.get_submodule(name), key, getattr(computed.get_submodule(name), key))

    def _implementations(self) -> dict[str, str]:
        """Implementations that transformers selects for attention and experts."""
        chosen = {"attn_implementation": self.attention}
        if self.dtype == "float64":  # the default implementation of experts does not support it
            chosen["experts_implementation"] = "batched_mm"
        return chosen

    def _torch_dtype(self) -> Any:
        import torch

        return getattr(torch, self.dtype)

    def _refuse_encoder_decoders(self) -> None:
        if (fault := self.policy_fault()) is not None:
            raise ConfigError(fault)

    def _refuse_lost_caps(self, config: Any) -> None:
        if (fault := self._cap_fault(getattr(config, "attn_logit_softcapping", None))) is not None:
            raise ConfigError(fault)

    def _cap_fault(self, cap: float | None) -> str | None:
        """Why sdpa cannot run a model that caps attention scores (Gemma 2): it silently omits the cap."""
        if cap is None or self.attention != "sdpa":
            return None
        return (
            f"attention is 'sdpa': the model at {self.path!r} caps its attention scores at {cap}, which sdpa "
            "leaves out. Set attention=eager."
        )

    def _refuse_holes(self, report: dict[str, Any], absent: Sequence[str]) -> None:
        """Refuse missing weights, which transformers initialises at random with a warning, but for modules `absent`."""
        shapes = {key: f"{key} {list(there)} instead of {list(here)}" for key, there, here in report["mismatched_keys"]}
        names = [*sorted(report["missing_keys"]), *sorted(shapes)]
        holes = [shapes.get(name, name) for name in names if name.split(".")[0] not in absent]
        if holes:
            raise ConfigError(
                f"path is {self.path!r}: {len(holes)} weights are missing or have another shape, such as "
                f"{holes[0]}. Give the directory of a complete model of this kind."
            )


def _count(value: Any) -> int | None:
    """A positive integer of a configuration; None for anything else, which loading the model reports."""
    return value if type(value) is int and value > 0 else None
