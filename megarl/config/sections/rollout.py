"""Recipe section `rollout`: engines, sampling, environments, the endpoint, asynchrony."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.annotations import Decides, OnlyIf, UntriedOnGpu
from megarl.config.conditions import (
    AGENT,
    COLOCATED,
    COMMAND,
    CONTAINER,
    IN_PROCESSES,
    LAYERED,
    NOT_AGENT,
    NOT_COMMAND,
    NOT_SINGLE_TURN,
    PACED,
    PARK,
    RL,
    SEPARATE,
    STALE,
    instead_of,
)
from megarl.config.section import Section
from megarl.config.sections.sampling import SamplingConfig

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses of this machine that other machines cannot reach."""

ANY_ADDRESS = ("0.0.0.0", "::")
"""Addresses of all interfaces of a machine: a server can listen on them, but no client can connect to them."""

MIN_TOKEN_CHARACTERS = 16
"""Minimum length of a token on a public address. 16 random letters and digits have 95 bits, too many to guess."""

MODEL_LAYERS = "mtp"
"""vLLM's method that drafts tokens with the multi-token prediction layers (MTP) of the policy's checkpoint."""


class EndpointConfig(Section):
    """OpenAI-compatible server from which agent programs sample."""

    host: str = "127.0.0.1"
    """Address on which the endpoint listens. Any address except loopback requires a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port on which the endpoint listens. 0 (default): any free port."""
    token: str | None = None
    """Secret token for clients other than the agent programs, written as ${oc.env:NAME}. Each agent program gets its
    own secret. Required if `host` is not a loopback address, with at least 16 characters."""
    max_connections: PositiveInt = 1000
    """Maximum number of client connections to the endpoint. A further connection gets status 503."""
    metrics: bool = False
    """Serve /metrics (Prometheus) and /health at the endpoint too, for clients with the token. Default: false."""
    hold_seconds: PositiveFloat = 540.0
    """Maximum seconds that a request waits for its completion while engines are busy or being updated. Then the client
    gets status 503, and its retry waits for the same completion. Default: 540; OpenAI's clients wait for 600 seconds.
    """

    @model_validator(mode="after")
    def _require_token(self) -> Self:
        """Require a token on an address that other machines can reach."""
        if self.host not in LOOPBACK and len(self.token or "") < MIN_TOKEN_CHARACTERS:
            raise PydanticCustomError(
                "endpoint",
                "host is not a loopback address: rollout.endpoint.token needs at least {least} characters",
                {"least": MIN_TOKEN_CHARACTERS},
            )
        return self


