"""Towers of Qwen3-VL, Qwen3-Omni and Qwen3.5: what of `config.json` says how images are read."""

from __future__ import annotations

import math
from dataclasses import replace

from tandem.errors import ConfigError
from tandem.spec.json_keys import JsonKeys
from tandem.spec.model_config import ModelConfig
from tandem.spec.rope import rope_keys
from tandem.spec.vision import Processor, Tower

Numbers = tuple[int, ...]
SIDES = 3  # parts of a position: in time, downwards, across


def with_tower(
    keys: JsonKeys, text: JsonKeys, model: ModelConfig, sections: Numbers, deep: Numbers = ()
) -> ModelConfig:
    """The model, with the tower of `vision_config` where there is one; without it, and why, where it is not computed:
    text is served anyway. keys: of the whole file; text: of its text. Where the file does not say, sections: pairs of a
    head that each part of a position turns; deep: as of `Tower`."""
    if not keys.mapping("vision_config"):
        return model
    try:
        return replace(model, tower=_tower(keys, text, model, sections, deep))
    except ConfigError as error:
        return replace(model, blind=str(error))


def _tower(keys: JsonKeys, text: JsonKeys, model: ModelConfig, sections: Numbers, deep: Numbers) -> Tower:
    """Raises ConfigError for what is not computed."""
    inner = JsonKeys(keys.mapping("vision_config"), f"{keys.where}: vision_config")
    inner.only("hidden_act", "gelu_pytorch_tanh", "no other activation is computed in a tower")
    inner.only("in_channels", 3, "pixels are red, green and blue")
    heads, hidden = inner.size("num_heads", 16), inner.size("hidden_size", 1152)
    if hidden % heads or hidden // heads % 4:
        raise ConfigError(f"{inner.where}: {hidden} channels are not {heads} heads that turn in two directions")
    tower = Tower(
        depth=inner.size("depth", 27, most=10_000),
        hidden=hidden,
        heads=heads,
        width=inner.size("intermediate_size", 4304),
        side=_side(inner),
        out=model.hidden,
        placeholder=keys.need("image_token_id", 151655),
        start=keys.optional("vision_start_token_id", 151652),
        end=keys.optional("vision_end_token_id", 151653),
        axes=_axes(text, model, sections),
        deep=inner.integers("deepstack_visual_indexes") or deep,
        processor=_processor(inner),
    )
    return _checked(inner, tower)


def _side(keys: JsonKeys) -> int:
    count = keys.size("num_position_embeddings", 2304, most=1 << 20)
    side = math.isqrt(count)
    if side**2 != count:
        raise ConfigError(f"{keys.where}: num_position_embeddings is {count}, and must be a square; try 2304")
    return side


def _processor(keys: JsonKeys) -> Processor:
    """Sizes of patches; the rest is in preprocessor_config.json."""
    return Processor(
        patch=keys.size("patch_size", 16, most=256),
        merge=keys.size("spatial_merge_size", 2, most=16),
        temporal=keys.size("temporal_patch_size", 2, most=16),
    )


def _checked(keys: JsonKeys, tower: Tower) -> Tower:
    if (out := keys.optional("out_hidden_size", tower.out)) != tower.out:
        raise ConfigError(f"{keys.where}: out_hidden_size is {out}, but the text has {tower.out} channels")
    if any(not 0 <= block < tower.depth for block in tower.deep) or list(tower.deep) != sorted(set(tower.deep)):
        raise ConfigError(
            f"{keys.where}: deepstack_visual_indexes must be rising numbers of its {tower.depth} blocks; remove it"
        )
    return tower


def _axes(text: JsonKeys, model: ModelConfig, sections: Numbers) -> Numbers:
    """Which part of a position turns each pair: they alternate, as long as a section has pairs left; time has the
    rest."""
    turning = rope_keys(text)
    turning.only("mrope_interleaved", True, "parts of a position alternate")
    own = turning.integers("mrope_section") or sections
    if len(own) != SIDES or min(own) < 0:
        raise ConfigError(f"{text.where}: mrope_section is {list(own)}; try {list(sections)}")
    (pairs,) = {each.rope.dims // 2 for each in model.attentions}
    turns = {i: axis for axis in (1, 2) for i in range(axis, own[axis] * SIDES, SIDES)}
    return tuple(turns.get(pair, 0) for pair in range(pairs))
