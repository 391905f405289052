"""Configuration of the vision tower and its projector, read from the `vision_config` of a checkpoint's config.json."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kimi_jax.config_fields import MAX_WIDTH, ConfigError, Fields, as_object, read_config
from kimi_jax.vision.images import Processing

SIZES = {
    "vt_hidden_size": "hidden_size",
    "vt_intermediate_size": "intermediate_size",
    "vt_num_attention_heads": "num_attention_heads",
    "vt_num_hidden_layers": "num_hidden_layers",
    "patch_size": "patch_size",
    "init_pos_emb_height": "pos_emb_height",
    "init_pos_emb_width": "pos_emb_width",
    "init_pos_emb_time": "pos_emb_time",
    "text_hidden_size": "text_hidden_size",
}
"""Fields that count something, and their names here."""

IMPLEMENTED: Mapping[str, tuple[Any, ...]] = {
    "merge_kernel_size": ([2, 2],), "merge_type": ("sd2_tpool",), "pos_emb_type": ("divided_fixed",),
    "video_attn_type": ("spatial_temporal",), "mm_projector_type": ("patchmerger",), "projector_hidden_act": ("gelu",),
}  # fmt: skip
"""Fields that choose how something is computed, with the one choice there is."""


@dataclasses.dataclass(frozen=True)
class VisionConfig:
    """MoonViT and its projector; sizes count elements."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    patch_size: int
    """Pixels of a patch's side."""
    pos_emb_height: int
    pos_emb_width: int
    """Sides of the learned grid of positions, which is resized to every image's own."""
    pos_emb_time: int
    """Frames of a chunk of a video, at most."""
    text_hidden_size: int
    """Width of the language model."""
    projector_ln_eps: float
    placeholder_id: int
    """Token that stands in a prompt where rows of an image go."""
    processing: Processing = dataclasses.field(default_factory=Processing)
    """Of pictures, before the tower."""

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_attention_heads

    @classmethod
    def from_json(cls, path: str | Path) -> "VisionConfig | None":
        """Reads a config.json, or the one in a checkpoint directory; None for a model of text alone.

        Raises:
          ConfigError: naming the file and the field that is missing or unsupported.
        """
        config = read_config(path, "a checkpoint directory", cls.from_dict)
        folder = Path(path).parent if Path(path).suffix == ".json" else path
        if config is None or (processing := Processing.from_json(folder)) == config.processing:
            return config
        if processing.patch_size != config.patch_size:
            raise ConfigError(
                f"{folder}: patch_size is {processing.patch_size} in preprocessor_config.json and {config.patch_size} "
                "in config.json"
            )
        return dataclasses.replace(config, processing=processing)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "VisionConfig | None":
        """Builds the configuration from a parsed config.json; None where it has no `vision_config`.

        Raises:
          ConfigError: as `from_json` does.
        """
        top = Fields(as_object(raw, "the file"))
        if top.values.get("vision_config") is None:
            return None
        fields = top.object("vision_config")
        text = top.object("text_config") if "text_config" in top.values else top
        fields.require(IMPLEMENTED)
        sizes = {name: fields.integer(field, 1, MAX_WIDTH) for field, name in SIZES.items()}
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if hidden % heads or hidden // heads % 4:
            raise ConfigError(
                f"{fields.path}vt_hidden_size is {hidden}; its {heads} heads must have a whole width that 4 divides"
            )
        if fields.integer("mm_hidden_size", 1, MAX_WIDTH, hidden) != hidden:
            raise ConfigError(f"{fields.path}mm_hidden_size must be vt_hidden_size, {hidden}")
        if sizes["text_hidden_size"] != text.values.get("hidden_size"):
            raise ConfigError(
                f"{fields.path}text_hidden_size is {sizes['text_hidden_size']}, and the language model's hidden_size "
                f"is {text.values.get('hidden_size')}"
            )
        vocabulary = text.integer("vocab_size", 1, 2**24)
        return cls(
            **sizes,
            processing=Processing(patch_size=sizes["patch_size"]),
            projector_ln_eps=fields.number("projector_ln_eps", 1e-30, 1.0, 1e-5),
            placeholder_id=top.integer("media_placeholder_token_id", 0, vocabulary - 1),
        )
