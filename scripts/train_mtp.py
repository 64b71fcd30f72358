"""Trains a draft layer for the demo model, on answers that the model writes itself; nothing else is read.

python scripts/train_mtp.py DIR                      # writes, trains and says how many are accepted: 35 minutes
kt serve demo --speculative-algorithm NEXTN --speculative-draft-model-path DIR

The layer has a dense feed-forward and drafts the tokens that answers have most often: on a CPU the head of the whole
vocabulary takes longer than the layer. Prompts that are only measured have other subjects than those that train it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # beside other programs, threads that spin take tenfold as long

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "scripts")]

from mtp.layer import Layer, Shape  # noqa: E402
from mtp.prompts import KINDS, prompts  # noqa: E402
from mtp.text import write_draft, written  # noqa: E402
from mtp.training import Head, Text, acceptance, fitted, frequent, train  # noqa: E402

from tandem.checkpoint import open_checkpoint, resolve_model  # noqa: E402
from tandem.engine.start.demo_model import prepare_demo  # noqa: E402

SMALL = 0.02  # what attention and feed-forward add at first, beside what the last layer's did


def main() -> None:
    args = arguments()
    prepare_demo(resolve_model("demo"))
    shape, tensor = shape_of(args.width), reader()
    texts = written_or_kept(args, shape)
    measured = written(
        "demo", shape, prompts(9, ROOT / "src", held_out=True), batch=32, seconds=args.held_out, seed=9
    )
    torch.set_num_threads(args.threads)
    head = Head(tensor("model.embed_tokens.weight"), torch.empty(0))
    head = Head(head.embedding, frequent(texts, len(head.embedding), args.vocab))
    layer = begun(shape, tensor)
    fitted(layer, head, texts)
    for line in train(layer, head, texts, seconds=args.seconds, rate=args.rate):
        print(line, flush=True)
    write_draft(args.directory, "demo", shape, layer.state_dict(), head.ids)
    for kind in KINDS:
        shares = acceptance(layer, head, [text for text in measured if text.kind == kind and text.greedy])
        print(
            f"{kind}: accepted behind accepted ones: {', '.join(f'{share:.3f}' for share in shares)}"
        )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("directory", type=Path, help="where the layer is written")
    parser.add_argument("--texts", type=Path, help="where answers are kept between runs")
    parser.add_argument("--write", type=float, default=840, help="seconds of writing answers")
    parser.add_argument(
        "--held-out", type=float, default=60, help="seconds of writing answers to other prompts"
    )
    parser.add_argument("--seconds", type=float, default=1080, help="of training")
    parser.add_argument("--width", type=int, default=512, help="of the feed-forward")
    parser.add_argument("--vocab", type=int, default=6144, help="tokens that are drafted")
    parser.add_argument("--rate", type=float, default=1.2e-3, help="of learning, at first")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def written_or_kept(args: argparse.Namespace, shape: Shape) -> list[Text]:
    if args.texts is not None and args.texts.is_file():
        return [Text(*each) for each in torch.load(args.texts)]
    texts = written("demo", shape, prompts(2, ROOT / "src"), batch=64, seconds=args.write, seed=2)
    if not texts:
        raise SystemExit("no answer was done in the time: give more with --write")
    print(f"{len(texts)} texts, {sum(len(text.tokens) for text in texts)} tokens", flush=True)
    if args.texts is not None:
        kept = [(text.tokens, text.hidden, text.prompt, text.kind, text.greedy) for text in texts]
        torch.save(kept, args.texts)
    return texts


def shape_of(width: int) -> Shape:
    said = json.loads((resolve_model("demo") / "config.json").read_text(encoding="utf-8"))
    heads = said["num_attention_heads"], said["num_key_value_heads"], said["head_dim"]
    return Shape(said["hidden_size"], *heads, width, said["rope_theta"], said["rms_norm_eps"])


def reader() -> Callable[[str], Tensor]:
    checkpoint = open_checkpoint(resolve_model("demo"))
    return lambda name: checkpoint.get(name).float()


@torch.no_grad()
def begun(shape: Shape, tensor: Callable[[str], Tensor]) -> Layer:
    """A layer that begins as the model's last one, all but silent."""
    torch.manual_seed(0)
    layer, last = Layer(shape), "model.layers.29."
    for m in "qkvo":
        layer.self_attn[f"{m}_proj"].weight.copy_(tensor(f"{last}self_attn.{m}_proj.weight"))
    for name in ("input_layernorm", "post_attention_layernorm"):
        getattr(layer, name).weight.copy_(tensor(f"{last}{name}.weight"))
    for m in ("gate", "up", "down"):
        shared, own = tensor(f"{last}mlp.shared_experts.{m}_proj.weight"), layer.mlp[f"{m}_proj"].weight
        rows, columns = (min(a, b) for a, b in zip(own.shape, shared.shape, strict=True))
        own[:rows, :columns] = shared[:rows, :columns]
    layer.shared_head["norm"].weight.copy_(tensor("model.norm.weight"))
    for name in (layer.self_attn["o_proj"], layer.mlp["down_proj"]):
        name.weight.mul_(SMALL)
    return layer


if __name__ == "__main__":
    main()
