"""`SpeculationPlan`: who drafts the next tokens, and how many; or why nobody does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.errors import ConfigError
from tandem.flags.engine_config import EngineConfig
from tandem.planner.attention_backend import own_kernels
from tandem.spec.drafts import DraftBlockShape
from tandem.spec.model_config import ModelConfig, why_alone
from tandem.spec.state import Fold, State

DEFAULT_DRAFT_TOKENS = 7  # with the token before them 8 rows: as many as are recorded on a CPU
DEFAULT_DRAFTS = 3  # of a draft layer: each costs a pass through it, and is likely only if those before it are
DEFAULT_BLOCK = 5  # of DSpark's layers, which make all at once
DRAFT_ALGORITHMS = ("NEXTN", "EAGLE", "DSPARK")
DEFAULT_LEAST_MATCH, DEFAULT_LONGEST_MATCH = 2, 16  # tokens
SPECULATION_FIELDS = (
    "speculative_draft_model_path", "speculative_num_steps", "speculative_num_draft_tokens", "speculative_eagle_topk",
    "speculative_moe_runner_backend", "speculative_ngram_min_match_window_size",
    "speculative_ngram_max_match_window_size", "disable_speculative_governor",
)  # fmt: skip
_ALGORITHM = ("speculative_algorithm",)
_DRAFT_FLAGS = (
    "speculative_draft_model_path", "speculative_eagle_topk", "speculative_moe_runner_backend",
)  # fmt: skip
_NGRAM_FLAGS = ("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size")


@dataclass(frozen=True, slots=True)
class SpeculationPlan:
    """most_draft_tokens: of a sequence in a step. governed: each step has as many as pay, else all there are. Matches
    are in tokens."""

    algorithm: str
    most_draft_tokens: int
    governed: bool = True
    least_match: int = DEFAULT_LEAST_MATCH
    longest_match: int = DEFAULT_LONGEST_MATCH


def check_algorithm(name: str) -> str:
    """As `EngineConfig` spells it. Raises ConfigError for one that is not there."""
    config = EngineConfig.from_keywords("demo", speculative_algorithm=name)
    assert config.speculative_algorithm is not None
    return config.speculative_algorithm


def speculation(config: EngineConfig, model: ModelConfig) -> SpeculationPlan | None:
    """None where no algorithm is asked for, or the model decodes one token a step. Raises ConfigError."""
    algorithm = config.speculative_algorithm
    if algorithm is None:
        return None
    most = _most_draft_tokens(config, model)
    least, longest = _match(config)
    if _why_none(algorithm, model):
        return None
    if algorithm in DRAFT_ALGORITHMS and model.drafts is None:
        raise ConfigError(_no_layer(algorithm), fields=_ALGORITHM)
    if algorithm == "DSPARK" and _block(model) is None:
        raise ConfigError(
            "--speculative-algorithm DSPARK: the checkpoint's draft layer drafts one token after the other; take "
            "NEXTN", fields=_ALGORITHM,
        )  # fmt: skip
    return SpeculationPlan(_taken_as(algorithm, model), most, not config.disable_speculative_governor, least, longest)


def drafting(config: EngineConfig, model: ModelConfig) -> ModelConfig:
    """With its draft layer, where one is asked for and can draft."""
    if config.speculative_algorithm not in DRAFT_ALGORITHMS or model.drafts is None or why_one_token(model):
        return model
    return replace(model, drafter=model.drafts)


def check_gpu_drafts(config: EngineConfig, model: ModelConfig) -> None:
    """Raises ConfigError where the kernels that are asked for cannot compute rows of draft tokens."""
    algorithm, kernels = config.speculative_algorithm, config.attention_backend
    if own_kernels(model.attentions):
        return
    if model.drafter is not None and kernels not in ("auto", "triton"):
        raise ConfigError(
            f"--attention-backend {kernels} plans its steps, and a draft layer's passes are none: leave it out, or "
            f"take --speculative-algorithm NGRAM instead of {algorithm}",
            fields=("attention_backend",),
        )


def _taken_as(algorithm: str, model: ModelConfig) -> str:
    if algorithm not in DRAFT_ALGORITHMS:
        return algorithm
    return "NEXTN" if _block(model) is None else "DSPARK"


def _block(model: ModelConfig) -> DraftBlockShape | None:
    return None if model.drafts is None else model.drafts.block


def _no_layer(algorithm: str) -> str:
    return (
        f"--speculative-algorithm {algorithm}: the checkpoint has no draft layer that is known; take NGRAM, which "
        "needs none, or leave it out"
    )


def _why_none(algorithm: str, model: ModelConfig) -> str:
    """Why nothing is drafted, though it is asked for."""
    if algorithm in DRAFT_ALGORITHMS and model.draft and model.drafts is None:
        return f"the checkpoint has {model.draft}, which Tandem does not run yet; NGRAM needs none"
    return why_one_token(model)


def most_draft_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Draft tokens of a sequence in a step, at most; 0 where nothing is drafted. Raises ConfigError."""
    plan = speculation(config, model)
    return 0 if plan is None else plan.most_draft_tokens


