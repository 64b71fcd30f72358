"""Which model types run, and how: each type of the installed Transformers that has experts, on a tiny random model.

python scripts/model_table.py --write         # runs every type: minutes; writes the package's table, docs/models.md
python scripts/model_table.py --write afmoe   # runs these again, and keeps what is known of the others
python scripts/model_table.py --check         # exit code 1 where docs/models.md does not say what the table says
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tandem.architectures.load import config_from_dict

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [
    str(ROOT / "src"),
    str(ROOT / "tests" / "support"),
    str(ROOT / "tests" / "support" / "foreign"),
]

from tandem.architectures.model_types import PUBLISHED, TABLE_FILE, Runs, read_table  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
CLOSE = 1e-4  # of the largest logit, float32
HEADS = (
    "head_dim", "global_head_dim", "index_head_dim", "partial_rotary_factor", "linear_key_head_dim",
    "linear_value_head_dim",
)  # fmt: skip
MOST_PARAMETERS = 160e6
TOWER = {
    "depth": 27, "hidden_size": 48, "num_heads": 4, "intermediate_size": 44, "num_position_embeddings": 36,
    "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
}  # fmt: skip
HOW = {
    "native": "Tandem's own code: the fastest, with everything that these pages tell of",
    "paged": "Transformers' modules with Tandem's experts: many answers at once, shared prefixes",
    "alone": "Transformers' modules with Tandem's experts: one answer at a time, no shared prefixes",
    "refused": "not at all",
}
WHERE = {"native": "yes", "paged": "yes, without CUDA graphs", "alone": "no", "refused": "no"}


def tried(model_type: str) -> Runs:
    """One type on a tiny random model, against Transformers alone."""
    from tandem.errors import TandemError

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "tiny"
        try:
            how, why, error = _run(model_type, path)
        except TandemError as refused:
            return Runs(model_type, "refused", _reason(refused, path))
    if error >= CLOSE:
        return Runs(model_type, "refused", f"its results are not those of Transformers (by {error:.1g})")
    native = how == "native"
    return Runs(model_type, how, why, _why_no_gpu(model_type) if native else "", native and reads_images(model_type))


def reads_images(model_type: str) -> bool:
    """Whether a tower of `vision_config`, beside the keys of its text, is one that is computed."""
    from every_type import PARTS_OF, TEXT_OF, tiny_config
    from tandem.errors import ConfigError

    keys = json.loads(tiny_config(TEXT_OF.get(model_type, model_type)).to_json_string(use_diff=False))
    if "vision_config" not in keys and model_type not in TEXT_OF:
        return False
    text = keys.get("text_config", keys)
    tower = TOWER | {"out_hidden_size": text["hidden_size"]}
    nested = {"text_config": text, "vision_config": tower, "image_token_id": 1}
    for key in reversed(PARTS_OF.get(model_type, ("text_config",))[:-1]):
        nested = {key: nested}
    try:
        return config_from_dict(nested | {"model_type": model_type}).tower is not None
    except ConfigError:
        return False


def _why_no_gpu(model_type: str) -> str:
    """The reason, for a model whose heads are as wide as the class has them."""
    from every_type import TEXT_OF, tiny_config
    from tandem.planner.gpu_plan import without_kernels

    config = tiny_config(TEXT_OF.get(model_type, model_type), keep=HEADS)
    return without_kernels(config_from_dict(json.loads(config.to_json_string(use_diff=False))))


def _run(model_type: str, path: Path) -> tuple[str, str, float]:
    """How it runs, why so, and the largest difference."""
    from every_type import OWN_EXPERTS, tiny_config
    from sessions import Session, ours, worst
    from tandem.architectures import FAMILIES
    from tandem.checkpoint import load_model_config

    if model_type in OWN_EXPERTS and model_type not in FAMILIES:
        config_from_dict(json.loads(tiny_config(model_type).to_json_string(use_diff=False)))
    wanted = _saved(model_type, path)
    config = load_model_config(path)
    if config.foreign is None:
        return "native", "", worst(ours(Session(path)), wanted(_whole))
    if config.foreign.why_single:
        return "alone", config.foreign.why_single, worst(_one_by_one(Session(path)), wanted(_pieces))
    return "paged", "", worst(ours(Session(path)), wanted(_whole))


def _saved(model_type: str, path: Path) -> Any:
    """Writes a checkpoint; what gives Transformers' logits of it."""
    import torch

    from every_type import PARTS_OF, TEXT_OF, tiny_config
    from hub_copies import ling_one
    from sessions import prompts
    from tandem.architectures.foreign.registry import model_class

    torch.manual_seed(sum(map(ord, model_type)))
    cls, part = model_class(tiny_config(TEXT_OF.get(model_type, model_type)))
    with torch.device("meta"):
        count = sum(p.numel() for p in cls._from_config(part).parameters())
    assert count < MOST_PARAMETERS, f"{model_type}: {count / 1e6:.0f} million parameters are not tiny"
    made = cls._from_config(part).float()
    for parameter in made.parameters():
        if parameter.ndim > 1 and not parameter.any():  # a router that begins with zeros prefers no expert
            torch.nn.init.normal_(parameter, std=0.15)
    theirs = path.with_name("theirs")
    made.save_pretrained(theirs)
    text = json.loads((theirs / "config.json").read_text())

    def logits(pieces_of: Callable[[list[int]], list[list[int]]]) -> list[torch.Tensor]:
        """With its cache, where a prompt is several pieces."""
        model = cls.from_pretrained(
            theirs,
            config=part,
            dtype=torch.float32,
            attn_implementation="eager",
            experts_implementation="eager",
        ).eval()
        found = []
        with torch.inference_mode():
            for prompt in prompts():
                cache, rows, done = None, [], 0
                for piece in pieces_of(prompt):
                    at = torch.arange(done, done + len(piece))[None]
                    out = model(torch.tensor([piece]), position_ids=at, past_key_values=cache, use_cache=True)
                    cache, done = out.past_key_values, done + len(piece)
                    rows.append(out.logits[0].float())
                found.append(torch.cat(rows))
        return found

    if model_type == "bailing_moe":  # other names of tensors, too
        ling_one(theirs, path)
        return logits
    shutil.copytree(theirs, path)
    if model_type in TEXT_OF:
        nested = text.get("text_config", text)
        for key in reversed(PARTS_OF.get(model_type, ("text_config",))):
            nested = {key: nested}
        nested["model_type"] = model_type
        (path / "config.json").write_text(json.dumps(nested))
    return logits


