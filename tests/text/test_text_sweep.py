"""Every key of tokenizer_config.json and of generation_config.json: left out, and set to other legal values.

The ids and the sampling are Transformers' then, or the key is refused by name; what differs has its reason here.
It takes 8 s (`pytest tests/engine/text/test_text_sweep.py --full`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tandem.engine.protocol import SamplingSettings
from tandem.engine.start.sampling_defaults import FIELDS, read_sampling_defaults
from tandem.errors import CheckpointError
from tandem.text.tokenizer import Tokenizer
from tokenizer_files import ONE, written

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.full

# --- tokenizer_config.json

LISTED = {
    "256": ONE | {"content": "<bos>"},
    "257": ONE | {"content": "<eos>"},
    "258": ONE | {"content": "<think>", "special": False},
}
CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": None,
    "pad_token": "<eos>", "sep_token": None, "cls_token": None, "mask_token": None,
    "additional_special_tokens": ["<eos>"], "extra_special_tokens": {}, "added_tokens_decoder": LISTED,
    "add_bos_token": False, "add_eos_token": False, "add_prefix_space": False,
    "clean_up_tokenization_spaces": False, "model_max_length": 512, "padding_side": "left",
    "truncation_side": "left", "split_special_tokens": False, "legacy": True, "spaces_between_special_tokens": False,
    "errors": "replace", "use_default_system_prompt": False, "model_input_names": ["input_ids"],
    "chat_template": "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}",
}  # fmt: skip
EDGES = ("lstrip", "rstrip", "single_word")
TYPED = {"__type": "AddedToken"}
NEW = TYPED | {"content": "<new>", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False}
OTHERS: dict[str, list[Any]] = {
    "tokenizer_class": ["PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer", "NoSuchTokenizer"],
    **{
        f"{name}_token": ["<new>", NEW, "<eos>", NEW | {"content": "<bos>"}]
        for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")
    },
    "additional_special_tokens": [[], ["<new>", "<newer>"]],
    "extra_special_tokens": [{"image_token": "<image>"}, ["<image>"]],
    "added_tokens_decoder": [
        {},
        *(LISTED | {"258": LISTED["258"] | {switch: True}} for switch in (*EDGES, "special")),
        *(LISTED | {"257": LISTED["257"] | {switch: True}} for switch in EDGES),
        LISTED | {"258": LISTED["258"] | {"normalized": True}},
        LISTED | {"259": ONE | {"content": "<new>"}},
    ],
    "add_bos_token": [True], "add_eos_token": [True], "add_prefix_space": [True],
    "clean_up_tokenization_spaces": [True], "model_max_length": [4, 1e30], "padding_side": ["right"],
    "truncation_side": ["right"], "split_special_tokens": [True], "legacy": [False],
    "spaces_between_special_tokens": [True], "errors": ["strict"], "use_default_system_prompt": [True],
    "model_input_names": [["input_ids", "attention_mask"]],
    "chat_template": ["{{ eos_token }}x", [{"name": "default", "template": "{{ bos_token }}y"}], None],
}  # fmt: skip
TEXTS = (
    "Hi you", " a <think> b", "a<think>b<eos>", "x <eos> y", "<bos><new> <newer>z", "a <new> b", "<image>é 🎉",
    "", "thing<think>s <eos>t",
)  # fmt: skip
REFUSED = {("split_special_tokens", "True")}
BEGINS = {("add_bos_token", "True"): [256]}  # as in llama.cpp and Transformers 4; Transformers 5.24 adds none


def changes(config: dict[str, Any], others: dict[str, list[Any]]) -> Iterator[Any]:
    for key in config:
        yield pytest.param(key, None, id=f"{key} left out")
        for i, value in enumerate(others[key]):
            yield pytest.param(key, [value], id=f"{key} {i}: {json.dumps(value):.40}")


def changed(config: dict[str, Any], key: str, value: list[Any] | None) -> dict[str, Any]:
    left = {name: each for name, each in config.items() if name != key}
    return left if value is None else left | {key: value[0]}


@pytest.mark.parametrize(("key", "value"), changes(CONFIG, OTHERS))
def test_tokenizer_config(key: str, value: list[Any] | None, tmp_path: Path) -> None:
    path = written(tmp_path)
    (path / "tokenizer_config.json").write_text(json.dumps(changed(CONFIG, key, value)))
    if value is not None and (key, str(value[0])) in REFUSED:
        with pytest.raises(CheckpointError, match=key):
            Tokenizer.load(path)
        return
    begins = BEGINS.get((key, str(value and value[0])), [])
    ours, theirs = Tokenizer.load(path), transformers.AutoTokenizer.from_pretrained(str(path))
    for text in TEXTS:
        for special in (True, False):
            found = theirs(text, add_special_tokens=special)["input_ids"]
            assert ours.encode(text, special) == [*(begins if special else []), *found], text
    ids = theirs(TEXTS[4], add_special_tokens=False)["input_ids"]
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)
    if theirs.eos_token is not None:
        assert theirs.eos_token_id in ours.eos_ids
    if theirs.chat_template is None:
        assert ours.chat_template is None
    else:
        said = [{"role": "user", "content": "hi"}]
        assert ours.apply_chat_template(said) == theirs.apply_chat_template(
            said, tokenize=False, add_generation_prompt=True
        )


# --- generation_config.json

GENERATION: dict[str, Any] = {
    "do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "typical_p": 0.9,
    "repetition_penalty": 1.05, "eos_token_id": [257], "bos_token_id": 256, "pad_token_id": 257,
}  # fmt: skip
SAMPLED: dict[str, list[Any]] = {
    "do_sample": [False], "temperature": [1.0, 1.5], "top_p": [1.0, 0.5], "top_k": [0, 1, 50], "min_p": [0.0, 0.3],
    "typical_p": [1.0, 0.5], "repetition_penalty": [1.0, 1.2], "eos_token_id": [256, [256, 257]],
    "bos_token_id": [257], "pad_token_id": [256],
}  # fmt: skip
# Where generation_config.json says nothing, OpenAI's values hold; Transformers is greedy then, and takes 50 tokens.
OURS_WHERE_LEFT_OUT = {"do_sample": True, "top_k": 0}
REST: dict[str, list[tuple[Any, bool]]] = {  # values, and whether they are refused
    "num_beams": [(1, False), (4, True)], "num_beam_groups": [(1, False), (2, True)],
    "diversity_penalty": [(0.0, False), (0.5, True)], "penalty_alpha": [(0.0, False), (0.6, True)],
    "no_repeat_ngram_size": [(0, False), (3, True)], "encoder_no_repeat_ngram_size": [(0, False), (3, True)],
    "encoder_repetition_penalty": [(1.0, False), (1.2, True)], "bad_words_ids": [([], False), ([[5]], True)],
    "suppress_tokens": [([], False), ([5], True)], "begin_suppress_tokens": [([], False), ([5], True)],
    "sequence_bias": [({}, False), ([[[5], -1.0]], True)], "forced_bos_token_id": [(5, True)],
    "forced_eos_token_id": [(257, True)], "exponential_decay_length_penalty": [([5, 1.1], True)],
    "guidance_scale": [(1, False), (1.0, False), (1.5, True)], "watermarking_config": [({"bias": 2.5}, True)],
    "top_h": [(0.4, True)], "epsilon_cutoff": [(0.0, False), (3e-4, True)], "eta_cutoff": [(0.0, False), (3e-4, True)],
    "dola_layers": [("low", True)], "constraints": [([5], True)], "force_words_ids": [([[5]], True)],
    "min_length": [(0, False), (5, True)], "min_new_tokens": [(0, False), (5, True)],
    "stop_strings": [([], False), ("x", True), (["x"], True)], "token_healing": [(False, False), (True, True)],
    # of beams alone, of how Transformers computes, or of lengths, which are a request's
    **{
        name: [(value, False)]
        for name, value in {
            "length_penalty": 2.0, "early_stopping": True, "max_length": 64, "max_new_tokens": 8, "max_time": 1.0,
            "use_cache": False, "cache_implementation": "static", "cache_config": {}, "max_cache_len": 64,
            "use_mtp": True, "renormalize_logits": True, "remove_invalid_values": True, "num_return_sequences": 2,
            "output_attentions": True, "output_hidden_states": True, "output_scores": True, "output_logits": True,
            "return_dict_in_generate": True, "decoder_start_token_id": 256, "is_assistant": True,
            "num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic",
            "assistant_confidence_threshold": 0.1, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 2,
            "assistant_early_exit": 2, "assistant_lookbehind": 5, "target_lookbehind": 5,
            "assistant_ensemble_weight": 0.5, "speculation_type": "x", "compile_config": {}, "disable_compile": True,
            "continuous_batching_config": {}, "low_memory": True, "prefill_chunk_size": 64,
            "_from_model_config": True, "transformers_version": "4.51.0",
        }.items()
    },
}  # fmt: skip


def sampled(path: Path, generation: dict[str, Any]) -> dict[str, float]:
    (path / "generation_config.json").write_text(json.dumps(generation))
    params = SamplingSettings(**read_sampling_defaults(path))
    return {name: getattr(params, name) for name in FIELDS}


def sampled_there(path: Path) -> dict[str, float]:
    """Transformers' own reading, with its defaults, but for `OURS_WHERE_LEFT_OUT`."""
    config = transformers.GenerationConfig.from_pretrained(str(path))
    found = {name: getattr(config, name) for name in (*FIELDS, "do_sample")}
    defaults = transformers.GenerationConfig._get_default_generation_params() | OURS_WHERE_LEFT_OUT | {"min_p": 0.0}
    found = {name: defaults[name] if value is None else value for name, value in found.items()}
    if found.pop("do_sample"):
        return found
    neutral = {name: defaults[name] for name in FIELDS} | {"temperature": 0.0}
    return neutral | {"repetition_penalty": found["repetition_penalty"]}