def speculation_texts(config: EngineConfig, model: ModelConfig) -> Iterator[tuple[str, str]]:
    """The plan's line on speculation, with its reason; none where no algorithm is asked for. Raises ConfigError."""
    if config.speculative_algorithm is None:
        return
    if why := _why_none(config.speculative_algorithm, model):
        yield "off", why
        return
    algorithm = _taken_as(config.speculative_algorithm, model)
    how = f"{algorithm}, up to {_most_draft_tokens(config, model)} draft tokens a step"
    always = config.disable_speculative_governor
    yield how, "--disable-speculative-governor: all of them" if always else "in each step as many as pay"


def why_one_token(model: ModelConfig) -> str:
    """Why rows of draft tokens are not possible; "": they are."""
    if reason := why_alone(model):
        return f"Transformers' own cache cannot forget rejected draft tokens: {reason}"
    if not all(map(_takes_back, model.states)):
        return "part of its state holds several tokens together, and rejected draft tokens could not be taken back"
    return ""


def _takes_back(state: State) -> bool:
    return not isinstance(state, Fold) or bool(state.inputs)


def speculation_notices(config: EngineConfig, model: ModelConfig) -> Iterator[str]:
    """Flags that change nothing, and why."""
    algorithm = config.speculative_algorithm
    if algorithm is None:
        for flag in config.given_flags(SPECULATION_FIELDS):
            yield f"{flag} changes nothing: no --speculative-algorithm is given"
    elif why := _why_none(algorithm, model):
        yield f"--speculative-algorithm {algorithm} changes nothing: {why}"
    elif algorithm in DRAFT_ALGORITHMS:
        yield from _draft_notices(algorithm, config, model)
    else:
        for flag in config.given_flags(_DRAFT_FLAGS):
            yield f"{flag} changes nothing: {algorithm} has no draft model"


def _draft_notices(algorithm: str, config: EngineConfig, model: ModelConfig) -> Iterator[str]:
    draft_algorithm, block = _taken_as(algorithm, model), _block(model)
    if algorithm != draft_algorithm:
        why = "the checkpoint's own draft layer drafts"
        yield f"--speculative-algorithm {algorithm} is taken as {draft_algorithm}: {why}"
    if block is not None and (most := _requested_draft_tokens(config) or 0) > block.size:
        yield f"{most} draft tokens a step are asked for: DSPARK makes {block.size} at once, and no more"
    for flag in config.given_flags(_NGRAM_FLAGS):
        yield f"{flag} changes nothing: {draft_algorithm} looks nothing up"


def _most_draft_tokens(config: EngineConfig, model: ModelConfig) -> int:
    limit, block = _requested_draft_tokens(config), _block(model)
    if config.speculative_algorithm in DRAFT_ALGORITHMS and block is not None:
        return min(limit or block.size, block.size)
    return limit or default_draft_tokens(config.speculative_algorithm)


def _requested_draft_tokens(config: EngineConfig) -> int | None:
    """`--speculative-num-draft-tokens` counts the newest token, too, as SGLang does. None: nothing is asked."""
    steps, rows = config.speculative_num_steps, config.speculative_num_draft_tokens
    if steps is not None and rows is not None and rows != steps + 1:
        raise ConfigError(
            f"--speculative-num-draft-tokens is {rows}, and --speculative-num-steps is {steps}; the first "
            f"counts the newest token, too, and so would be {steps + 1}: give one of the two",
            fields=("speculative_num_steps", "speculative_num_draft_tokens"),
        )
    return steps if steps is not None or rows is None else rows - 1


def default_draft_tokens(algorithm: str | None) -> int:
    """Draft tokens of a sequence in a step, where no number was asked for."""
    if algorithm == "DSPARK":
        return DEFAULT_BLOCK
    return DEFAULT_DRAFTS if algorithm in DRAFT_ALGORITHMS else DEFAULT_DRAFT_TOKENS


def _match(config: EngineConfig) -> tuple[int, int]:
    least = config.speculative_ngram_min_match_window_size
    longest = config.speculative_ngram_max_match_window_size
    if least > longest:
        raise ConfigError(
            f"--speculative-ngram-min-match-window-size is {least}, more than "
            f"--speculative-ngram-max-match-window-size {longest}",
            fields=("speculative_ngram_min_match_window_size", "speculative_ngram_max_match_window_size"),
        )
    return least, longest