class AgentConfig(Section):
    """Agent program of the environment `command`. It runs once per attempt."""

    command: Annotated[tuple[str, ...], OnlyIf(COMMAND)] = ()
    """Command of the agent program: a list of program and arguments, run once per attempt without a shell. It gets the
    problem as JSON on standard input. Its clients find the policy by OPENAI_BASE_URL with OPENAI_API_KEY, or
    ANTHROPIC_BASE_URL with ANTHROPIC_AUTH_TOKEN. See megarl/environments/README.md."""
    timeout_seconds: PositiveFloat = 600.0
    """Maximum seconds of an agent program per attempt, without the engines' pauses for an update (rollout.stragglers).
    Then the program and its children are killed, and the attempt ends with an error."""
    max_processes: PositiveInt = 64
    """Maximum number of agent programs running at once, on all nodes together (nodes). The containers of four more
    attempts start in advance."""
    credit: Literal["attempt", "final_segment", "by_turn"] = "attempt"
    """Answers trained by an attempt's reward. attempt (default): all answers with one advantage, also of sub-agents and
    summaries. final_segment: only the sequence with the main agent's last answer. by_turn: the program rewards single
    answers; needs algorithm.turn_discount or advantage gae. See megarl/environments/README.md."""
    untrained_kinds: tuple[str, ...] = ()
    """Kinds of requests whose answers are not trained, for example title (requests for a chat's title). Clients write
    a request's kind into the header x-megarl-kind. Codex writes turn or compaction into its metadata. Metric:
    environment/untrained_tokens."""
    sandbox: Annotated[Literal["process", "sandbox", "podman", "docker", "apptainer"], OnlyIf(COMMAND)] = "process"
    """Container of each attempt. process (default): none, the program sees the machine. sandbox: Linux namespaces,
    without daemon or image. podman, docker, apptainer: a container of that program. See
    megarl/sandbox/containers/README.md."""
    image: Annotated[str | None, OnlyIf(COMMAND, CONTAINER)] = None
    """Image of the container. sandbox: a folder with an unpacked image, which stays unchanged; default: the machine's
    system folders and megarl's Python, read-only. podman, docker: a name on each node, required. apptainer: a file or
    folder. Nothing is downloaded."""
    folders: Annotated[tuple[str, ...], OnlyIf(COMMAND, CONTAINER)] = ()
    """Folders of the machine shown read-only at the same place in the container, for example the program's folder.
    Absolute paths; not /tmp as a whole, because it has the sockets of other containers."""
    network: Annotated[Literal["endpoint", "host"] | None, OnlyIf(COMMAND, CONTAINER)] = None
    """Network of the program. endpoint (default in a container): it can reach only the endpoint. host: the machine's
    network, which programs with sandbox process always have."""
    nodes: Annotated[Literal["driver", "all"], OnlyIf(COMMAND)] = "driver"
    """Machines that run the programs. driver (default): the driver's. all: every node of the job, by free memory;
    rollout.endpoint.host must then be an address that nodes can reach, for example 0.0.0.0."""
    outlive_seconds: Annotated[PositiveFloat | None, OnlyIf(COMMAND)] = None
    """Seconds for which programs stay alive after a killed driver. A run resumed within this time continues with them.
    Needs a fixed rollout.endpoint.port and cluster.launcher local. Default: programs end with the driver. See
    megarl/sandbox/containers/README.md."""
    processes: Annotated[PositiveInt | None, OnlyIf(COMMAND)] = None
    """Maximum number of processes and threads of an attempt. Above it, the program ends with ProcessLimit. Default:
    none."""
    memory_gib: Annotated[PositiveFloat | None, OnlyIf(COMMAND)] = None
    """Maximum memory of an attempt's programs together, in GiB, without new files. Above it, the program ends with
    MemoryLimit. An attempt waits for a node with this memory and disk_gib free. Default: none."""
    sampled_tokens: PositiveInt | None = None
    """Maximum number of tokens sampled in all calls of an attempt together. The next call is refused, and the attempt
    ends with TokenLimit. Parallel calls count when they end, so together they may exceed the limit. Default: none."""
    disk_gib: Annotated[PositiveFloat | None, OnlyIf(COMMAND, LAYERED)] = None
    """Maximum size of an attempt's new files in GiB. They are in memory, which an attempt reserves before it starts. A
    program that fills it ends with DiskLimit. Default: 4."""
    output_mib: Annotated[PositiveInt | None, OnlyIf(COMMAND)] = None
    """Maximum output of a program in MiB. A program that prints more ends with OutputLimit. Default: none; the last 64
    KiB are kept."""
    environment: Annotated[tuple[str, ...], OnlyIf(COMMAND)] = ()
    """Names of environment variables passed on to the agent program, for example a search service's key. PATH, HOME,
    locale and Python variables are always passed. Keys of megarl, trackers, judges and hubs are refused."""

    @property
    def reach(self) -> Literal["endpoint", "host"]:
        return self.network or ("host" if self.sandbox == "process" else "endpoint")

    @property
    def has_layer(self) -> bool:
        return self.sandbox in ("sandbox", "apptainer")

    @property
    def images_are_files(self) -> bool:
        """Whether `image` is a path, not a name in a container program's store."""
        return self.sandbox in ("sandbox", "apptainer")


