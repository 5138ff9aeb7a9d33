"""Hugging Face models from a directory or the hub; base class of model components; reader of safetensors slices."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar

from verl.component import Description, component
from verl.errors import ConfigError
from verl.models.experts import expert_count
from verl.models.model_files import directory_faults
from verl.ops.resharding.layout import Box
from verl.utils.child_process.trial import pattern_fault
from verl.utils.external_input import (
    ExternalInputError,
    checked_path,
    parse_mapping,
    printable,
    read_bytes,
    refuse_irregular,
)

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_Model = TypeVar("_Model", bound="PreTrainedModel")

# Attributes for multiplicative noise on hidden states in training (Mixtral, MiniMax, DBRX). `router_jitter_noise` is
# not among them: in PhiMoE it is a threshold that is also used in evaluation.
ROUTER_NOISE = ("jitter_noise", "input_jitter_noise", "moe_jitter_eps")

VALUE_HEAD_FILE = "value_head.safetensors"  # beside the weights of a critic's backbone
Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@component
class ModelSource(Description):
    """Base class of components that provide a language model.

    Dropout and router noise are turned off in every model: the ratio pi_new / pi_old of policy-gradient methods
        compares
    two forward passes of one text, which must be equal for equal weights.

    Args:
        dtype: dtype of the parameters.
        compile: compile the layers of the model, where it scores and is trained: fewer and larger kernels, and a
            minute or more at the first start. Changes no result but by rounding.
    """

    dtype: Dtype = "float32"
    compile: bool = False

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
        return Pretrained(path=path, dtype=self.dtype, compile=self.compile)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer, padding on the left, with a pad token."""
        raise NotImplementedError

    def load_config(self) -> PretrainedConfig:
        """The model's configuration, without its weights."""
        raise NotImplementedError

    def max_positions(self) -> int | None:
        """The context length in tokens; None if unknown before loading."""
        raise NotImplementedError

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

    def value_head(self, name: str = VALUE_HEAD_FILE) -> Path | None:
        """The file of a trained value head in the directory of the weights, or None."""
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


