"""Reads a Hugging Face config.json: which layers a model has, and what each keeps.

A family that is not in the table, or a field that is missing, is an error that names it: nothing is guessed. Where a
family's configuration class itself has a default that the engine takes too, the default stands here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from tierkv.adapters.sizing.layers import DTYPE_BYTES, Attention, Latent, Layer, Model, State, item_bytes
from tierkv.errors import ConfigError

_NESTED = ("text_config", "language_config", "llm_config")
"""Where multimodal models keep the language model's settings."""

_MIXES: Final = ("llama", "mistral")
"""Families of alike layers that the engine also serves with layer_types of several kinds."""

Layers = tuple[tuple[Layer, ...], ...]


class Fields:
    """A configuration's fields, with errors that say which one is missing or wrong."""

    def __init__(self, values: Mapping[str, Any], model_type: str) -> None:
        self.values = values
        self.model_type = model_type

    def get(self, name: str, default: Any = None) -> Any:
        """The field, or `default` when it is missing or null."""
        value = self.values.get(name)
        return default if value is None else value

    def count(self, name: str, default: int | None = None) -> int:
        """A field that must be an integer of 1 or more."""
        value = self.get(name, default)
        if value is None:
            raise self.error(f"field {name!r} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"field {name!r} is {value!r}: an integer of 1 or more is needed")
        return value

    def inside(self, name: str) -> Fields:
        """A field that must be an object."""
        value = self.get(name)
        if not isinstance(value, Mapping):
            raise self.error(
                f"field {name!r} is missing" if value is None else f"field {name!r} is no object"
            )
        return Fields(value, f"{self.model_type}.{name}")

    def words(self, name: str, layers: int) -> tuple[str, ...] | None:
        """A list of one word a layer; None when it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise self.error(f"field {name!r} must be a list of words")
        if len(value) != layers:
            raise self.error(f"field {name!r} has {len(value)} entries for {layers} layers")
        return tuple(value)

    def numbers(self, name: str, allowed: range, meaning: str) -> list[int]:
        """A list of integers within `allowed`; `meaning` says in the error what they must be."""
        value = self.get(name)
        if not isinstance(value, list) or not all(type(entry) is int and entry in allowed for entry in value):
            raise self.error(f"field {name!r} must list {meaning}")
        return value

    def error(self, what: str) -> ConfigError:
        """The error to raise."""
        return ConfigError(
            f"model_type {self.model_type!r}: {what}. The bytes cannot be known without it; a complete file is written "
            f"by transformers: AutoConfig.from_pretrained(MODEL).to_json_file(FILE, use_diff=False)"
        )


def read_model(config: Mapping[str, Any], dtype: str = "auto") -> Model:
    """The model that a config.json describes. ConfigError names what is unknown or missing.

    dtype: vLLM's --dtype; auto is what the configuration says.
    """
    if not isinstance(config, Mapping):
        raise ConfigError("the model's configuration must be a JSON object, as in config.json")
    nested = next((config[name] for name in _NESTED if isinstance(config.get(name), Mapping)), None)
    values = nested if nested is not None and "num_hidden_layers" not in config else config
    model_type = values.get("model_type") or (config.get("model_type") if values is config else None)
    if not isinstance(model_type, str):
        raise ConfigError(
            "the model's configuration has no 'model_type' (of its language model): is it a config.json?"
        )
    reader = _READERS.get(model_type)
    if reader is None:
        reason = _REFUSED.get(model_type, "its layers are not known here")
        raise ConfigError(
            f"model_type {model_type!r}: {reason}. `tierkv inspect` on a store that has its blocks tells their bytes. "
            f"Known are: {', '.join(sorted(_READERS))}"
        )
    if config.get("is_encoder_decoder") or values.get("is_encoder_decoder"):
        raise ConfigError(f"model_type {model_type!r}: encoder-decoder models are not supported")
    fields = Fields(values, model_type)
    notes: list[str] = []
    if dtype == "auto":
        dtype = _dtype(fields, config, notes)
    item_bytes(dtype)
    return Model(model_type, dtype, reader(fields), _kv_dtype(config), tuple(notes))


# What all have


def _dtype(fields: Fields, config: Mapping[str, Any], notes: list[str]) -> str:
    """As vLLM's --dtype auto takes it: 32-bit models are served in 16 bits."""
    found = next(
        (
            value
            for place in (fields.values, config)
            for value in (place.get("dtype"), place.get("torch_dtype"))
            if value
        ),
        None,
    )
    if found is None or found in ("float32", "float"):
        said = "does not say its dtype" if found is None else "is of 32-bit floats"
        notes.append(f"the model {said}: 16 bits are taken, as vLLM does unless --dtype says otherwise")
        return "bfloat16"
    if not isinstance(found, str) or found not in DTYPE_BYTES:
        raise fields.error(f"dtype {found!r} is not known")
    return found


def _kv_dtype(config: Mapping[str, Any]) -> str | None:
    """What the checkpoint's quantization says of the cache; vLLM follows it when its own setting is auto."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return None
    inner = quantization.get("quantization")
    places = [place for place in (inner, quantization) if isinstance(place, Mapping)]
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        for place in places:
            value = place.get(name)
            if isinstance(value, str) and value.lower() == "fp8":
                return "fp8"
            if isinstance(value, Mapping) and value.get("type") == "float" and value.get("num_bits") == 8:
                return "fp8"
            if value:
                raise ConfigError(
                    f"quantization_config.{name} is {value!r}: the cache's format is not known here; give --kv-dtype"
                )
    return None


def _heads(fields: Fields, **defaults: int) -> Attention:
    """Full attention of the usual fields."""
    heads = fields.count("num_attention_heads", defaults.get("num_attention_heads"))
    head_dim = fields.get("head_dim", defaults.get("head_dim"))
    if head_dim is None:
        hidden = fields.count("hidden_size")
        if hidden % heads:
            raise fields.error(
                f"field 'head_dim' is missing, and hidden_size {hidden} is no multiple of {heads} heads"
            )
        head_dim = hidden // heads
    elif isinstance(head_dim, bool) or not isinstance(head_dim, int) or head_dim < 1:
        raise fields.error(f"field 'head_dim' is {head_dim!r}: an integer of 1 or more is needed")
    kv_heads = fields.count("num_key_value_heads", defaults.get("num_key_value_heads", heads))
    return Attention(kv_heads, head_dim, head_dim)


def _sliding(layer: Attention, window_tokens: int) -> Attention:
    return Attention(layer.kv_heads, layer.key_dim, layer.value_dim, window_tokens=window_tokens)


def _by_type(fields: Fields, types: tuple[str, ...], layers: Mapping[str, Layer | None]) -> Layers:
    """One layer for each word; None keeps nothing."""
    unknown = sorted(set(types) - set(layers))
    if unknown:
        raise fields.error(f"layers of type {', '.join(unknown)} are not known")
    kept = [layers[word] for word in types]
    return tuple(() if layer is None else (layer,) for layer in kept)


# Attention alone


def _dense(fields: Fields) -> Layers:
    """Every layer alike, or full and sliding-window layers by layer_types."""
    count = fields.count("num_hidden_layers")
    full = _heads(fields)
    types = fields.words("layer_types", count)
    window = fields.get("sliding_window") or None  # some say 0 for none
    if types is not None and set(types) != {"full_attention"}:
        if len(set(types)) > 1 and fields.model_type not in _MIXES:
            raise fields.error("layers of several types are not known of this family")
        layers = {"full_attention": full, "sliding_attention": _sliding(full, fields.count("sliding_window"))}
        return _by_type(fields, types, layers)
    switch = fields.get("use_sliding_window")
    if types is not None or window is None or switch is False:
        return ((full,),) * count
    if switch is not None:
        raise fields.error("'use_sliding_window' is set without 'layer_types', so which layers slide is open")
    return ((_sliding(full, fields.count("sliding_window")),),) * count


def _patterned(pattern: int | None, extra_tokens: int = 0, **defaults: int) -> Callable[[Fields], Layers]:
    """Full and sliding layers; without layer_types every pattern-th one is full. None: the field must say it."""

    def read(fields: Fields) -> Layers:
        count = fields.count("num_hidden_layers")
        full = _heads(fields, **defaults)
        types = fields.words("layer_types", count)
        if types is None:
            if fields.get("sliding_window", defaults.get("sliding_window")) is None:
                return ((full,),) * count
            step = fields.count("sliding_window_pattern", pattern)
            types = tuple(
                "sliding_attention" if (number + 1) % step else "full_attention" for number in range(count)
            )
        layers: dict[str, Layer | None] = {"full_attention": full}
        if "sliding_attention" in types:
            window = fields.count("sliding_window", defaults.get("sliding_window")) + extra_tokens
            layers["sliding_attention"] = _sliding(full, window)
        return _by_type(fields, types, layers)

    return read


def _gpt_oss(fields: Fields) -> Layers:
    """Every other layer slides, the first one does."""
    full = _heads(fields)
    sliding = _sliding(full, fields.count("sliding_window"))
    return tuple((full if number % 2 else sliding,) for number in range(fields.count("num_hidden_layers")))


def _llama4(fields: Fields) -> Layers:
    """Layers with rotary positions see their chunk only, the others see all."""
    count = fields.count("num_hidden_layers")
    full = _heads(fields)
    if fields.get("no_rope_layers"):
        rotary = fields.numbers("no_rope_layers", range(2), "0 (no rotary positions) or 1 for each layer")
    else:
        step = fields.count("no_rope_layer_interval", 4)
        rotary = [int((number + 1) % step != 0) for number in range(count)]
    if len(rotary) != count:
        raise fields.error(f"field 'no_rope_layers' has {len(rotary)} entries for {count} layers")
    if fields.get("attention_chunk_size") is None:
        return ((full,),) * count
    chunk = fields.count("attention_chunk_size")
    local = Attention(full.kv_heads, full.key_dim, full.value_dim, chunk_tokens=chunk)
    return tuple((local if uses else full,) for uses in rotary)


def _mimo(fields: Fields) -> Layers:
    """Full and sliding layers with different heads."""
    count = fields.count("num_hidden_layers")
    pattern = fields.numbers("hybrid_layer_pattern", range(2), "0 (full) or 1 (sliding) for each layer")
    if len(pattern) != count:
        raise fields.error(f"field 'hybrid_layer_pattern' has {len(pattern)} entries for {count} layers")
    full = Attention(
        fields.count("num_key_value_heads"), fields.count("head_dim"), fields.count("v_head_dim")
    )
    sliding = Attention(
        fields.count("swa_num_key_value_heads"),
        fields.count("swa_head_dim"),
        fields.count("swa_v_head_dim"),
        window_tokens=fields.count(
            "sliding_window_size" if fields.get("sliding_window_size") else "sliding_window"
        ),
    )
    return tuple((sliding if slides else full,) for slides in pattern)


def _latent(fields: Fields) -> Latent:
    if fields.get("kv_lora_rank") is None:
        raise fields.error("field 'kv_lora_rank' is missing: without it there is no latent attention")
    return Latent(fields.count("kv_lora_rank") + fields.count("qk_rope_head_dim"))


def _deepseek(fields: Fields) -> Layers:
    return ((_latent(fields),),) * fields.count("num_hidden_layers")


# Recurrent layers beside attention


def _gated_delta_net(fields: Fields) -> Layers:
    """Qwen3-Next and Qwen3.5."""
    count = fields.count("num_hidden_layers")
    types = fields.words("layer_types", count)
    if types is None:
        step = fields.count("full_attention_interval", 4)
        types = tuple(
            "linear_attention" if (number + 1) % step else "full_attention" for number in range(count)
        )
    keys = fields.count("linear_num_key_heads") * fields.count("linear_key_head_dim")
    value_heads, value_dim = fields.count("linear_num_value_heads"), fields.count("linear_value_head_dim")
    state = State(
        "GDN",
        conv_rows=fields.count("linear_conv_kernel_dim") - 1,
        conv_channels=2 * keys + value_heads * value_dim,
        heads=value_heads,
        head_values=value_dim * fields.count("linear_key_head_dim"),
        state_dtype=str(fields.get("mamba_ssm_dtype", "auto"))
        if fields.model_type != "qwen3_next"
        else "auto",
    )
    return _by_type(fields, types, {"full_attention": _heads(fields), "linear_attention": state})


def _kimi_linear(fields: Fields) -> Layers:
    """KDA beside latent attention; the configuration counts layers from 1."""
    settings = fields.inside("linear_attn_config")
    count = fields.count("num_hidden_layers")
    recurrent = settings.numbers("kda_layers", range(1, count + 1), f"layers of 1 to {count}")
    heads, dim = settings.count("num_heads"), settings.count("head_dim")
    state = State(
        "KDA",
        conv_rows=settings.count("short_conv_kernel_size") - 1,
        conv_channels=3 * heads * dim,
        heads=heads,
        head_values=dim * dim,
        state_dtype="float32",
    )
    latent = _latent(fields)
    return tuple((state if number in recurrent else latent,) for number in range(1, count + 1))


def _mamba2(
    fields: Fields, width: int, heads: str, head_dim: str, groups: str, state: str, kernel: str, dtype: str
) -> State:
    return State(
        "Mamba-2",
        conv_rows=fields.count(kernel) - 1,
        conv_channels=width,
        heads=fields.count(heads),
        head_values=fields.count(head_dim) * fields.count(state),
        groups=fields.count(groups),
        group_channels=2 * fields.count(state),
        state_dtype=dtype,
    )


def _mamba2_by_bamba_names(fields: Fields, width: int) -> State:
    """The names that Falcon-H1 and Granite share."""
    return _mamba2(
        fields, width, "mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv", "auto"
    )  # fmt: skip


def _expanded(fields: Fields) -> int:
    return fields.count("mamba_expand") * fields.count("hidden_size")


def _nemotron_h(fields: Fields) -> Layers:
    pattern = fields.get("hybrid_override_pattern")
    if not isinstance(pattern, str):
        raise fields.error("field 'hybrid_override_pattern' is missing")
    head_dim = fields.get("attention_head_dim") or fields.get("head_dim")
    attention = _heads(Fields({**fields.values, "head_dim": head_dim}, fields.model_type))
    width = fields.count("mamba_num_heads") * fields.count("mamba_head_dim")
    state = _mamba2(
        fields, width, "mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel",
        str(fields.get("mamba_ssm_cache_dtype", "float32")),
    )  # fmt: skip
    return _by_type(fields, tuple(pattern), {"M": state, "*": attention, "-": None, "E": None})


def _granite_hybrid(fields: Fields) -> Layers:
    count = fields.count("num_hidden_layers")
    types = fields.words("layer_types", count) or fields.words("layers_block_type", count)
    if types is None:
        raise fields.error("field 'layer_types' is missing")
    state = _mamba2_by_bamba_names(fields, _expanded(fields))
    attention = _heads(fields)
    names: dict[str, Layer | None] = {
        "mamba": state, "linear_attention": state, "attention": attention, "full_attention": attention,
    }  # fmt: skip
    return _by_type(fields, types, names)


def _falcon_h1(fields: Fields) -> Layers:
    """Attention and Mamba side by side in every layer."""
    width = fields.count("mamba_d_ssm") if fields.get("mamba_d_ssm") is not None else _expanded(fields)
    return ((_heads(fields), _mamba2_by_bamba_names(fields, width)),) * fields.count("num_hidden_layers")


def _jamba(fields: Fields) -> Layers:
    count = fields.count("num_hidden_layers")
    period, offset = fields.count("attn_layer_period"), fields.get("attn_layer_offset")
    if isinstance(offset, bool) or not isinstance(offset, int):
        raise fields.error("field 'attn_layer_offset' is missing")
    width = _expanded(fields)
    state = State(
        "Mamba",
        conv_rows=fields.count("mamba_d_conv") - 1,
        conv_channels=width,
        heads=width,
        head_values=fields.count("mamba_d_state"),
    )
    attention = _heads(fields)
    return tuple((attention if number % period == offset else state,) for number in range(count))


def _lfm2(fields: Fields) -> Layers:
    count = fields.count("num_hidden_layers")
    types = fields.words("layer_types", count)
    if types is None:
        raise fields.error("field 'layer_types' is missing")
    width = fields.count("conv_dim") if fields.model_type == "lfm2" else fields.count("hidden_size")
    state = State("short convolution", conv_rows=fields.count("conv_L_cache") - 1, conv_channels=width)
    return _by_type(fields, types, {"full_attention": _heads(fields), "conv": state})


_READERS: Final[dict[str, Callable[[Fields], Layers]]] = {
    **dict.fromkeys(
        (
            "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "llama",
            "minimax_m2", "mistral", "mixtral", "olmo", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_5_vl_text",
            "qwen2_moe", "qwen2_vl_text", "qwen3", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_vl_text", "seed_oss",
            "smollm3", "stablelm", "starcoder2",
        ),
        _dense,
    ),
    "cohere2": _patterned(4, extra_tokens=1),  # it sees one token more than its window says
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "exaone4": _patterned(None),
    "falcon_h1": _falcon_h1,
    "gemma2": _patterned(2),
    "gemma3_text": _patterned(
        6, num_attention_heads=8, num_key_value_heads=4, head_dim=256, sliding_window=4096
    ),
    "gpt_oss": _gpt_oss,
    "granitemoehybrid": _granite_hybrid,
    "jamba": _jamba,
    "kimi_k2": _deepseek,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "llama4_text": _llama4,
    "mimo_v2_flash": _mimo,
    "nemotron_h": _nemotron_h,
    "olmo3": _patterned(4),
    "qwen3_5_moe_text": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_next": _gated_delta_net,
}  # fmt: skip

_REFUSED: Final[dict[str, str]] = {
    "bamba": "vLLM no longer serves it",
    "deepseek_v32": "its sparse attention keeps an index beside the latents whose size is not known here",
    "deepseek_v4": "its compressed caches are not known here",
    "mamba": "it has no attention layers, so vLLM caches no prefixes of it",
    "mamba2": "it has no attention layers, so vLLM caches no prefixes of it",
    "falcon_mamba": "it has no attention layers, so vLLM caches no prefixes of it",
}
