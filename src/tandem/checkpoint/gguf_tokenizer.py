"""The tokenizer and the chat template inside a GGUF file, as a `tokenizers.Tokenizer` and plain texts.

A file says its kind (`tokenizer.ggml.model`: "gpt2" = byte-level BPE, "llama" = SentencePiece, "gemma4" = BPE of a
whole text) and names the rule that cuts text into words before merging (`tokenizer.ggml.pre`); the rules are those of
the models' own tokenizer.json.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from tandem.checkpoint.gguf_config import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, token_kinds, untyped_control
from tandem.checkpoint.gguf_model import GGUFModel
from tandem.errors import CheckpointError

log = logging.getLogger("tandem.text")

SPACE = "▁"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
LONGEST_TOKEN = 1024  # characters, of those whose parts are sought: that takes their square. Real ones have 128

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_QWEN35 = (
    rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
_CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s"
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = "|".join((_CASED % ("*", "+"), _CASED % ("+", "*"), r"\p{N}", _CASED_REST))
_GPT4O = "|".join(
    (_CASED % ("*", "+") + _ENDINGS + "?", _CASED % ("+", "*") + _ENDINGS + "?", r"\p{N}{1,3}", _CASED_REST)
)
_CASED_NOT_HAN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
)
_KIMI_K2 = "|".join(
    (r"\p{Han}+", _CASED_NOT_HAN % ("*", "+") + _ENDINGS + "?", _CASED_NOT_HAN % ("+", "*") + _ENDINGS + "?",
     r"\p{N}{1,3}", _REST)
)  # fmt: skip
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# DeepSeek-V2. Its own list of cased letters is that of an older Unicode, but for letters of mathematics and the like.
_DEEPSEEK_LLM = (
    r"[\r\n]", r"\s?[\p{Lu}\p{Ll}\p{Lt}]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r"\s+$",
    r"[一-龥ࠀ-一가-퟿]+", r"\p{N}+",
)  # fmt: skip
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")

# Patterns applied one after the other; every match and everything between two becomes a piece.
PRE: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("gpt-2", "olmo", "mpt", "jais", "phi-2", "mellum"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "mellum2"), (r"\p{N}", _GPT2)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "pixtral", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe", "lfm2"), (_LLAMA3,)
    ),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "megrez", "grok-2"), (_QWEN2,)),
    "qwen35": (_QWEN35,),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), (_BAILING,)),
    "tekken": (_TEKKEN,),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), (_GPT4O,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _DEEPSEEK3),
    "laguna": (r"[^\n]+|[\n]+", _QWEN2),
    "deepseek-llm": _DEEPSEEK_LLM,
    "kimi-k2": (_KIMI_K2,),
    "deepseek-coder": _DEEPSEEK_CODER,
}
WHOLE_WORDS = ("llama-bpe", "llama3", "llama-v3", "pixtral", "tekken", "lfm2")
"""Words that are tokens are taken whole instead of merged; text begins with bos, unless a file says otherwise."""
COMPOSED = ("qwen2", "qwen35", "deepseek-r1-qwen", "olmo")
"""Text is brought into Unicode's composed form (NFC) first."""


def gguf_tokenizer(model: GGUFModel) -> Tokenizer:
    """The tokenizer, special tokens and begin-of-text rule included. CheckpointError for a kind we do not know."""
    whole = model.optional("tokenizer.huggingface.json", "")
    try:
        return Tokenizer.from_str(whole) if whole else _built(model)
    except CheckpointError:
        raise
    except (
        Exception
    ) as error:  # the library raises bare Exceptions: a merge of unknown tokens, JSON it cannot read
        raise CheckpointError(f"{model.path}: its tokenizer cannot be built ({error})") from error


def gguf_texts(model: GGUFModel) -> dict[str, Any]:
    """Content of tokenizer_config.json: bos_token, eos_token …, chat_template; only what the file has."""
    tokens = model.array("tokenizer.ggml.tokens", str)
    texts: dict[str, Any] = {}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = model.optional(f"tokenizer.ggml.{key}_token_id", -1)
        if 0 <= index < len(tokens):
            texts[f"{name}_token"] = tokens[index]
    if template := model.optional("tokenizer.chat_template", ""):
        texts["chat_template"] = template
    return texts


def _built(model: GGUFModel) -> Tokenizer:
    tokens, kind = model.array("tokenizer.ggml.tokens", str), model.optional("tokenizer.ggml.model", "none")
    if kind not in ("gpt2", "llama", "gemma4") or not tokens:
        raise CheckpointError(
            f"{model.path}: tokenizer {kind!r} is not supported; "
            "'gpt2' (byte-level BPE), 'llama' (SentencePiece) and 'gemma4' are"
        )
    kinds = token_kinds(model, tokens)
    _tell(model, [tokens[i] for i in untyped_control(model, tokens)])
    if kind == "llama":
        tokenizer = _sentence_piece(model, tokens, kinds)
    else:
        tokenizer = _byte_level(model, tokens, kinds) if kind == "gpt2" else _whole_text(model, tokens, kinds)
    for special, types in ((True, (UNKNOWN, CONTROL)), (False, (USER_DEFINED,))):
        _add(tokenizer, [t for t, k in zip(tokens, kinds, strict=True) if k in types], special)
    _frame(tokenizer, model, tokens, begins=kind != "gpt2" or _pre(model) in WHOLE_WORDS)
    return tokenizer