# Names of the context length; MPT has no position beyond `max_seq_len`
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class SafetensorsReader:
    """Reads weights by name from a directory, lazily.

    Args:
        directory: written by `save_pretrained`.
        prefix: name prefix by which a model and its backbone differ, such as `model`.
    """

    def __init__(self, directory: Path, prefix: str = ""):
        self.prefix = f"{prefix}." if prefix else ""
        self._files: dict[str, Path] = {}
        self._open: dict[Path, Any] = {}
        if (directory / INDEX).is_file():
            try:
                index = parse_mapping(read_bytes(directory / INDEX))["weight_map"]
                self._files = {str(name): directory / checked_path(file) for name, file in index.items()}
            except (LookupError, AttributeError, ExternalInputError) as error:
                raise ConfigError(f"path: {directory / INDEX} lists no files: {error}") from error
        elif (directory / SINGLE).is_file():
            self._files = dict.fromkeys(self._reader(directory / SINGLE).keys(), directory / SINGLE)

    def name_of(self, wanted: str) -> str | None:
        """The name of a model's tensor in the files; None if it is missing."""
        tried = (wanted, self.prefix + wanted, wanted.removeprefix(self.prefix))
        return next((name for name in tried if name in self._files), None)

    def holds(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether the files have all of these tensors, with equal shapes."""
        names = {wanted: self.name_of(wanted) for wanted in tensors}
        return all(name is not None and self._shape(name) == tuple(tensors[w].shape) for w, name in names.items())

    def read(self, wanted: str, box: Box | None = None) -> Tensor:
        """A model's tensor, or a slice of it."""
        name = self.name_of(wanted)
        assert name is not None, wanted
        reader = self._reader(self._files[name])
        if not box:
            return reader.get_tensor(name)
        return reader.get_slice(name)[tuple(slice(start, stop) for start, stop in box)]

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._reader(self._files[name]).get_slice(name).get_shape())

    def _reader(self, file: Path) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            self._open[file] = safe_open(file, framework="pt")
        return self._open[file]


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Inside this context models are created with parameters on the meta device; buffers, which are not in files, are
    real.
    """
    from accelerate import init_empty_weights
    from transformers.initialization import no_init_weights

    with no_init_weights(), init_empty_weights(include_buffers=False):
        yield


def _recompute_buffers(model: Any) -> None:
    """Compute the buffers that no file holds as `from_pretrained` does: in float32, then cast to their own type.

    `from_config` computes them in the type of the model, which is too coarse for tables of positions in bfloat16.
    """
    for tensor in model.state_dict(keep_vars=True).values():
        tensor._is_hf_initialized = True  # read from a file later; transformers leaves such tensors alone
    model.initialize_weights()


WARM_START = "warm-start://"


@component
class Pretrained(ModelSource):
    """A model written by `save_pretrained`, or one on the Hugging Face hub.

    For the directory of a peft adapter, the adapter is merged into the weights of its base model.

    Args:
        path: a directory with config.json, a hub name such as `Qwen/Qwen2-0.5B`, or `warm-start://NAME`: the output of
            `verl sft experiment=NAME`, which is trained on first use and cached.
        attention: attention implementation of transformers; `eager` is slow, but works for every model.
        tokenizer_path: directory of the tokenizer; null for `path`.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code of the model repository. Off by default, since it can do anything.
    """

    example_values: ClassVar[Mapping[str, str]] = {"path": "./my_model, a saved directory, or a hub name"}

    path: str
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    tokenizer_path: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def at(self, path: str) -> Pretrained:
        return replace(self, path=path, revision=None)

    def faults(self) -> Iterator[str]:
        yield from _path_faults("path", self.path)
        if self.tokenizer_path is not None and is_local(self.tokenizer_path) and not Path(self.tokenizer_path).is_dir():
            yield f"tokenizer_path is {self.tokenizer_path!r}: no such directory."
        elif self.tokenizer_path is not None and is_local(self.tokenizer_path):
            faults = directory_faults(Path(self.tokenizer_path), needs_weights=False)
            yield from (f"tokenizer_path is {self.tokenizer_path!r}: {fault}" for fault in faults)

    def machine_faults(self) -> Iterator[str]:
        packages = ("flash_attn", "kernels")  # transformers takes either
        if self.attention.startswith("flash") and not any(map(importlib.util.find_spec, packages)):
            yield (
                f"attention is {self.attention!r}: needs the package flash_attn, which is not installed. Run: "
                "pip install flash-attn, or set attention=sdpa."
            )

    def load_causal_lm(self, device: str) -> Any:
        from transformers import AutoModelForCausalLM

        self._refuse_encoder_decoders()
        return self._load(AutoModelForCausalLM, device)

    def load_backbone(self, device: str) -> Any:
        from transformers import AutoModel

        self._refuse_encoder_decoders()
        if (self.adapter() or {}).get("task_type") == "CAUSAL_LM":
            return self.load_causal_lm(device).base_model
        return self._load(AutoModel, device)

    def load_skeleton(self, kind: Literal["causal_lm", "backbone"]) -> Any:
        """See `ModelSource.load_skeleton`. From a directory with safetensors whose names are those of the model."""
        from transformers import AutoModel, AutoModelForCausalLM, GenerationConfig

        directory = self._directory()
        if directory is None or not (directory / "config.json").is_file():
            return None
        if self.adapter() is not None or self.trust_remote_code:
            return None
        config = self.load_config()
        if getattr(config, "quantization_config", None) is not None:
            return None
        self._refuse_lost_caps(config.get_text_config())
        auto_class = AutoModelForCausalLM if kind == "causal_lm" else AutoModel
        with quiet_transformers(), without_weights():
            try:
                model = auto_class.from_config(config, dtype=self._torch_dtype(), **self._implementations())
            except (ValueError, ImportError):
                return None  # loading the whole model reports the fault
        _recompute_buffers(model)
        model.tie_weights()
        if (directory / "generation_config.json").is_file():
            model.generation_config = GenerationConfig.from_pretrained(directory)
        model.weight_files = SafetensorsReader(directory, model.base_model_prefix)
        if not model.weight_files.holds(dict(model.named_parameters())):
            return None  # names that transformers converts, or missing weights, which loading the whole model refuses
        return without_dropout(model).eval()

    def _directory(self) -> Path | None:
        """The local directory of the files; a hub model is downloaded to the cache. None if that fails, which loading
        the model reports.
        """
        if is_local(self.path):
            return Path(self.path) if Path(self.path).is_dir() else None
        from huggingface_hub import snapshot_download

        try:
            files = ["*.safetensors", "*.json"]
            return Path(snapshot_download(self.path, revision=self.revision, allow_patterns=files))
        except Exception:  # noqa: BLE001 - no network, no such name, gated: loading reports it
            return None

    def load_classifier(self, device: str) -> Any:
        """The model with a sequence-classification head, for reward models, in evaluation mode."""
        from transformers import AutoModelForSequenceClassification

        if self.adapter() is not None:
            raise ConfigError(
                f"path is {self.path!r}: an adapter, and its base model has no classification head. Merge it "
                "into the base model (merge_and_unload of peft) and give that directory."
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
        config = _read_json(Path(self.path) / "config.json") or {}
        kind = next(iter(config.get("architectures") or ()), None)
        if kind is None or self.trust_remote_code or "SequenceClassification" in kind:
            return None
        return f"path is {self.path!r}: a {kind}: expected a sequence-classification model."

    def policy_fault(self) -> str | None:
        """See `ModelSource.policy_fault`: encoder-decoder models are refused."""
        config = self._config()
        if not config.get("is_encoder_decoder"):
            return None
        kind = next(iter(config.get("architectures") or ()), config.get("model_type"))
        return f"path is {self.path!r}: a {kind}, an encoder-decoder. Give a causal language model."

    def labels(self) -> list[str] | None:
        """The label names of a classifier; None if unknown before loading."""
        config = _read_json(Path(self.path) / "config.json")
        if config is None:
            return None
        names = config.get("id2label")  # transformers omits it for two labels without names
        return list(names.values()) if names else ["LABEL_0", "LABEL_1"]

    def load_tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        path = self.tokenizer_path or self.path
        try:
            with _damage_told("path", path):
                tokenizer = AutoTokenizer.from_pretrained(
                    path, revision=self.revision, trust_remote_code=self.trust_remote_code, padding_side="left"
                )
        except ConfigError:
            raise
        except ValueError as error:
            raise self._own_code_fault(path, error) from error
        except Exception as error:
            raise _unloadable(path, "its tokenizer", error) from error
        if len(tokenizer) == len(tokenizer.get_added_vocab()):  # transformers makes an empty one without any file
            name = "path" if self.tokenizer_path is None else "tokenizer_path"
            raise ConfigError(
                f"{name} is {path!r}: it has no tokenizer (tokenizer.json). Set tokenizer_path to a directory that has "
                "the tokenizer of this model."
            )
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        return tokenizer

    def load_config(self) -> Any:
        from transformers import AutoConfig

        path = self.base_path()
        try:
            with _damage_told("path", path):
                return AutoConfig.from_pretrained(
                    path, revision=self.revision, trust_remote_code=self.trust_remote_code
                )
        except ConfigError:
            raise
        except ValueError as error:
            raise self._own_code_fault(path, error) from error
        except Exception as error:
            raise _unloadable(path, "its configuration", error) from error

    def _own_code_fault(self, path: str, error: ValueError) -> ConfigError:
        """A clearer error: for a model with Python code while trust_remote_code is false, or for any other fault."""
        if isinstance(error, ConfigError):
            return error
        if self.trust_remote_code or "trust_remote_code" not in str(error):
            return _unloadable(path, "a file of it", error)
        return ConfigError(
            f"trust_remote_code is false: {path} contains Python code, which would run with your permissions. If you "
            "trust its author, set it to true."
        )

    def max_positions(self) -> int | None:
        config = self._config()
        texts = (config, config.get("text_config"))
        counts = (_count(text.get(key)) for text in texts if isinstance(text, Mapping) for key in CONTEXT_KEYS)
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

    def value_head(self, name: str = VALUE_HEAD_FILE) -> Path | None:
        file = Path(self.path) / name
        return file if file.is_file() else None

    def base_path(self) -> str:
        """Directory or hub name of the model; for an adapter that of its base model."""
        return (self.adapter() or {}).get("base_model_name_or_path", self.path)

    def _config(self) -> dict[str, Any]:
        """config.json of the model, for an adapter that of its base model; empty without one."""
        return _read_json(Path(self.base_path()) / "config.json") or {}

    def adapter(self) -> dict[str, Any] | None:
        """The configuration of the adapter at `path`; None if it is a model."""
        adapter = _read_json(Path(self.path) / "adapter_config.json")
        base = None if adapter is None else adapter.get("base_model_name_or_path")
        if adapter is not None and not (isinstance(base, str) and base):
            raise ConfigError(
                f"path is {self.path!r}: an adapter without the name of its base model. Set "
                "base_model_name_or_path in its adapter_config.json."
            )
        return adapter

    def _load(self, auto_class: Any, device: str) -> Any:
        if (adapter := self.adapter()) is not None:
            from peft import PeftModel

            _refuse_endless_patterns(adapter, self.path)
            base = replace(self, path=adapter["base_model_name_or_path"], revision=adapter.get("revision"))
            adapted = PeftModel.from_pretrained(base._load(auto_class, device), self.path)
            return adapted.merge_and_unload().requires_grad_(True).eval()
        return self._load_whole(auto_class, device)

    def _load_whole(self, auto_class: Any, device: str) -> Any:
        with quiet_transformers(), _damage_told("path", self.path):
            try:
                model, report = auto_class.from_pretrained(
                    self.path,
                    dtype=self._torch_dtype(),
                    revision=self.revision,
                    trust_remote_code=self.trust_remote_code,
                    **self._implementations(),
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
                if isinstance(error, ValueError) and "trust_remote_code" in str(error):
                    raise self._own_code_fault(self.path, error) from error
                if "attention" not in str(error) and "flash_attn" not in str(error):
                    if isinstance(error, ConfigError):
                        raise
                    raise _unloadable(self.path, "the model", error) from error
                raise ConfigError(f"attention is {self.attention!r}: {error} Set attention=eager.") from error
            except (LookupError, TypeError, AttributeError, ArithmeticError, AssertionError) as error:
                raise _unloadable(self.path, "the model", error) from error
        self._refuse_holes(report)
        self._refuse_lost_caps(model.config.get_text_config())
        self._fill_attributes(model, auto_class)
        return _in_own_memory(without_dropout(model)).to(device).eval()

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
        """Refuse sdpa for models that cap attention scores (Gemma 2): sdpa silently omits the cap."""
        cap = getattr(config, "attn_logit_softcapping", None)
        if cap is not None and self.attention == "sdpa":
            raise ConfigError(
                f"attention is 'sdpa': the model at {self.path!r} caps its attention scores at {cap}, which sdpa "
                "leaves out. Set attention=eager."
            )

    def _refuse_holes(self, report: dict[str, Any]) -> None:
        """Refuse missing weights, which transformers initialises at random with only a warning."""
        reshaped = [f"{key} {list(there)} instead of {list(here)}" for key, there, here in report["mismatched_keys"]]
        holes = sorted(report["missing_keys"]) + sorted(reshaped)
        if holes:
            raise ConfigError(
                f"path is {self.path!r}: {len(holes)} weights are missing or have another shape, such as "
                f"{holes[0]}. Give the directory of a complete model of this kind."
            )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Inside this context transformers prints no progress bars and no report of unused weights."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def _in_own_memory(model: Any) -> Any:
    """Copy weights from the memory-mapped safetensors file to memory allocated by torch.

    Tensors in a file are not aligned, and on some processors the last bits of a product depend on alignment, so a model
    loaded from its own checkpoint would compute slightly different values. The copy is also safe from later changes of
    the file.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type == "cpu":
            tensor.data = tensor.data.clone()
    return model


