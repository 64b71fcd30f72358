"""`EngineConfig`: what the user asked for. The only source of flag names, help, defaults and availability.

Names are those of SGLang and KTransformers (`spec.md` of the project), so that commands people already type work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.errors import ConfigError
from tandem.flags import flags
from tandem.flags.flags import Flag, flag, secret

MODEL = "Model"
SERVER = "Server"
MEMORY = "Memory and batching"
CPU = "CPU experts"
GPU = "GPU experts"
HOSTS = "Several GPUs and hosts"
CUDA = "CUDA"
DRAFT = "Speculative decoding"
STATS = "Expert statistics"

_MEAN_NOTHING = {
    ("chunked_prefill_size", 0): "give a number of tokens, or -1 for whole prompts",
    ("expert_distribution_recorder_buffer_size", 0): "give a number of steps, or -1 for all",
    ("sleep_idle_seconds", 0): "give seconds, or -1 for an engine that stays",
}  # fmt: skip
_ONE_PROCESS = "Use 1: one engine process serves the model."


FORMER = {"spared_multiprocessors": "prefill_reserved_sms"}
"""Fields by their names of the last release, which this one takes, too."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Every flag as a field of the same name in snake case. Immutable; a wrong value raises ConfigError at once.

    Build it with `from_args` (a command line), `from_keywords` (aliases allowed, as `tandem.LLM` does) or directly.
    """

    # --- model
    model: str = flag(
        "", "Directory, GGUF file, name of the hub, or `demo`.", group=MODEL, aliases=["--model-path"], essential=True
    )
    models: str | None = flag(
        None, "Directory or TOML file of models, which are loaded on demand.", group=MODEL
    )
    served_model_name: str | None = flag(
        None, "Name in the API; default: the directory's name.", group=MODEL, essential=True
    )
    dtype: str = flag(
        "auto", "Activations, KV cache and dense weights.", group=MODEL,
        choices=["auto", "bfloat16", "float32"], essential=True,
    )  # fmt: skip
    context_length: int | None = flag(
        None, "Longest prompt + answer, tokens; default: the model's.", group=MODEL, minimum=1, essential=True
    )
    disable_vision: bool = flag(False, "Load nothing that reads images: text alone is served.", group=MODEL)
    packed_cache: str | None = flag(
        None, "Directory that keeps packed weights for the next start.", group=MODEL, essential=True
    )
    trust_remote_code: bool = flag(
        False, "Accepted for compatibility.", group=MODEL,
        neutral=[True], idle="no code from a checkpoint is ever run",
    )  # fmt: skip
    chat_template: str | None = flag(
        None, "Jinja chat template, a file or text; default: the model's.", group=MODEL
    )
    reasoning_parser: str | None = flag(
        None, "Form of the reasoning, or none; default: the template's.", group=MODEL
    )
    tool_call_parser: str | None = flag(
        None, "Form of tool calls, or none; default: the template's.", group=MODEL
    )
    image_max_tokens: int | None = flag(
        None, "Most tokens of an image; default: 4096, without a GPU 1024.", group=MODEL, minimum=256, maximum=16384
    )

    # --- server
    host: str = flag("127.0.0.1", "Address to listen on.", group=SERVER, essential=True)
    port: int = flag(
        30000, "Port to listen on; 0: any free one.", group=SERVER, minimum=0, maximum=65535, essential=True
    )
    uds: str | None = flag(None, "Unix socket to listen on, instead of host and port.", group=SERVER)
    api_key: str | None = secret(flag(None, "Key that clients must send.", group=SERVER, essential=True))
    api_key_file: str | None = flag(
        None, "File with that key; default: $TANDEM_API_KEY, if it is set.", group=SERVER
    )
    allowed_origins: tuple[str, ...] | None = flag(
        None, "Web pages that may use the server (CORS), or `*`; default: its own.", group=SERVER
    )
    allowed_hosts: tuple[str, ...] | None = flag(
        None, "Names by which the server may be called, `*.example.com` too.", group=SERVER
    )
    request_timeout: float | None = flag(
        None, "Most seconds from a request to the end of its answer.", group=SERVER, minimum=0.1
    )
    max_queued_requests: int | None = flag(
        None, "Answers that may wait for a place; more get status 429.", group=SERVER, minimum=0
    )
    max_queued_bytes: int | None = flag(
        None, "Bytes of all requests in progress; more get status 503.", group=SERVER, minimum=1
    )
    sleep_idle_seconds: float | None = flag(
        None, "Idle seconds until its memory is given back.", group=SERVER, minimum=-1.0,
        essential=True,
    )  # fmt: skip
    shutdown_timeout: float = flag(
        60.0, "Seconds that running requests have to finish after SIGTERM.", group=SERVER, minimum=0.0
    )
    incremental_streaming_output: bool = flag(
        False, "Events of /generate have only what is new.", group=SERVER, aliases=["--stream-output"]
    )
    watchdog_timeout: float = flag(
        300.0, "Seconds after which a step that hangs counts as dead.", group=SERVER, minimum=5.0
    )
    skip_server_warmup: bool = flag(
        False, "Start without the first request that the server sends itself.", group=SERVER
    )
    sampling_defaults: str = flag(
        "model", "Whose temperature etc. fill the gaps of a request.", group=SERVER,
        choices=["model", "openai"],
    )  # fmt: skip
    otlp_traces_endpoint: str | None = flag(
        None, "URL that OpenTelemetry spans of requests are sent to.", group=SERVER
    )
    log_level: str = flag(
        "info", "How much the server logs.", group=SERVER, choices=["debug", "info", "warning", "error"]
    )

    # --- memory and batching
    mem_fraction_static: float | None = flag(
        None, "Share of free memory for weights + KV cache (0–1).", group=MEMORY, minimum=0.01, maximum=0.99
    )
    max_total_tokens: int | None = flag(
        None, "KV cache size in tokens; default: from free memory.", group=MEMORY, minimum=1, essential=True
    )
    kv_cache_dtype: str = flag(
        "auto", "Keys and values in the cache; fp8_e4m3 is lossy and needs a GPU.", group=MEMORY,
        choices=["auto", "bf16", "bfloat16", "fp8_e4m3"],
    )  # fmt: skip
    page_size: int = flag(16, "Tokens per KV page.", group=MEMORY, minimum=1, maximum=4096)
    max_running_requests: int | None = flag(
        None, "Sequences decoded together.", group=MEMORY, minimum=1, essential=True
    )
    chunked_prefill_size: int | None = flag(
        None,
        "Most tokens in a step, decode too; -1: whole prompts.",
        group=MEMORY,
        minimum=-1,
        essential=True,
    )
    max_prefill_tokens: int | None = flag(
        None, "Upper bound on --chunked-prefill-size.", group=MEMORY, minimum=1
    )
    enable_mixed_chunk: bool = flag(
        False, "Accepted for compatibility.", group=MEMORY,
        neutral=[True], idle="prefill chunks and decode always share steps",
    )  # fmt: skip
    disable_radix_cache: bool = flag(
        False, "Do not reuse the KV pages of equal prefixes.", group=MEMORY, essential=True
    )
    enable_deterministic_inference: bool = flag(
        False, "An answer has the same bits alone and in any batch; slower.", group=MEMORY
    )
    attention_backend: str = flag(
        "auto", "Attention kernels on a GPU; torch needs pages of 256 tokens.", group=MEMORY,
        choices=["auto", "triton", "torch", "torch_native", "flashinfer"],
    )  # fmt: skip

    # --- CPU experts
    kt_weight_path: str | None = flag(
        None, "Directory or GGUF file with the experts; default: the model's.", group=CPU,
        aliases=["--kt-amx-weight-path"],
    )  # fmt: skip
    kt_method: str | None = flag(
        None, "Expert format: BF16, INT8, INT4, …; default: the checkpoint's.", group=CPU,
        aliases=["--kt-amx-method"], essential=True,
        choices=[
            "BF16", "INT8", "INT4", "AMXINT8", "AMXINT4", "FP8", "FP8_PERCHANNEL", "RAWINT4", "GPTQ_INT4", "AWQ",
            "MXFP4", "NVFP4", "GGUF",
        ],
    )  # fmt: skip
    kt_cpuinfer: int | None = flag(
        None, "CPU worker threads; default: physical cores available.", group=CPU, minimum=1, essential=True
    )
    kt_threadpool_count: int | None = flag(
        None, "Parts to divide weights into; default: one per NUMA node used.", group=CPU, minimum=1
    )
    kt_numa_nodes: tuple[int, ...] | None = flag(
        None, "NUMA nodes whose cores are used; default: all.", group=CPU, minimum=0
    )
    kernel_tier: str = flag(
        "auto", "Instruction set of the CPU kernels.", group=CPU,
        choices=["auto", "scalar", "avx2", "avx512", "avx512_bf16", "amx"],
    )  # fmt: skip
    disable_shared_experts_fusion: bool = flag(
        False, "Compute shared experts apart from the routed ones.", group=CPU
    )
    kt_int8_activations: bool = flag(
        False, "Faster, lossy: activations of CPU experts are rounded to int8.", group=CPU
    )
    map_experts: str = flag(
        "auto", "Use bf16 experts in the file's pages; auto: in memory, if tight.",
        group=CPU, choices=("auto", "always", "never"),
    )  # fmt: skip
    tables: str = flag(
        "auto", "Where tables of n-grams are read: memory, files, or the disk itself.",
        group=CPU, choices=("auto", "ram", "map", "disk"),
    )  # fmt: skip
    kt_max_deferred_experts_per_token: int | None = flag(
        None, "Most CPU experts of a token that are added one layer late (lossy).", group=GPU, minimum=0
    )

    # --- GPU
    device: str = flag(
        "auto",
        "Where attention and dense layers run.",
        group=GPU,
        choices=["auto", "cuda", "cpu"],
        essential=True,
    )
    kt_num_gpu_experts: int | None = flag(
        None, "GPU experts per MoE layer; default: what fits.", group=GPU, minimum=0, essential=True
    )
    kt_gpu_experts_ratio: float | None = flag(
        None, "Share of all experts on the GPU, 0 to 1; beats the former.",
        group=GPU, minimum=0.0, maximum=1.0, essential=True,
    )  # fmt: skip
    kt_expert_placement_strategy: str = flag(
        "uniform", "Which experts go to the GPU.", group=GPU,
        choices=["uniform", "frequency", "front-loading", "random"],
    )  # fmt: skip
    kt_enable_dynamic_expert_update: bool = flag(
        False, "Experts move to the GPU, and back, as used; default: where it pays.", group=GPU
    )
    disable_dynamic_expert_update: bool = flag(False, "Experts stay where they are.", group=GPU)
    disable_expert_foresight: bool = flag(
        False, "Fetch no expert weights before they are asked for.", group=GPU
    )
    kt_gpu_prefill_token_threshold: int | None = flag(
        None, "Rows from which a step brings the CPU's experts; 0: never.", group=GPU, minimum=0
    )  # fmt: skip
    prefill_reserved_sms: int = flag(
        0, "Multiprocessors (SMs) that prompts leave to those who decode.", group=GPU, minimum=0
    )

    # --- several GPUs and hosts
    tensor_parallel_size: int = flag(
        1, "GPUs that share the model, a process each; default: the plan chooses.", group=HOSTS,
        aliases=["--tp", "--tp-size"], minimum=1,
    )  # fmt: skip
    pipeline_parallel_size: int = flag(
        1, "GPUs that each have some of the layers; they may be unequal.", group=HOSTS, aliases=["--pp", "--pp-size"],
        minimum=1,
    )  # fmt: skip
    nnodes: int = flag(
        1, "Hosts that share the model.", group=HOSTS, minimum=1, later=_ONE_PROCESS,
        neutral=[1], idle="one host serves the model",
    )  # fmt: skip
    node_rank: int = flag(
        0, "This host's number.", group=HOSTS, minimum=0, later="Use 0: one host serves the model.",
        neutral=[0], idle="one host serves the model",
    )  # fmt: skip
    dist_init_addr: str | None = flag(
        None, "Address of host 0.", group=HOSTS,
        neutral=lambda value: value is not None, idle="one host serves the model",
    )  # fmt: skip

    # --- CUDA
    disable_cuda_graph: bool = flag(False, "Run without CUDA graphs.", group=CUDA)
    cuda_graph_bs: tuple[int, ...] | None = flag(None, "Batch sizes to capture.", group=CUDA, minimum=1)
    cuda_graph_max_bs: int | None = flag(None, "Largest batch size to capture.", group=CUDA, minimum=1)

    # --- speculative decoding
    speculative_algorithm: str | None = flag(
        None, "Who drafts: NGRAM the text itself, NEXTN the draft layer.", group=DRAFT,
        choices=["NGRAM", "NEXTN", "EAGLE", "DSPARK"],
    )  # fmt: skip
    speculative_draft_model_path: str | None = flag(
        None, "Directory of a draft layer; default: the checkpoint's own.", group=DRAFT
    )
    speculative_num_steps: int | None = flag(
        None, "Most draft tokens of one in a step; default: 7, NEXTN: 3, DSPARK: 5.", group=DRAFT, minimum=1,
        maximum=63,
    )  # fmt: skip
    speculative_eagle_topk: int | None = flag(
        None, "Branches per draft step.", group=DRAFT, minimum=1, later="Use 1: drafts are a chain.", neutral=[1]
    )
    speculative_num_draft_tokens: int | None = flag(
        None, "The same and one more: rows of a sequence in a step.", group=DRAFT, minimum=2, maximum=64
    )
    speculative_moe_runner_backend: str | None = flag(
        None, "Expert kernels of the draft.", group=DRAFT, later="Use auto: they are the model's.", neutral=["auto"]
    )
    speculative_ngram_min_match_window_size: int = flag(
        2, "Fewest tokens that NGRAM finds again.", group=DRAFT, minimum=1, maximum=64
    )
    speculative_ngram_max_match_window_size: int = flag(
        16, "Most tokens that it compares.", group=DRAFT, minimum=1, maximum=64
    )
    disable_speculative_governor: bool = flag(
        False, "Always use all draft tokens, even if they cost more.", group=DRAFT
    )

    # --- expert statistics
    init_expert_location: str = flag(
        "trivial", "Activation statistics (.pt) that place the experts.", group=STATS
    )
    expert_distribution_recorder_mode: str | None = flag(
        None, "What is recorded: sums (default), steps or tokens.", group=STATS,
        choices=["stat", "stat_approx", "per_pass", "per_token"],
    )  # fmt: skip
    expert_distribution_recorder_buffer_size: int = flag(
        1000, "Steps that per_pass and per_token keep; -1: all.", group=STATS, minimum=-1,
    )  # fmt: skip
    expert_distribution_recorder_dir: str | None = flag(
        None, "Directory of the files; default: the temporary one.", group=STATS
    )
    record_kt_gpu_expert_distribution: bool = flag(
        False, "Record which experts were on the GPU, too.", group=STATS
    )
    enable_expert_distribution_metrics: bool = flag(
        False,
        "Accepted for compatibility.",
        group=STATS,
        neutral=[True],
        idle="/metrics always counts experts",
    )

    explicit: frozenset[str] = field(default=frozenset(), repr=False, compare=False)  # fields named by the user
    former: tuple[str, ...] = field(default=(), repr=False, compare=False)  # of `FORMER`, those that were named so
    way_chosen: bool = field(default=False, repr=False, compare=False)  # over how many GPUs: by a plan, not the user

    def __post_init__(self) -> None:
        checked, reasons = flags.checked(FLAGS, {f.name: getattr(self, f.name) for f in FLAGS}, _MEAN_NOTHING)
        if reasons:
            raise ConfigError(*reasons)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_args(cls, argv: Sequence[str]) -> EngineConfig:
        """From a command line: flags and one optional positional MODEL. Raises ConfigError with every reason."""
        config, reasons = cls.possible(argv)
        if config is None or reasons:
            raise ConfigError(*reasons)
        return config

    @classmethod
    def possible(cls, argv: Sequence[str]) -> tuple[EngineConfig | None, tuple[str, ...]]:
        """Configuration of the flags of a command line that can be met, and reasons for all others; None where no model
        is named."""
        argv, former = flags.with_new_names(argv, FORMER)
        words, reasons = flags.parse(FLAGS, argv)
        fields, refused = flags.checked(FLAGS, words, _MEAN_NOTHING)
        reasons += refused
        if fields.get("model") and fields.get("models"):
            reasons += ["MODEL and --models are both given: give one"]
        if not fields.get("model") and not fields.get("models"):
            return None, ("no model is named; try `kt serve demo`, or --model DIRECTORY", *reasons)
        return cls(**fields, explicit=frozenset(fields), former=tuple(former)), tuple(reasons)

    def without(self, fields: Iterable[str]) -> EngineConfig:
        """The same, with these as if they had not been given."""
        left_out = {f.name: f.default for f in FLAGS if f.name in set(fields) and f.name != "model"}
        return dataclasses.replace(self, **left_out, explicit=self.explicit - set(left_out))

    @classmethod
    def from_keywords(cls, model: str, **keywords: Any) -> EngineConfig:
        """From Python keywords, aliases included (`tp=1`, `kt_amx_method="INT4"`). Raises ConfigError."""
        fields = flags.rename_keywords(FLAGS, keywords, FORMER)
        former = tuple(name for name in FORMER if name in keywords)
        return cls(model=str(model), **fields, explicit=frozenset(fields), former=former)

    def given_flags(self, names: Sequence[str]) -> list[str]:
        """Spellings of those of these fields that the user named or changed."""
        return [f.spellings[0] for f in FLAGS if f.name in names and self._is_given(f)]

    def notices(self) -> list[str]:
        """One line per given flag that changes nothing, or has its former name; start-up prints them."""
        lines = (flags.notice(f, getattr(self, f.name)) for f in FLAGS if self._is_given(f))
        return [*map(_former_notice, self.former), *(line for line in lines if line)]

    def _is_given(self, f: Flag) -> bool:
        return f.name in self.explicit or getattr(self, f.name) != f.default


def _former_notice(name: str) -> str:
    old, new = ("--" + each.replace("_", "-") for each in (name, FORMER[name]))
    return f"{old} is now {new}; the next release no longer takes the old name"


FLAGS: tuple[Flag, ...] = flags.flags_of(EngineConfig)
