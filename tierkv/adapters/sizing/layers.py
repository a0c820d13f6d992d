"""What one layer of a model keeps for a sequence, in bytes a tensor-parallel rank.

Pure arithmetic. A layer that cannot be split over so many ranks raises ConfigError, as the engine would.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from tierkv.errors import ConfigError

DTYPE_BYTES: Final[dict[str, int]] = {
    "bfloat16": 2, "float16": 2, "half": 2, "float32": 4, "float": 4,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "fp8_inc": 1, "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip
"""Dtypes whose values lie side by side. Packed formats with scales of their own are not here."""
FP8_DS_MLA: Final = "fp8_ds_mla"
_FP8_DS_MLA_TOKEN_BYTES = 656
"""A token of DeepSeek's packed latent format: 512 bytes of values, 16 of scales, 128 of rotary key."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Keys and values of some heads. At most one of the windows is set; none is full attention."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window_tokens: int = 0
    """Sliding window: tokens that a token sees, itself included."""
    chunk_tokens: int = 0
    """Chunked local attention: tokens a chunk."""

    def shards(self, tensor_size: int) -> int:
        """Shares of a block that are stored: every rank's, also where several hold the same head."""
        return tensor_size

    def copies(self, tensor_size: int) -> int:
        """Ranks that hold the same head: with more ranks than heads, the engine repeats them."""
        if self.kv_heads % tensor_size and tensor_size % self.kv_heads:
            raise ConfigError(
                f"{self.kv_heads} key-value heads cannot be split over {tensor_size} tensor-parallel ranks: one must "
                f"be a multiple of the other"
            )
        return max(1, tensor_size // self.kv_heads)

    def rank_heads(self, tensor_size: int) -> int:
        """Heads on one rank."""
        return self.kv_heads * self.copies(tensor_size) // tensor_size

    def token_bytes(self, tensor_size: int, kv_dtype: str) -> int:
        """Bytes a token on one rank."""
        return self.rank_heads(tensor_size) * (self.key_dim + self.value_dim) * item_bytes(kv_dtype)


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: one compressed vector a token, the same on every rank."""

    dim: int

    def shards(self, _tensor_size: int) -> int:
        """1: all ranks hold the same."""
        return 1

    def token_bytes(self, _tensor_size: int, kv_dtype: str) -> int:
        """Bytes a token on one rank."""
        if kv_dtype == FP8_DS_MLA:
            return _FP8_DS_MLA_TOKEN_BYTES
        return self.dim * item_bytes(kv_dtype)


@dataclass(frozen=True, slots=True)
class State:
    """A recurrent layer: a convolution's last inputs and a state a head, as of one boundary, whatever its position."""

    kind: str
    """Mamba, Mamba-2, GDN, KDA or short convolution."""
    conv_rows: int
    """Past inputs that the convolution sees: its kernel less one."""
    conv_channels: int
    heads: int = 0
    head_values: int = 0
    """Values of a head's state."""
    groups: int = 0
    """Mamba-2: groups of B and C, which go through the convolution too."""
    group_channels: int = 0
    state_dtype: str = "auto"
    """Of the heads' states; auto is the model's dtype."""

    def shards(self, tensor_size: int) -> int:
        """Every rank holds its own share."""
        return tensor_size

    def state_bytes(self, tensor_size: int, model_dtype: str, state_dtype: str = "auto") -> int:
        """Bytes of a state on one rank. `state_dtype`: of the heads' states, when not what the model says."""
        groups = self.groups
        if groups % tensor_size:  # each rank needs the groups of its heads: they are repeated
            groups = tensor_size
        channels = self.conv_channels + groups * self.group_channels
        if channels % tensor_size or self.heads % tensor_size:
            raise ConfigError(
                f"a {self.kind} layer of {self.heads} heads and {channels} channels cannot be split over "
                f"{tensor_size} tensor-parallel ranks"
            )
        if state_dtype == "auto":
            state_dtype = model_dtype if self.state_dtype == "auto" else self.state_dtype
        return self.conv_rows * channels // tensor_size * item_bytes(model_dtype) + (
            self.heads // tensor_size * self.head_values * item_bytes(state_dtype)
        )


Layer: TypeAlias = Attention | Latent | State


@dataclass(frozen=True, slots=True)
class Model:
    """What a configuration says about a model's cache."""

    name: str
    """Its model_type."""
    dtype: str
    """Of its activations, and of the cache unless another is asked for; resolved."""
    layers: tuple[tuple[Layer, ...], ...]
    """For each of the model's layers what it keeps; () for layers that keep nothing."""
    kv_dtype: str | None = None
    """Of the cache, where the checkpoint's quantization asks for one."""
    notes: tuple[str, ...] = ()
    """What was taken for granted, for people."""


def item_bytes(dtype: str) -> int:
    """Bytes of a value; ConfigError for a dtype whose layout is not known here."""
    size = DTYPE_BYTES.get(dtype)
    if size is None:
        raise ConfigError(
            f"dtype {dtype!r}: its bytes are not known here (packed formats keep scales beside the values); known are "
            f"{', '.join(DTYPE_BYTES)}, and {FP8_DS_MLA} for multi-head latent attention"
        )
    return size