LONG_NAME = "model.layers.10.self_attn.q_proj.base_layer.weight"
PATTERNS = ("target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "alpha_pattern", "modules_to_save")


def _refuse_endless_patterns(adapter: Mapping[str, Any], path: str) -> None:
    """Try the regular expressions of an adapter's configuration on names of layers, in a child."""
    found = [adapter.get(name) for name in PATTERNS]
    patterns = [text for value in found for text in ([value] if isinstance(value, str) else value or ())]
    patterns = [text for text in patterns if isinstance(text, str) and not text.replace("_", "").isalnum()]
    if not patterns:
        return
    names = [LONG_NAME, "model.layers.10.mlp.experts.127.down_proj", "a" * 40, "transformer.h.31.attn.c_attn"]
    fault = pattern_fault([*patterns, *(rf".*\.{text}" for text in patterns)], names)
    if fault is not None:
        raise ConfigError(f"path is {path!r}: a regular expression in its adapter_config.json cannot be used: {fault}.")


@contextlib.contextmanager
def _damage_told(field: str, path: str) -> Iterator[None]:
    """Around reading a model's directory: an error is one about the files, if some of them are damaged or absent."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        faults = list(directory_faults(Path(path))) if Path(path).is_dir() else []
        if faults:
            raise ConfigError([f"{field} is {path!r}: {fault}" for fault in faults]) from None
        if isinstance(error, OSError):
            raise ConfigError(
                f"{field} is {path!r}: {(str(error).splitlines() or [repr(error)])[0]} "
                "Or give a directory made by save_pretrained."
            ) from error
        raise


def _unloadable(path: str, what: str, error: BaseException) -> ConfigError:
    """A file of a model that a library cannot read, such as a value of another type."""
    reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:500]
    return ConfigError(
        f"path is {path!r}: {what} cannot be loaded ({reason}). Give a directory made by save_pretrained."
    )


def _count(value: Any) -> int | None:
    """A positive integer of a configuration; None for anything else, which loading the model reports."""
    return value if type(value) is int and value > 0 else None


def is_local(path: str) -> bool:
    """Whether a path is local: it exists, or does not have the form `name` or `owner/name`."""
    return Path(path).exists() or path.startswith(("/", ".", "~")) or path.count("/") > 1


def _path_faults(field: str, path: str) -> Iterator[str]:
    if path.startswith(WARM_START) or not is_local(path):
        return
    directory = Path(path)
    try:
        refuse_irregular(directory)
    except NotADirectoryError:
        pass
    except OSError as error:
        if error.errno == errno.EINVAL:
            yield f"{field} is {path!r}: cannot be loaded: {error.filename}: {error.strerror}."
            return
    if not directory.is_dir():
        yield f"{field} is {path!r}: no such directory. Give a directory made by save_pretrained, or a hub name."
    elif not any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        content = ", ".join(sorted(item.name for item in directory.iterdir())[:5]) or "nothing"
        yield f"{field} is {path!r}: not a model directory, it has no config.json (found: {content})."
    else:
        yield from (f"{field} is {path!r}: {fault}" for fault in directory_faults(directory, needs_weights=False))


def _read_json(file: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None without one, and for a damaged one, which `directory_faults` tells of.

    Raises:
        ConfigError: the file cannot be read.
    """
    try:
        return parse_mapping(read_bytes(file)) if file.is_file() else None
    except ExternalInputError:
        return None
    except OSError as error:
        raise ConfigError(f"path is {str(file.parent)!r}: {file.name} cannot be used: {error}.") from error