class BudgetConfig(Section):
    """Limits of one multi-turn attempt, in addition to `rollout.max_turns`."""

    sampled_tokens: PositiveInt | None = None
    """Maximum number of tokens sampled by the policy in all turns of an attempt together. At the limit the attempt ends
    with reason `length`. Default: none, except the maximum tokens of an attempt (see rollout.max_turns)."""
    tool_calls: PositiveInt | None = None
    """Maximum number of tool calls in an attempt. A turn with more calls ends the attempt with reason `calls`. Default:
    none."""
    invalid_calls: PositiveInt = 8
    """Maximum number of consecutive invalid tool calls (unreadable, unknown tool or wrong arguments). The policy gets
    an error message for each; at the limit the attempt ends with reason `invalid_calls`. A call cut by its turn's
    length limit does not count. Default: 8."""
    reply_tokens: Annotated[int, Field(ge=64)] | None = None
    """Maximum number of tokens of a tool's reply, at least 64. A note with the number of omitted tokens replaces the
    middle of a longer reply. Default: only the environment's own limit in characters. Metric: tools/shortened."""
    step_seconds: PositiveFloat | None = 600.0
    """Maximum seconds of the environment to begin an attempt or to answer a turn. Above it, the attempt ends with an
    error and no reward. null: no limit. Metric: rollout/errors/Timeout."""
    seconds: PositiveFloat | None = None
    """Maximum wall-clock seconds of an attempt, with waiting for engines, without pauses for an update
    (rollout.stragglers). At the limit the attempt ends with reason `seconds` and is scored as it is. Runs are then not
    exactly reproducible. Default: none."""
    attempts: PositiveInt = 1
    """Maximum number of starts of one attempt. It starts again if its environment raises EnvironmentUnavailableError,
    for errors not caused by the policy. Default: 1, no retry. Metric: rollout/restarted."""


