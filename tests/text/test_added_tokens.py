"""What stands beside tokenizer.json: tokens that a fine-tune added, and tokens around a prompt."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers

from tandem.errors import CheckpointError
from tandem.text.tokenizer import Tokenizer
from tokenizer_files import ONE, written

transformers = pytest.importorskip("transformers")

FIRST = 258  # free id: 256 letters, <bos>, <eos>
END, THINK = "<|im_end|>", "<think>"
DECODER = {str(FIRST): ONE | {"content": THINK, "special": False}, str(FIRST + 1): ONE | {"content": END}}


def ids_there(path: Path, text: str) -> list[int]:
    return transformers.AutoTokenizer.from_pretrained(str(path))(text)["input_ids"]


WAYS = {
    "added_tokens_decoder": {"tokenizer_config": {"added_tokens_decoder": DECODER}},
    "added_tokens.json": {"added_tokens": {THINK: FIRST, END: FIRST + 1}},
    "special_tokens_map.json": {"special_tokens_map": {"additional_special_tokens": [THINK, END]}},
    "additional_special_tokens": {"tokenizer_config": {"additional_special_tokens": [THINK, END]}},
    "extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": {"think_token": THINK, "end_token": END}}},
    "in no order": {"added_tokens": {END: FIRST + 1, THINK: FIRST}},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_tokens_beside_tokenizer_json_have_one_id_each(way: str, tmp_path: Path) -> None:
    path = written(tmp_path, **WAYS[way])
    tokenizer, text = Tokenizer.load(path), f"a{THINK}b {END} c"
    assert tokenizer.encode(text) == ids_there(path, text)
    assert tokenizer.encode(END) == [FIRST + 1] and tokenizer.token_text(FIRST) == THINK


PIECES = ("<|im_start|>", END)  # ids 256 and 257
LISTED = [
    {"256": ONE | {"content": PIECES[0]} | switch, "258": ONE | {"content": "<bos>"}, "259": ONE | {"content": "<eos>"}}
    for switch in ({}, {"lstrip": True}, {"special": False})
]  # fmt: skip
NAMING = [
    {"tokenizer_config": {}},
    {"tokenizer_config": {"eos_token": END, "additional_special_tokens": [PIECES[0]]}},
    {"tokenizer_config": {"eos_token": END, "extra_special_tokens": {"start": PIECES[0], "new": "<new>"}}},
    {"tokenizer_config": {"eos_token": ONE | {"content": END, "lstrip": True, "__type": "AddedToken"}}},
    {"special_tokens_map": {"additional_special_tokens": [*PIECES]}},
    {"added_tokens": {PIECES[0]: 256, END: 257}},
    *({"tokenizer_config": {"added_tokens_decoder": listed} | more}
      for listed in LISTED for more in ({"additional_special_tokens": [*PIECES]}, {"eos_token": PIECES[0]})),
]  # fmt: skip


@pytest.mark.parametrize("files", NAMING)
def test_control_tokens_that_are_pieces_of_the_vocabulary_are_special(files, tmp_path: Path) -> None:
    """Those that a file names, with their id; what a list says about one counts first."""
    path, text = written(tmp_path, vocabulary=PIECES, **files), f"a {PIECES[0]}hi {END}<new>"
    ours, theirs = Tokenizer.load(path), transformers.AutoTokenizer.from_pretrained(str(path))
    ids = theirs(text)["input_ids"]
    special = {i for i, token in theirs.added_tokens_decoder.items() if token.special}
    assert ours.encode(text) == ids
    assert {i for i in ids if ours.is_special(i)} == special & {*ids}


def test_messages_cannot_write_a_named_piece_of_the_vocabulary(tmp_path: Path) -> None:
    files = {"tokenizer_config": {"eos_token": END, "additional_special_tokens": [PIECES[0]]}}
    tokenizer = Tokenizer.load(written(tmp_path, vocabulary=PIECES, **files))
    text = f"hi{END}"
    sign = tokenizer.guard.sign(text)
    ids = tokenizer.encode_guarded(PIECES[0] + tokenizer.guard.guard(text, sign) + END, sign)
    assert ids[0] == 256 and ids[-1] == 257 and max(ids[1:-1]) < 256
    assert tokenizer.decode(ids[1:-1]) == text


@pytest.mark.parametrize("place", [310, 300, 256])
@pytest.mark.parametrize("named", [{}, {"eos_token": END}])
def test_a_token_that_is_listed_where_it_cannot_be_gets_no_other_id(named, place, tmp_path, caplog) -> None:
    """The model has 300 rows, and token 256 is another. Another row would be one that was never trained for it."""
    listed = {"added_tokens_decoder": {str(place): ONE | {"content": END}}}
    path = written(tmp_path, tokenizer_config=named | listed, config={"vocab_size": 300})
    tokenizer = Tokenizer.load(path)
    assert max(tokenizer.encode(END)) < 256 and "stays text" in caplog.text


def test_a_piece_of_the_vocabulary_without_a_row_stays_text(tmp_path: Path, caplog) -> None:
    files = {"tokenizer_config": {"additional_special_tokens": [*PIECES]}, "config": {"vocab_size": 257}}
    tokenizer = Tokenizer.load(written(tmp_path, vocabulary=PIECES, **files))
    assert tokenizer.encode(PIECES[0]) == [256] and max(tokenizer.encode(END)) < 256
    assert f"{END!r} is token 257, and the model has no row for it" in caplog.text


def test_a_token_that_is_listed_twice_moves_no_other(tmp_path: Path, caplog) -> None:
    texts = {FIRST: THINK, FIRST + 1: THINK, FIRST + 2: END}
    listed = {"added_tokens_decoder": {str(place): ONE | {"content": text} for place, text in texts.items()}}
    tokenizer = Tokenizer.load(written(tmp_path, tokenizer_config=listed))
    assert tokenizer.encode(THINK + END) == [FIRST, FIRST + 2] and "twice" in caplog.text


@pytest.mark.parametrize("file", ["tokenizer_config", "special_tokens_map"])
def test_an_eos_token_without_an_id_gets_one(file: str, tmp_path: Path) -> None:
    path = written(tmp_path, **{file: {"eos_token": END}})
    tokenizer = Tokenizer.load(path)
    assert tokenizer.eos_ids == (FIRST,) == tuple(ids_there(path, END))
    assert tokenizer.encode(f"a{END}")[-1] == FIRST and tokenizer.is_special(FIRST)


@pytest.mark.parametrize("config", [{"vocab_size": FIRST}, {"text_config": {"vocab_size": FIRST}}])
def test_a_token_that_the_model_has_no_row_for_stays_text(config, tmp_path: Path, caplog) -> None:
    """A prompt with such an id would be refused. The log says so, and where no token ends an answer."""
    files = {"tokenizer_config": {"eos_token": END, "added_tokens_decoder": DECODER}}
    tokenizer = Tokenizer.load(written(tmp_path, config=config, **files))
    assert max(tokenizer.encode(f"{THINK}{END}")) < 256 and tokenizer.eos_ids == ()
    assert "no row for it" in caplog.text and "no token ends an answer" in caplog.text
    caplog.clear()
    Tokenizer.load(written(tmp_path, config=config | {"eos_token_id": 257}, **files))
    assert f"its eos_token {END!r} has no id; answers end with [257]" in caplog.text


def test_ids_without_a_name_are_left_free(tmp_path: Path) -> None:
    """Transformers numbers on, and gets another id than the file says."""
    far = {"added_tokens_decoder": {str(FIRST + 5): ONE | {"content": END}}}
    tokenizer = Tokenizer.load(written(tmp_path, tokenizer_config=far))
    assert tokenizer.encode(END) == [FIRST + 5]
    far["added_tokens_decoder"] = {"9999999": ONE | {"content": END}}
    with pytest.raises(CheckpointError, match="names token 9999999"):
        Tokenizer.load(written(tmp_path, tokenizer_config=far))


def test_files_that_contradict_each_other_are_named(tmp_path: Path, caplog) -> None:
    taken = {"added_tokens_decoder": {"256": ONE | {"content": END}, "300": ONE | {"content": "<eos>"}}}
    tokenizer = Tokenizer.load(written(tmp_path, tokenizer_config=taken))
    assert max(tokenizer.encode(END)) < 256 and tokenizer.encode("<eos>") == [257]
    assert "another token 256" in caplog.text and "is token 257, and token 300 beside it" in caplog.text


@pytest.mark.parametrize(
    "wrong", [{"x": ONE | {"content": END}}, {"258": ""}, {"258": {"content": 5}}, {"258": []}, []]
)
def test_what_lists_no_tokens_adds_none(wrong, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(written(tmp_path, tokenizer_config={"added_tokens_decoder": wrong}))
    assert tokenizer.encode("a") == [64] and tokenizer.eos_ids == (257,)


AROUND = [  # whether tokenizer.json frames, what the configuration says, how "a" begins and ends then
    (False, {}, [64]),
    (True, {}, [256, 64]),
    (False, {"add_bos_token": True}, [256, 64]),
    (True, {"add_bos_token": True}, [256, 64]),
    (True, {"add_bos_token": False}, [64]),
    (False, {"add_bos_token": True, "add_eos_token": True}, [256, 64]),
    (True, {"add_eos_token": True}, [256, 64]),
    (False, {"add_bos_token": "yes"}, [64]),
    (False, {"add_bos_token": True, "bos_token": None}, [64]),
]


@pytest.mark.parametrize(("framed", "says", "ids"), AROUND)
def test_a_prompt_begins_as_the_configuration_says(framed: bool, says, ids: list[int], tmp_path: Path) -> None:
    """As in llama.cpp, and with GGUF files; chat templates write these tokens themselves."""
    tokenizer = Tokenizer.load(written(tmp_path, framed, tokenizer_config=says))
    assert tokenizer.encode("a") == ids and tokenizer.encode("a", add_special_tokens=False) == [64]


@pytest.mark.parametrize("says", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
@pytest.mark.parametrize("framed", [False, True])
@pytest.mark.parametrize("length", [1, 16])
def test_padding_and_truncation_of_the_training_change_nothing(length, framed, says, tmp_path: Path) -> None:
    path = written(tmp_path, framed, tokenizer_config=says)
    wanted = Tokenizer.load(path).encode("Hi you")
    inner = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    inner.enable_padding(length=length, pad_id=0, pad_token="!")
    inner.enable_truncation(length)
    inner.save(str(path / "tokenizer.json"))
    assert Tokenizer.load(path).encode("Hi you") == wanted
    assert wanted[0] == (256 if says.get("add_bos_token", framed) else 39)


def test_deepseeks_tokenizer_begins_with_bos(tmp_path: Path) -> None:
    """Its class is Llama's, and its tokenizer.json has no rule."""
    says = {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}
    assert Tokenizer.load(written(tmp_path, tokenizer_config=says)).encode("Hi") == [256, 39, 72]
