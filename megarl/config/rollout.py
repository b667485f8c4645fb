"""The recipe's section `rollout`: engines, sampling, environments, the endpoint, asynchrony."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt, model_validator
from pydantic_core import PydanticCustomError

from megarl.config.sampling import SamplingConfig
from megarl.config.section import Section

LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""

MIN_TOKEN_CHARACTERS = 16
"""A token on a public interface: 16 random letters and digits have 95 bits, too many to guess over a network."""


class EndpointConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0: any that is free."""
    token: str | None = None
    """Token of this run, which a client without a session needs: ${oc.env:NAME}. Sessions have secrets of their own.
    At least 16 characters where `host` is not a loopback address."""
    max_connections: PositiveInt = 1000
    """Connections of clients at once; further ones get the status 503, those that are there notice nothing."""
    hold_seconds: PositiveFloat = 540.0
    """Seconds that a request waits for its answer, while engines are busy or being updated; then it gets the status
    503 and is told to come back, and its retry finds the same call. OpenAI's clients wait for 600 seconds."""

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if self.host not in LOOPBACK and len(self.token or "") < MIN_TOKEN_CHARACTERS:
            raise PydanticCustomError(
                "endpoint",
                "host is not a loopback address: rollout.endpoint.token needs at least {least} characters",
                {"least": MIN_TOKEN_CHARACTERS},
            )
        return self


class AgentConfig(Section):
    command: tuple[str, ...] = ()
    """The program of an attempt and its arguments, a list that no shell reads. It finds OPENAI_BASE_URL and
    OPENAI_API_KEY in its environment and the problem as JSON on its standard input (megarl.serving.agents)."""
    timeout_seconds: PositiveFloat = 600.0
    """Seconds that the program may take for an attempt, those not counted in which the engines are held for an update
    (rollout.stragglers); beyond, its process group is killed, and the attempt ended with an error."""
    max_processes: PositiveInt = 64
    """Programs that run at once on the driver's machine."""
    environment: tuple[str, ...] = ()
    """Names of variables that the program gets from the driver's environment, such as a search service's key. It gets
    PATH, HOME, the locale and Python's own in any case. Keys of megarl, trackers, judges and hubs are refused."""


class BudgetConfig(Section):
    """Limits of an attempt of several turns beside `rollout.max_turns`, which environments may spend in any order."""

    sampled_tokens: PositiveInt | None = None
    """Tokens that the policy samples in an attempt, in all turns together; then it has ended with `length`. Default:
    what fits beside prompts and observations."""
    tool_calls: PositiveInt | None = None
    """Tool calls of an attempt; at the turn that makes more, it has ended with `calls`."""
    invalid_calls: PositiveInt = 8
    """Tool calls in a row that cannot be read, are of no tool or have wrong arguments; then the attempt has ended with
    `invalid_calls`. Each is replied to with its error. One that the limit of its turn's length cut does not count."""
    reply_tokens: Annotated[int, Field(ge=64)] | None = None
    """Tokens of a tool's reply (a message of role `tool`), 64 at least; a longer one loses its middle, where it says
    how much is left out. Counted in tools/shortened. Default: no limit but the environment's own, in characters."""
    step_seconds: PositiveFloat | None = 600.0
    """Seconds that the environment may take to begin or to answer a turn; then the attempt has ended with `error`,
    without a reward, and is counted in rollout/errors/Timeout. null: no limit."""
    seconds: PositiveFloat | None = None
    """Seconds of an attempt by the clock, waiting for engines included, but not while they are held for an update
    (rollout.stragglers); then it has ended with `seconds`, and what it has until then is scored. Which attempts that
    hits differs from run to run."""
    attempts: PositiveInt = 1
    """How often an attempt is begun at most where its environment raises EnvironmentUnavailableError
    (megarl.environments): a fault that is not the policy's. Counted in rollout/restarted."""