class RolloutConfig(Section):
    """Engines, sampling, environments and asynchrony."""

    placement: Literal["colocated", "separate"] = "colocated"
    """Placement of the engines. colocated (default): engines and trainer share ranks and alternate. separate: engines
    own `rollout.ranks` ranks and stay in memory; each replica is a separate process group, and receives weights shard
    by shard."""
    ranks: Annotated[PositiveInt | None, OnlyIf(SEPARATE)] = None
    """Number of ranks used for sampling only (placement separate): the last of the cluster.nodes *
    cluster.ranks_per_node ranks. All others train. Default: the ranks of cluster.groups.engines."""
    tp: Annotated[PositiveInt, Decides(vllm="tensor_parallel_size")] = 1
    """Tensor-parallel size of each vLLM engine. The number of engine replicas is the number of ranks / tp."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of training rollouts (evaluations: evaluation.sampling)."""
    max_concurrent_requests: Annotated[PositiveInt, Decides(vllm="max_num_seqs")] = 256
    """Maximum number of requests decoded at once by one engine (vLLM's max_num_seqs)."""
    # vLLM 0.30 has no async scheduling on CPUs or with a drafter on the host (vllm.speculative_config). With top_p,
    # top_k or min_p the older model runner records the kept tokens, and that undoes the gain. A call of the engine ends
    # only after all started steps are read: weight versions stay right and tokens are equal up to rounding. The
    # rounding then depends on when calls end, so false is needed for a bit-equal resume of single turns. A completion
    # ending before its limit costs one more token, which is dropped.
    async_scheduling: Annotated[bool | None, Decides(vllm="async_scheduling")] = None
    """Let vLLM start a step before the previous step's tokens have arrived on the host, so that the GPU does not wait.
    Default: on where vLLM supports it; off with top_p, top_k or min_p under vLLM's older model runner. true: an error
    without this support. Metric: perf/steps_ahead."""
    # A resumed run is bit-equal in float32 if its loss reads no engine log-probs (algorithm.old_logprobs trainer, no
    # importance_sampling). Otherwise all requests of a step must fit in the engines at once, with async_scheduling off:
    # an engine's rounding depends on the requests decoded together. Base classes for your environment:
    # megarl.environments.Environment, megarl.environments.tools.ToolEnvironment. For interact see
    # megarl.environments.interact.
    environment: str = "single_turn"
    """Environment: single_turn (default), calculator, search, python, countdown, guess_number, mastermind,
    reasoning_gym, gem, openenv, verifiers, harbor or command (your agent program). For your own: package.module:Class,
    path/to/file.py:Class, or path/to/file.py:interact (a function as in RL2). See megarl/environments/README.md."""
    environment_kwargs: Annotated[dict[str, JsonValue], OnlyIf(NOT_SINGLE_TURN, NOT_COMMAND)] = Field(
        default_factory=dict
    )
    """Keyword arguments of the constructor of the environment's class."""
    # A process can be killed when its attempt hangs; code in the driver cannot.
    environment_processes: Annotated[NonNegativeInt | None, OnlyIf(NOT_SINGLE_TURN, NOT_COMMAND)] = None
    """Number of processes that run the environment, each with one attempt at a time. 0: attempts run in the driver.
    Under Ray the processes are on all nodes. Default: 0 if the environment's code is all `async def`, else 4 per CPU of
    the driver's machine, at most 64. Metric: environment/process_killed."""
    environment_memory_gib: Annotated[PositiveFloat, OnlyIf(NOT_SINGLE_TURN, NOT_COMMAND, IN_PROCESSES)] = 4.0
    """Memory limit of each environment process, in GiB of address space."""
    tool_parser: Annotated[
        Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "glm45", "deepseek_v3", "gpt_oss"]
        | None,
        OnlyIf(NOT_SINGLE_TURN),
    ] = None
    """Format of the policy's tool calls, for environments with tools. Default: recognised from the chat template, where
    possible. See megarl/data/tools/calls.py."""
    agent: Annotated[AgentConfig, OnlyIf(AGENT)] = AgentConfig()
    """Agent program run by the environment `command`: one process per attempt."""
    endpoint: Annotated[EndpointConfig, OnlyIf(AGENT)] = EndpointConfig()
    """OpenAI-compatible server through which the agent program (rollout.agent) samples from the policy."""
    max_turns: Annotated[PositiveInt, OnlyIf(NOT_SINGLE_TURN)] = 16
    """Maximum number of turns in one attempt; a turn is one completion of the policy. All tokens of an attempt together
    must fit in data.max_prompt_tokens + rollout.sampling.max_new_tokens."""
    truncated_turn: Annotated[Literal["end", "close"], OnlyIf(NOT_SINGLE_TURN, NOT_AGENT)] = "end"
    """Action after a completion cut at its length limit, if the attempt may have more tokens. end (default): end the
    attempt. close: add the end-of-turn token, untrained, and continue the attempt."""
    history: Annotated[Literal["append", "render", "refuse"], OnlyIf(NOT_SINGLE_TURN, NOT_AGENT)] = "append"
    """Prompt of a later turn if the chat template changes earlier turns (removes thoughts, for example). append
    (default): keep the earlier tokens. render: render all messages again; each changed history becomes a separate
    training sequence. refuse: the run does not start. The start reports such a template."""
    budget: Annotated[BudgetConfig, OnlyIf(NOT_SINGLE_TURN, NOT_AGENT)] = BudgetConfig()
    """Limits of a multi-turn attempt: its tokens, its tool calls, its seconds, and how often it may begin."""
    # park is partial rollouts: requests pause with their tokens while the engines sleep, and environments continue
    # meanwhile. The pauses depend on the clock, so two runs differ; a checkpoint contains all paused groups. A resumed
    # attempt replays its turns. If its environment then differs from the recorded one, the attempt starts again
    # (rollout/restarted).
    stragglers: Annotated[Literal["wait", "park", "abort"], OnlyIf(RL, COLOCATED)] = "wait"
    """Treatment of incomplete groups once train.prompts_per_step groups are complete (algorithm.oversampling starts
    more). wait (default): wait for them. park: pause them, and continue after the update with the tokens so far;
    also set an importance correction (see rollout.max_staleness). abort: drop them; this favours short answers."""
    # Step n trains weights of version n, whether or not engines ever received them. Placement separate: engines sample
    # ahead during updates. Groups start in the order they were drawn, and only if they can be trained within the limit.
    # park with 1: a step waits for groups at the limit. A run resumed with a lower limit drops older groups.
    # A limit above 0 with an explicit algorithm.importance_sampling none is accepted with a warning.
    max_staleness: Annotated[NonNegativeInt | None, OnlyIf(RL, STALE)] = None
    """Maximum staleness of a trained group: number of steps since the weights that sampled its oldest token. Default: 1
    with rollout.stragglers park, else 0 (synchronous). Above 0, set algorithm.importance_sampling, or
    algorithm.old_logprobs rollout with a clipping policy loss. Metric: staleness/dropped."""
    sync_every: Annotated[PositiveInt, OnlyIf(RL, SEPARATE)] = 1
    """Copy weights to the engines only every n steps (placement separate). Between copies, samples are up to n - 1
    steps older, so rollout.max_staleness must be at least n - 1. Evaluations and the first step of a resumed run always
    get new weights."""
    # With a retained cache, new weights read old keys and values. The recorded log-probs are those of the draw, but no
    # weight version alone gives them: they differ from the trainer's by more than rounding. Corrections and weight
    # versions of tokens do not change, and later requests never share the retained cache. A checkpoint has no tokens of
    # an unfinished completion. A resume samples the completion again, as other replicas do when its engine is lost.
    recompute_kv: Annotated[bool, OnlyIf(RL, PACED), UntriedOnGpu("false")] = True
    """Recompute the KV cache of requests interrupted by a weight update (placement separate, sampling ahead). Default:
    true. false: keep the cache; this saves a prefill, but log-probs drift from the trainer's (logprob_gap/mean/age_0).
    """
    on_stale: Annotated[Literal["wait", "drop"], OnlyIf(RL, PARK)] = "wait"
    """Action for an incomplete group at the limit rollout.max_staleness (stragglers park). wait (default): the step
    waits for it. drop: drop it and draw another prompt; long answers are then trained less (metric staleness/dropped).
    """
    kv_cache_gib: Annotated[
        PositiveFloat,
        OnlyIf(instead_of("rollout.gpu_memory_utilization")),
        Decides(vllm="kv_cache_memory_bytes num_gpu_blocks_override"),
    ] = 1.0
    """Size of one rank's KV cache in GiB. Default on GPUs: the memory left by `megarl plan`'s prediction, minus 8 GiB;
    on CPUs: 1. The run folder's config.yaml records the value; a resumed run keeps it."""
    gpu_memory_utilization: Annotated[
        Annotated[float, Field(gt=0.0, le=1.0)] | None, Decides(vllm="gpu_memory_utilization")
    ] = None
    """Share of a GPU's memory for the engine's weights, activations and KV cache together, as in vLLM. Set this or
    kv_cache_gib, not both. Trainer states outside trainer.offload must fit in the remaining memory."""
    # Embeddings, head, norms, routers and biases stay in model.dtype. A reshard moves bfloat16 weights, and each rank
    # quantises its part. The result equals vLLM's for the exported model. See also the metrics logprob_gap/ess, and
    # importance/clipped_share for the effect of a correction (tis; icepop for experts).
    quantization: Annotated[
        Literal["none", "fp8", "fp8_per_channel"],
        UntriedOnGpu("fp8, fp8_per_channel"),
        Decides(vllm="quantization quantization_config allow_deprecated_quantization"),
    ] = "none"
    """FP8 (e4m3) weights in the engines' linear layers and experts. Default: none. fp8: one scale per 128 x 128 block.
    fp8_per_channel: one scale per output channel. Needs model.dtype bfloat16. Log-probs then differ from the trainer's:
    set algorithm.importance_sampling, and limit the difference by train.max_logprob_gap."""
    kv_cache_dtype: Annotated[
        Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"],
        UntriedOnGpu("fp8, fp8_e4m3, fp8_e5m2"),
        Decides(vllm="kv_cache_dtype"),
    ] = "auto"
    """Data type of the KV cache. auto (default): the model's. fp8 (= fp8_e4m3) or fp8_e5m2: FP8 with scale 1; twice as
    many tokens fit, and the metrics logprob_gap/ increase."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further fields of vLLM's EngineArgs, by vLLM's names. Fields that need another executor, or keep state of old
    weights, are refused. speculative_config: a drafter without weights (method ngram, suffix, custom_class; on GPUs
    ngram_gpu), trained MTP layers (mtp), or a published drafter (eagle3). Metric: perf/accepted_length."""

    @property
    def drafts_with_model_layers(self) -> bool:
        """Whether engines draft with the draft layers of the policy's checkpoint."""
        drafter = self.vllm.get("speculative_config")
        return isinstance(drafter, Mapping) and drafter.get("method") == MODEL_LAYERS

    @property
    def turns_of_attempt(self) -> int:
        return 1 if self.environment == "single_turn" else self.max_turns

    @property
    def staleness_bound(self) -> int:
        """Maximum weight versions between a group's oldest token and the weights that it updates."""
        if self.max_staleness is None:
            return 1 if self.stragglers == "park" else 0
        return self.max_staleness

    @property
    def is_paced(self) -> bool:
        """Whether engines sample ahead while the trainer updates, up to the staleness limit."""
        return self.placement == "separate" and self.staleness_bound > 0

    @property
    def carries_groups(self) -> bool:
        """Whether a group may be trained or dropped in a later step than it started."""
        return self.is_paced or self.stragglers != "wait"