def _tell(model: GGUFModel, repaired: list[str]) -> None:
    if repaired:
        names = ", ".join(map(repr, repaired[:8])) + (", …" if len(repaired) > 8 else "")
        log.warning("%s has control tokens without their type; they are control tokens here: %s", model.path, names)


def _add(tokenizer: Tokenizer, texts: list[str], special: bool) -> None:
    added = [AddedToken(text, normalized=False, special=special) for text in texts]
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)


def _frame(tokenizer: Tokenizer, model: GGUFModel, tokens: list[str], begins: bool) -> None:
    """Begin- and end-of-text tokens around a prompt, as far as the file wants them."""
    ids = {name: model.optional(f"tokenizer.ggml.{name}_token_id", -1) for name in ("bos", "eos")}
    defaults = {"bos": begins, "eos": False}
    used = {
        name: tokens[index]
        for name, index in ids.items()
        if model.optional(f"tokenizer.ggml.add_{name}_token", defaults[name]) and 0 <= index < len(tokens)
    }
    if used:
        frame = [used[name] for name in ("bos",) if name in used], [used[n] for n in ("eos",) if n in used]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[*frame[0], "$A", *frame[1]], special_tokens=[(used[n], ids[n]) for n in used]
        )


def _pre(model: GGUFModel) -> str:
    return model.optional("tokenizer.ggml.pre", "none")


def _byte_level(model: GGUFModel, tokens: list[str], kinds: list[int]) -> Tokenizer:
    pre = _pre(model)
    if pre not in PRE:
        names = ", ".join(sorted(PRE))
        raise CheckpointError(
            f"{model.path}: tokenizer.ggml.pre {pre!r} is not supported; these are: {names}"
        )
    vocabulary, merges = {token: i for i, token in enumerate(tokens)}, _stored_merges(model, tokens, kinds)
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer = words(PRE[pre])
    tokenizer.decoder = decoders.ByteLevel()
    if pre in COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def words(patterns: tuple[str, ...]) -> pre_tokenizers.PreTokenizer:
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def _whole_text(model: GGUFModel, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Gemma 4's: merges run over a text as a whole, in which spaces are letters; bytes stand for unknown ones."""
    vocabulary, merges = {token: i for i, token in enumerate(tokens)}, _stored_merges(model, tokens, kinds)
    unknown = tokens[model.optional("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _stored_merges(model: GGUFModel, tokens: list[str], kinds: list[int]) -> list[tuple[str, str]]:
    """Raises CheckpointError where there are none, and words: each letter would be a token."""
    merges = model.array("tokenizer.ggml.merges", str)
    words = (t for t, kind in zip(tokens, kinds, strict=True) if kind == NORMAL and len(t) > 1)
    if not merges and (word := next((w for w in words if not _BYTE.fullmatch(w)), None)) is not None:
        raise CheckpointError(
            f"{model.path} has no tokenizer.ggml.merges, so no text could have tokens such as {word[:40]!r}: "
            "convert the model again, with a newer convert_hf_to_gguf.py and its tokenizer.json"
        )
    return [_pair(merge, model) for merge in merges]


def _pair(merge: str, model: GGUFModel) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right:
        raise CheckpointError(f"{model.path}: merge {merge[:40]!r} is not two tokens with a space between")
    return left, right


def _sentence_piece(model: GGUFModel, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """SentencePiece merges the neighbours whose joint token has the highest score: BPE, in the order of the scores."""
    scores = model.array("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise CheckpointError(f"{model.path}: {len(tokens)} tokens have {len(scores)} scores")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    merges = all_merges(
        model.path, [(t, s) for t, s, k in zip(tokens, scores, kinds, strict=True) if k == NORMAL], vocabulary
    )
    unknown = model.optional("tokenizer.ggml.unknown_token_id", 0)
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    )
    prefixed = model.optional("tokenizer.ggml.add_space_prefix", True)
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), *spaces] if prefixed else spaces)
    texts: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*texts, decoders.Strip(" ", 1, 0)] if prefixed else texts)
    return tokenizer


def all_merges(
    path: Path, scored: list[tuple[str, float]], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to make a token of two others, best token first, then in the order of the parts. Raises CheckpointError
    for a token so long that it would take hours; path: whose tokens they are."""
    if (longest := max((len(token) for token, _ in scored), default=0)) > LONGEST_TOKEN:
        raise CheckpointError(f"{path} has a token of {longest} characters; at most {LONGEST_TOKEN} are read")
    ranked = [
        (-score, vocabulary[token[:cut]], vocabulary[token[cut:]], token[:cut], token[cut:])
        for token, score in scored
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(ranked)]