def _one_by_one(session: Any) -> list[Any]:
    import torch

    from sessions import prompts

    return [
        torch.cat([session.step([(s, piece)])[0] for piece in _pieces(prompt)])
        for s, prompt in enumerate(prompts())
    ]


def _whole(prompt: list[int]) -> list[list[int]]:
    return [prompt]


def _pieces(prompt: list[int]) -> list[list[int]]:
    """A prompt at once, but its last six tokens through the cache."""
    return [prompt[:-6], *([token] for token in prompt[-6:])]


def _reason(error: Exception, path: Path) -> str:
    """The error's text, without names of files and of all other families."""
    deepest = (
        error.__cause__ if error.__cause__ is not None and isinstance(error.__cause__, type(error)) else error
    )
    text = (
        str(deepest)
        .replace(str(path / "model.safetensors"), "the checkpoint")
        .replace(str(path), "the checkpoint")
    )
    text = re.sub(r"^config\.json: (?=Transformers)|^the checkpoint: ", "", text).partition("\n")[0]
    return re.sub(r"Transformers [\d.]+", "Transformers", text)


def every_row(only: Sequence[str]) -> list[Runs]:
    from every_type import every_type

    known = {row.model_type: row for row in read_table().rows} if only else {}
    rows = []
    for model_type in every_type():
        if not only or model_type in only:
            known[model_type] = tried(model_type)
            print(f"{model_type}: {known[model_type].how} {known[model_type].why}", flush=True)
        rows.append(known[model_type])
    return rows


def page(rows: Sequence[Runs], version: str) -> str:
    by_how = {how: [row for row in rows if row.how == how] for how in HOW}
    return (
        "\n".join([*_head(by_how), *_named(rows), *_unnamed(rows), *_refused(by_how["refused"], version)])
        + "\n"
    )