@pytest.mark.parametrize(("key", "value"), changes(GENERATION, SAMPLED))
def test_generation_config(key: str, value: list[Any] | None, tmp_path: Path) -> None:
    path, generation = written(tmp_path), changed(GENERATION, key, value)
    assert sampled(path, generation) == sampled_there(path)
    ends = transformers.GenerationConfig.from_pretrained(str(path)).eos_token_id or []
    assert set(Tokenizer.load(path).eos_ids) == {*([ends] if isinstance(ends, int) else ends), 257}


@pytest.mark.parametrize("key", REST)
def test_the_rest_of_generation_config_says_nothing_or_is_refused(key: str, tmp_path: Path) -> None:
    path = written(tmp_path)
    before = sampled(path, GENERATION)
    for value, refused in [*REST[key], (None, False)]:
        if refused:
            with pytest.raises(CheckpointError, match=f"{key} is .*not supported.*--sampling-defaults openai"):
                sampled(path, GENERATION | {key: value})
        else:
            assert sampled(path, GENERATION | {key: value}) == before


def test_no_key_is_forgotten() -> None:
    """Of this version of Transformers."""
    assert set(OTHERS) == set(CONFIG) and set(SAMPLED) == set(GENERATION)
    assert set(vars(transformers.GenerationConfig())) <= set(REST) | set(GENERATION)