class RolloutConfig(Section):
    placement: Literal["colocated", "separate"] = "colocated"
    """Ranks of the engines: those of the trainer, in turn with it (colocated); or `rollout.ranks` of their own, which
    the weights reach shard to shard and which keep their memory (separate). Each replica is then a group of processes
    of its own."""
    ranks: PositiveInt | None = None
    """Ranks that only sample (separate): the last of cluster.nodes * cluster.ranks_per_node; the trainer has the
    others. Default: those of cluster.groups.engines."""
    tp: PositiveInt = 1
    """Tensor-parallel size of each vLLM engine; there are ranks / tp replicas."""
    sampling: SamplingConfig = SamplingConfig()
    """Sampling parameters of training."""
    max_concurrent_requests: PositiveInt = 256
    """Completions that one engine decodes concurrently."""
    async_scheduling: bool | None = None
    """Begin an engine's step before the one before it is read, so that a GPU does not wait for the host between them.
    All that was begun is read before a call of the engine ends: versions are right, and tokens the same but for
    rounding, which then depends on when calls end (false: a resumed run of one turn is bit-equal, see environment). A
    completion that ends before its limit costs a token more, which is dropped. Left out: on where vLLM has it, which is
    not on CPUs, nor with a drafter that works on the host (vllm.speculative_config); and off with top_p, top_k or min_p
    under vLLM's older model runner, where recording what they kept undoes the gain. true: an error where vLLM has it
    not. Metric: perf/steps_ahead."""
    environment: str = "single_turn"
    """Environment of the attempts: single_turn (one answer to the problem), calculator and search (tools), countdown,
    guess_number and mastermind (games), reasoning_gym, gem, openenv and verifiers (other libraries'), command (a
    program of yours that speaks to rollout.endpoint), or your own as package.module:Class or path/to/file.py:Class
    (megarl.environments.Environment, megarl.environments.tools.ToolEnvironment), or path/to/file.py:interact (RL2's
    function, megarl.environments.interact). Resume: a run whose loss reads no engine log-probs (algorithm.old_logprobs
    trainer, no importance_sampling) goes on bit-equal in float32; one whose loss reads them does so while all requests
    of a step fit in the engines at once and async_scheduling is off, else up to rounding, since engines round by what
    they decode together."""
    environment_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the environment: keyword arguments of its class's constructor."""
    environment_processes: NonNegativeInt | None = None
    """Processes that the environment's attempts run in, at most one attempt in each at a time, others wait for a free
    one: killed where they hang or end (environment/process_killed), under Ray on all nodes. 0: in the driver. Default:
    0 where methods, tools or function are all `async def`, else 4 for each CPU of the driver's machine, at most 64."""
    environment_memory_gib: PositiveFloat = 4.0
    """Memory that an environment may take in such a process, in GiB of address space."""
    tool_parser: (
        Literal["hermes", "qwen3_coder", "llama3_json", "pythonic", "mistral", "glm45", "deepseek_v3", "gpt_oss"] | None
    ) = None
    """How the policy writes tool calls, for environments with tools (megarl.data.tool_calls); left out: as the chat
    template writes them, where it shows that."""
    agent: AgentConfig = AgentConfig()
    """The program of the environment `command`."""
    endpoint: EndpointConfig = EndpointConfig()
    """The OpenAI-compatible server that it speaks to."""
    max_turns: PositiveInt = 16
    """Completions of one attempt at most. All its tokens together have room for data.max_prompt_tokens +
    rollout.sampling.max_new_tokens."""
    truncated_turn: Literal["end", "close"] = "end"
    """A completion that meets the limit of its length, before the attempt has used its room, ends the attempt, or is
    closed with the end of turn, untrained, and the attempt goes on."""
    history: Literal["append", "render", "refuse"] = "append"
    """Prompt of a later turn, where the chat template rewrites earlier ones (drops what was thought, say): the tokens
    as they were sampled and what was observed (append); what the template writes, which makes a training sequence of
    its own of each rewritten history (render); or such a template is an error (refuse). Told at the start."""
    budget: BudgetConfig = BudgetConfig()
    """Limits of an attempt of several turns."""
    stragglers: Literal["wait", "park", "abort"] = "wait"
    """Groups that are not complete when a step has its train.prompts_per_step of algorithm.oversampling times as many:
    the step waits for all; or partial rollouts (park): it trains on the first that are complete, the others' requests
    are parked with their tokens while the engines sleep and go on under the new weights, environments run meanwhile; or
    they are given up, tokens lost (abort: biased to short answers). Under park groups train late
    (rollout.max_staleness) and need algorithm.importance_sampling, or old_logprobs rollout and a loss that clips. What
    is parked when depends on the clock, so two runs differ; a checkpoint has all of it. A resumed attempt is given its
    turns anew, and begins again where its environment then is not where it was (rollout/restarted)."""
    max_staleness: NonNegativeInt | None = None
    """Versions at most between the weights that sampled a group's oldest token and those that it trains. The weights
    that step n trains are version n, whether or not engines ever had them: so this counts steps. 0: synchronous, a step
    trains on what its own weights sampled. Placement separate, left out 0: engines sample ahead while the trainer
    trains, and groups start only as far ahead as they can be trained in time, in the order in which they were drawn; 1
    is one step off. Stragglers park, left out 1: a step waits for groups that may grow no older. Above 0 it needs
    algorithm.importance_sampling, or old_logprobs rollout and a loss that clips; a written importance_sampling none is
    let through with a warning. A resumed run with a lower bound drops what is older (staleness/dropped)."""
    sync_every: PositiveInt = 1
    """Reshard after every so many steps only, and before an evaluation and a resumed run's first step (placement
    separate). In between engines keep their version and samples are up to sync_every - 1 versions older: set
    max_staleness to that at least."""
    recompute_kv: bool = True
    """Keys and values of the requests that a reshard interrupts, where engines sample ahead (placement separate):
    computed anew with the new weights, so that each token is sampled as its weight version would (true); or kept
    (false), which spares a prefill of all of them at each reshard. Then later tokens come from the new weights over
    what the old ones left: recorded log-probs are those of the draw, but no version's, and the trainer's under the same
    version are not within rounding of them (logprob_gap/, logprob_gap/mean/age_0). Corrections and weight versions of
    tokens are as ever; requests that begin later share nothing with them. A checkpoint has no tokens of a completion
    under way: a resume samples it anew, as others do where its engine is lost."""
    on_stale: Literal["wait", "drop"] = "wait"
    """A group that may grow no older and is not complete (park): the step waits for it, or it is dropped one step later
    and another prompt drawn (staleness/dropped; starves problems with long answers)."""
    kv_cache_gib: PositiveFloat = 1.0
    """KV cache of one rank in GiB. Default on GPUs: what `megarl plan` finds left of a GPU's memory, less 8 GiB; on
    CPUs 1. A run's config.yaml has the value, which a resumed run keeps."""
    gpu_memory_utilization: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Instead of kv_cache_gib, in vLLM's sense: share of a GPU's memory that weights, a step and KV cache of the engine
    take together while it samples. What the trainer does not offload (trainer.offload) must fit beside it."""
    quantization: Literal["none", "fp8", "fp8_per_channel"] = "none"
    """Weights of the engine's linear layers and experts in FP8 (e4m3): with a scale for each block of 128 x 128 (fp8),
    or for each output channel (fp8_per_channel). Embeddings, head, norms, routers and biases stay in model.dtype, which
    must be bfloat16. A reshard moves weights in bfloat16; each rank of an engine quantises its own part, to what vLLM
    makes of the exported model. The engine then samples from another distribution than the trainer trains: see
    logprob_gap/mean and logprob_gap/ess, correct it by algorithm.importance_sampling (tis; icepop for experts), see
    what that cuts in importance/cut, and bound the gap by train.max_logprob_gap."""
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Type of the KV cache: that of the model (auto), or FP8 with the scale 1 (fp8: e4m3), for twice the tokens. It
    widens the same gap."""
    vllm: dict[str, Any] = Field(default_factory=dict)
    """Further fields of vLLM's EngineArgs, by their own names. The drafter of a speculative_config must have no weights
    (method ngram, ngram_gpu, suffix or custom_class), and needs GPUs."""

    @property
    def turns_of_attempt(self) -> int:
        """Turns that an attempt may take."""
        return 1 if self.environment == "single_turn" else self.max_turns

    @property
    def staleness_bound(self) -> int:
        """Versions at most between the weights that sampled a group's oldest token and those that it trains."""
        if self.max_staleness is None:
            return 1 if self.stragglers == "park" else 0
        return self.max_staleness

    @property
    def is_paced(self) -> bool:
        """Whether engines sample ahead of the trainer, as far as the bound of staleness allows."""
        return self.placement == "separate" and self.staleness_bound > 0

    @property
    def carries_groups(self) -> bool:
        """Whether groups that were started in one step may be trained in a later one, or given up there."""
        return self.is_paced or self.stragglers != "wait"