def _head(by_how: dict[str, list[Runs]]) -> list[str]:
    return [
        "# Models",
        "",
        "Does my model run? This command says it, from a name, a directory or a GGUF file:",
        "",
        "    $ kt models Qwen3-30B-A3B",
        "    qwen3_moe: native, Tandem's own code, on the CPU or beside a GPU",
        "",
        "Every model that runs is started in the same way. A name of the Hugging Face hub is downloaded first:",
        "",
        "    kt plan Qwen/Qwen3-30B-A3B     # does it fit this machine, and how fast will it be",
        "    kt serve Qwen/Qwen3-30B-A3B",
        "",
        "| runs | how | beside a GPU | types |",
        "| --- | --- | --- | --- |",
        *(f"| {how} | {HOW[how]} | {WHERE[how]} | {len(rows)} |" for how, rows in by_how.items()),
        "",
        "Some types read [images](images.md). Towers of others, and what reads sound, are not loaded: such models",
        "answer text. A type whose `text_config` names a native one is native. Any size and any fine-tuned version",
        "runs as its type does. Which quantisations and GGUF files can be read is in [formats.md](formats.md).",
        "",
        "Keys of `config.json` mean what they mean in Transformers 5. A key that would change an answer and is not",
        "computed is refused by its name. A key that nobody knows is a note at the start.",
        "",
        "- `rope_scaling` replaces `rope_parameters`, where a file has both. It must then say `rope_theta`, too, or",
        "  the model would turn otherwise than it was trained.",
        "- Time steps of Nemotron have no floor. Transformers raises those of prompts to `time_step_min`, and not",
        "  those of decoding rows. Nothing else differs (`tests/models/keys/test_time_steps.py`).",
        "",
        "`tests/models/keys/test_config_keys.py` leaves out each key of 33 types, and gives it another value.",
        "",
    ]


def _named(rows: Sequence[Runs]) -> list[str]:
    """Those that are known by name, the best first."""
    listed = [row for how in HOW for row in rows if row.how == how and row.model_type in PUBLISHED]
    return [
        "## By name",
        "",
        "| models | type (`model_type` in `config.json`) | runs | beside a GPU | images |",
        "| --- | --- | --- | --- | --- |",
        *(
            f"| {', '.join(PUBLISHED[row.model_type])} | `{row.model_type}` | {row.how} "
            f"| {_where(row)} | {_images(row)} |"
            for row in listed
        ),
        "",
    ]


def _images(row: Runs) -> str:
    return "yes" if row.images else ""


def _where(row: Runs) -> str:
    return "no" if row.gpu else WHERE[row.how]


def _unnamed(rows: Sequence[Runs]) -> list[str]:
    lines = ["## Other types", "", "| runs | types |", "| --- | --- |"]
    for how in ("native", "paged", "alone"):
        types = [f"`{row.model_type}`" for row in rows if row.how == how and row.model_type not in PUBLISHED]
        lines.append(f"| {how} | {', '.join(types)} |")
    return [*lines, ""]


def _refused(rows: Sequence[Runs], version: str) -> list[str]:
    return [
        "## What does not run, and why",
        "",
        "| type | why |",
        "| --- | --- |",
        *(f"| `{row.model_type}` | {row.why.replace('|', ' ')} |" for row in rows),
        "",
        "## How this is known",
        "",
        f"Each model type with experts of Transformers {version} ran as a tiny random model. Its float32 logits were",
        "within 1e-4 of Transformers' own. `python scripts/model_table.py --write` does that, and writes this page.",
        "The names are in `architectures/model_types.py`.",
    ]


def write(only: Sequence[str]) -> None:
    import transformers

    rows = every_row(only)
    table = {"transformers": transformers.__version__, "types": [row.as_json() for row in rows]}
    TABLE_FILE.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(rows, transformers.__version__))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("types", nargs="*")
    given = parser.parse_args(argv)
    if given.write:
        write(given.types)
    table = read_table()
    return 0 if PAGE.read_text() == page(table.rows, table.transformers) else 1


if __name__ == "__main__":
    sys.exit(main())
