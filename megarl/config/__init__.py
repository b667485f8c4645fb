"""The recipe's schema: every field, its default and its meaning. Frozen, strict about keys, no torch.

What one field can tell is checked here; what several fields, the model folder or the data decide is checked by
`preflight.check`; both end in the same one-page error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError

from megarl.config.cluster import ClusterConfig
from megarl.config.curriculum import CurriculumConfig
from megarl.config.distillation import DistillationConfig
from megarl.config.learning import (
    OVERLONG_PARTS,
    AlgorithmConfig,
    CriticConfig,
    LoraConfig,
    OptimizerConfig,
    PreferenceConfig,
)
from megarl.config.mixture import SourceConfig, SourceRecipe, check_sources, sources, with_first_train
from megarl.config.override import override_fault
from megarl.config.sampling import EvaluationSamplingConfig, SamplingConfig
from megarl.config.sandbox import SandboxConfig
from megarl.config.secrets import Place
from megarl.config.section import Section
from megarl.files.model_folder import found_folder

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _overrides(given: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if fault := override_fault(given):
        raise PydanticCustomError("override_config", "{fault}", {"fault": fault})
    return given


OverrideConfig = Annotated[dict[str, JsonValue], AfterValidator(_overrides)]


class ModelConfig(Section):
    path: str
    """Folder of the Hugging Face model that training starts from: config.json, safetensors, tokenizer. Or its name on
    the Hub, OWNER/NAME, where its cache has it (hf download OWNER/NAME); nothing is downloaded by a run."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the weights and of the matrix products, in the trainer and in the engine alike."""
    override_config: OverrideConfig = Field(default_factory=dict)
    """Fields of config.json with other values, in trainer and engine alike and in the exported model's config.json:
    rope_theta, rope_scaling or rope_parameters, max_position_embeddings, rms_norm_eps, num_experts_per_tok and
    norm_topk_prob, which leave the weights' shapes alone. Of this folder's model; a critic's or reward model's own
    folder has its own."""
    chat_template: str | None = None
    """Chat template instead of the tokenizer's: a Jinja file, or `plain`, which writes the messages' contents alone, as
    base models read them (the end-of-sequence token follows an assistant's). It is exported with the model."""
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of the chat template's own variables, such as {enable_thinking: false} of Qwen3, wherever it is applied.
    The exported model's template has them as defaults."""

    @property
    def folder(self) -> str:
        """The model's folder: `path`, or its place in the Hub's cache."""
        return found_folder(self.path)


RecomputedModule = Literal["core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"]


class TrainerConfig(Section):
    tp: PositiveInt = 1
    """Tensor-parallel size: attention heads, feed-forward channels and vocabulary are split over this many ranks."""
    pp: PositiveInt = 1
    """Pipeline-parallel size: the layers are split over this many stages."""
    dp: PositiveInt | None = None
    """Data-parallel size; default: ranks / (tp * pp * cp)."""
    vpp: PositiveInt = 1
    """Virtual pipeline size: model chunks of each pipeline stage (interleaved schedule)."""
    cp: PositiveInt = 1
    """Context-parallel size: the tokens of a sequence are split over this many ranks."""
    ep: PositiveInt = 1
    """Expert-parallel size: the experts are distributed over this many ranks."""
    etp: PositiveInt = 1
    """Expert-tensor-parallel size: each expert is split over this many ranks."""
    rank_order: Literal["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"] = "tp-cp-ep-dp-pp"
    """Megatron's rank order, the first axis fastest. With dp last, the stages of a replica are adjacent ranks: weights
    cross fewer nodes in a reshard (`megarl plan` counts that), gradients more in an update."""
    align_ranks: bool = True
    """Permute the trainer's ranks where that saves bytes between nodes in a reshard."""
    sequence_parallel: bool | None = None
    """Sequence parallelism: split the activations of norms and residuals over the tensor-parallel ranks; default: tp >
    1."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks (ZeRO 1)."""
    overlap_grad_reduce: bool | None = None
    """Reduce gradients over the data-parallel ranks in buckets while the backward pass of an update's last microbatch
    goes on; default: where these ranks are on several nodes. Weights are not gathered beside the next forward pass: the
    engine wants them first."""
    router_replay: bool = False
    """Router replay (mixture of experts): train with the experts that the engine routed each token to."""
    moe_dispatcher: Literal["alltoall", "flex"] = "alltoall"
    """How tokens reach their experts on other ranks (mixture of experts): by all-to-all collectives, or by DeepEP's
    kernels (flex), faster across nodes, which need GPUs, the package deep_ep in the environment, and etp * ep > 1."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation in the backward pass: of trainer.recompute_modules (selective) or of whole layers
    (full)."""
    recompute_modules: tuple[RecomputedModule, ...] = ("core_attn",)
    """Parts of a layer that `recompute: selective` computes anew, by Megatron-Core's names: core_attn (next to nothing
    is saved where attention is a flash kernel), layernorm (with Transformer Engine that before experts only: the others
    are part of the linear layers behind them, so that a dense model saves nothing by it), mlp (of dense layers, most of
    their activations), moe (routing and experts), moe_act (the experts' activation; needs Transformer Engine),
    shared_experts."""
    fp8: Literal["none", "blockwise"] = "none"
    """Matrix products of the layers in FP8 (E4M3), with a scale for each block of 128 or 128 x 128 numbers; weights,
    gradients, norms, attention and the head stay as they are. Needs Hopper GPUs, Transformer Engine and bfloat16; the
    engine's products are not in FP8, so watch logprob_gap/. Each layer keeps its weights in FP8 twice."""
    offload: tuple[Literal["optimizer", "gradients", "parameters"], ...] = ()
    """States moved to host memory while the engine samples; default: none."""
    optimizer_offload_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.0
    """Fraction of the parameters whose main weights and moments are in host memory all the time, where Adam steps on
    the CPU: 12 bytes a parameter less on the GPU, 16 more in host memory (with the gradients). A step of the optimizer
    then takes seconds a billion parameters and rank. With Adam, bfloat16 and the distributed optimizer, without LoRA.
    Checkpoints are those of any other fraction."""
    max_tokens_per_microbatch: PositiveInt = 8192
    """Largest number of tokens, padding included, of one packed microbatch of a data-parallel rank."""
    logprob_chunk_tokens: PositiveInt = 1024
    """Tokens whose logits are in memory at once when log-probs are computed."""
    megatron: dict[str, Any] = Field(default_factory=dict)
    """Further fields of Megatron-Core's TransformerConfig, by their own names."""


LOOPBACK = ("127.0.0.1", "::1", "localhost")
"""Addresses that only this machine reaches."""


class EndpointConfig(Section):
    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs a token."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port to listen on; 0: any that is free."""
    token: str | None = None
    """Token of this run, which a client without a session needs: ${oc.env:NAME}. Sessions have secrets of their own."""
    max_connections: PositiveInt = 1000
    """Connections of clients at once; further ones get the status 503, those that are there notice nothing."""
    hold_seconds: PositiveFloat = 540.0
    """Seconds that a request waits for its answer, while engines are busy or being updated; then it gets the status
    503 and is told to come back, and its retry finds the same call. OpenAI's clients wait for 600 seconds."""

    @model_validator(mode="after")
    def _is_guarded(self) -> Self:
        if self.token is None and self.host not in LOOPBACK:
            raise PydanticCustomError("endpoint", "host is no loopback address: give rollout.endpoint.token too")
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
    others."""
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
    """KV cache of one rank in GiB."""
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
    """Further fields of vLLM's EngineArgs, by their own names."""

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


class DataConfig(Section):
    train: str
    """Training records: {"messages": {...} or [...]} with "gt_answer" (rl, distillation), an assistant's turn (sft; or
    "prompt" and "response"), "chosen" and "rejected" (preference, reward_model), "response" and "label" (kto), or other
    programs' (data.format). A JSON-lines, JSON, CSV, Parquet or Arrow file; a folder of files of one kind; or a data
    set of the Hugging Face Hub, OWNER/NAME or OWNER/NAME/FOLDER, that is in its cache (hf download OWNER/NAME
    --repo-type dataset). SPLIT@ before a folder or name takes the files of one split, such as train@data/gsm8k. Or
    `environment:COUNT` (rl, distillation): so many problems that rollout.environment makes itself, each a function of
    its number."""
    validation: dict[Name, str] = Field(default_factory=dict)
    """Validation sets by name, as data.train: problems, or pairs (preference, reward_model); or `environment:COUNT`,
    problems of other numbers than those of training. Metric: val/NAME/accuracy."""
    validation_conversations: dict[Name, str] = Field(default_factory=dict)
    """Validation sets of conversations (sft) by name, as data.train. Metric: val/NAME/loss, nats a token."""
    ptx: str | None = None
    """Conversations for the supervised term of PPO-ptx (algorithm.ptx_coefficient), as data.train."""
    format: Literal["colossalrl", "rl2", "verl", "trl", "slime", "openrlhf", "alpaca"] | None = None
    """Whose names the fields of records have (megarl.data.formats); left out: as recognised in the first record of each
    source, which a start tells. All fields are in `record`, which reward functions get."""
    fields: dict[Literal["prompt", "input", "response", "chosen", "rejected", "label", "tools"], str] = Field(
        default_factory=dict
    )
    """Names of your own for fields of the records, such as {prompt: question}; dots reach into objects. `input`: a
    text that is added to that of the prompt, an empty line between (alpaca)."""
    answer_field: str | None = None
    """Field with the gold answer: text, a number, an object or a list; dots reach into objects. Left out: the format's,
    gt_answer in megarl's own."""
    system_prompt: str | None = None
    """System message put before each conversation that has none; `default`: that of the first of reward.functions whose
    format needs one (boxed, think_answer_tags, code); `none` or left out: no message."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a prompt in tokens, chat template included. Prompts are never cut: see data.overlong."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """A prompt of more than data.max_prompt_tokens, or a conversation or pair that does not fit in
    trainer.max_tokens_per_microbatch: an error that names its line (refuse), or left out before the run, which a start
    tells and data/dropped counts (drop)."""
    streaming: bool = False
    """Keep training records on disk, for data that do not fit in memory: they are read and checked once before the
    start, copied into an unnamed file of the run's folder, and made into prompts or sequences when they are drawn.
    Order, shuffling, curricula and resume are the same."""
    shuffle: bool = True
    """Shuffle the records anew each epoch, by the run's seed."""
    curriculum: CurriculumConfig = CurriculumConfig()
    """Which problems are drawn more often (rl, distillation)."""


class RewardFunctionConfig(Section):
    name: str
    """A name of `megarl.rewards`, `package.module:function` or `path/to/file.py:function`. Its parameters are named
    after the values of a sample that it wants (`megarl.rewards.calling`)."""
    weight: float = 1.0
    """Factor of its score in the sum; 0: it is only measured (reward/NAME/mean)."""
    kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments that it is called with besides; plain values, which go to another process. Those of judge and
    remote are the fields of `megarl.config.served`."""
    needs: tuple[str, ...] = ()
    """Fields of the records that it reads, dots going into objects; a start names the first line that lacks one."""

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, given: Any) -> Any:
        if isinstance(given, str):
            return {"name": given}
        if not isinstance(given, Mapping | cls):
            raise PydanticCustomError("reward_function", "must be a name or {name: ..., weight: ..., kwargs: {...}}")
        return given

    @model_serializer(mode="wrap")
    def _short(self, dump: Callable[[Self], dict[str, Any]]) -> str | dict[str, Any]:
        """The bare name where that says all."""
        return self.name if self == RewardFunctionConfig(name=self.name) else dump(self)


class RewardConfig(Section):
    functions: tuple[RewardFunctionConfig, ...] = (RewardFunctionConfig(name="boxed"),)
    """Reward functions whose weighted scores are added: names of `megarl.rewards`, reasoning_gym.TASK, judge, remote,
    `package.module:function` or `path/to/file.py:function`; with a weight or arguments {name: ..., weight: ...,
    kwargs: {...}}. Relative paths begin at the current folder. A distillation without data.validation may have none,
    []: then nothing is measured, and records need no answer."""
    function_weight: NonNegativeFloat = 1.0
    """Weight of the functions' scores beside the reward model's; 0: they only measure accuracy."""
    model: str | None = None
    """Folder of a reward model (sequence classification with one label, the policy's vocabulary) whose score of prompt
    and completion is added."""
    model_weight: PositiveFloat = 1.0
    """Weight of the reward model's score."""
    model_clip: PositiveFloat | None = None
    """Clip the reward model's scores to between minus and plus this (ColossalChat: 5)."""
    num_workers: PositiveInt = 2
    """Processes that score completions while others are still sampled."""
    timeout_seconds: PositiveFloat = 5.0
    """CPU seconds that the functions and what they start may take for one completion; beyond, it gets zero and the
    process is replaced."""
    wall_timeout_seconds: PositiveFloat | None = None
    """Seconds by the clock, for functions that wait or hang; left out, ten times timeout_seconds, at least 30."""
    max_failed_fraction: Annotated[float, Field(ge=0.0, le=1.0)] = 0.05
    """The run ends where a larger fraction of a step's or an evaluation's completions failed or timed out
    (reward/errors, reward/timeouts, reward/parse_errors)."""
    on_failure: Literal["zero", "leave_out"] = "zero"
    """Fate of a completion that could not be scored: the score zero, or no reward, so that its group is compared
    without it and it is not trained (rl). It is counted in either case."""
    correct_score: float = 1.0
    """Score of a right answer (ColossalRL: 10)."""
    source_field: str | None = "data_source"
    """Field of the records that names their data source, dots going into objects (verl: data_source); where records
    have it, reward/source/NAME/ are the metrics of each. null: none."""


class TrainConfig(Section):
    steps: NonNegativeInt = 100
    """Number of steps: rollouts in `rl` and `distillation`, optimizer updates in other loops; 0: only evaluate the
    validation sets."""
    epochs: PositiveFloat | None = None
    """Passes over the training data, instead of `steps`: their number is that of the records times this over
    prompts_per_step, rounded up. Dynamic sampling draws further prompts."""
    prompts_per_step: PositiveInt = 32
    """Batch size of a step: prompts in rl and distillation, conversations in sft, pairs in preference and
    reward_model."""
    samples_per_prompt: PositiveInt = 8
    """Group size: completions per prompt (rl, distillation)."""
    updates_per_step: PositiveInt = 1
    """Minibatches, one optimizer update each, that the samples of an rl step are split into."""
    epochs_per_step: PositiveInt = 1
    """Epochs over the samples of an rl step, each of `updates_per_step` minibatches, shuffled from the second epoch on.
    Those of the critic: `critic.updates_per_step`."""
    profile_steps: tuple[PositiveInt, ...] = ()
    """Steps whose time is recorded, by the spans of driver and ranks, in the run's profiles/step_NNNNNN.json: a Chrome
    trace, which ui.perfetto.dev opens."""
    max_logprob_gap: PositiveFloat | None = None
    """Largest mean distance of the trainer's log-probs from the engine's in nats (logprob_gap/mean) that the policy is
    updated with (rl, distillation). Beyond it the step's further updates are left out, all of them where the gap is
    known before (train/gap_exceeded); default: no limit."""
    on_logprob_gap: Literal["stop", "skip"] = "stop"
    """After a step whose gap was too large: save and end the run with exit code 70, or go on with the next step."""

    @property
    def num_updates(self) -> int:
        """The policy's optimizer updates in one rl step."""
        return self.epochs_per_step * self.updates_per_step


class EvaluationConfig(Section):
    every_steps: NonNegativeInt = 0
    """Evaluate the validation sets every so many steps, besides before the first and after the last; 0: only those."""
    at_start: bool = True
    """Evaluate before the first step. A run of no steps does in any case."""
    max_problems: PositiveInt | None = None
    """Evaluate only the first so many records of each set; default: all."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=1024)] = 1
    """Attempts at each problem, n. Accuracy is their mean, avg@n."""
    k: tuple[PositiveInt, ...] = ()
    """Numbers of attempts that pass@k and majority@k are estimated for (val/SET/pass_at_4, majority_at_4), without bias
    from all sets of k of the n; default: n, where there are several. A majority is that of the final answers, where a
    reward function reads one (boxed, think_answer_tags, gsm8k, math_competition, multiple_choice, reasoning_gym)."""
    sampling: EvaluationSamplingConfig = EvaluationSamplingConfig()
    """Sampling parameters of evaluation."""

    @property
    def ks(self) -> tuple[int, ...]:
        """The numbers of attempts that pass@k is estimated for."""
        return self.k or ((self.samples_per_prompt,) if self.samples_per_prompt > 1 else ())


class WeightsConfig(Section):
    bucket_mib: PositiveInt = 256
    """Size of a reshard bucket in MiB; at most two are in memory."""
    verify_every: NonNegativeInt = 50
    """Compare the engine's weights with the trainer's before training and after each so many steps' reshard: checksums
    of the live parameters, or log-probs of a prompt where the engine converts its weights. 0: only before training."""
    probe_tolerance: PositiveFloat | None = None
    """Largest mean distance of these log-probs in nats (reshard/probe_gap); left out, 0.001 in float32 and 0.1 in
    bfloat16. An engine that quantizes its weights may need more."""


class CheckpointConfig(Section):
    every_steps: NonNegativeInt = 0
    """Save a checkpoint every so many steps and after the last, for `megarl train --resume`; 0: never."""
    keep: PositiveInt = 2
    """Number of checkpoints to keep, the newest; older ones are removed once a newer one is complete."""
    asynchronous: bool = True
    """Write checkpoints while training goes on, from a copy in host memory."""
    export_every_steps: NonNegativeInt = 0
    """Export the model as a Hugging Face folder hf_step_NNNNNN every so many steps; 0: only at the end."""
    best: str | None = None
    """Metric of an evaluation, such as val/SET/accuracy or val/SET/pass_at_4: the model of the evaluated step at which
    it was best is kept in hf_best/, with step and value in its best.json, and the checkpoint of that step, if there is
    one, beyond `keep`. The largest value is best, of a metric that ends with /loss the smallest; of equal ones the
    first; of the trained steps, not of the beginning."""


class Recipe(Section):
    """One run."""

    name: Name
    """Name of the run and of its folder."""
    loop: Literal["rl", "sft", "preference", "reward_model", "distillation"]
    """Training loop: reinforcement learning, supervised fine-tuning, preference optimization (DPO and the like),
    reward model training, or distillation of a teacher on what the policy samples."""
    seed: NonNegativeInt = 0
    """Random seed of data order, sampling and initialisation."""
    runs_folder: str = "runs"
    """Parent folder of run folders; paths are relative to the current folder."""
    trackers: tuple[str, ...] = ("tensorboard",)
    """Where metrics and samples go beside metrics.jsonl and samples/ of the run folder: names of
    `tracking.trackers.TRACKERS`, or package.module:Class of your own."""
    samples_every_steps: PositiveInt = 1
    """Write prompts, completions and rewards to samples/ every so many steps (rl, distillation)."""
    samples_with_tokens: Annotated[int, Field(ge=0, le=64)] = 4
    """Number of these steps' samples that are written token by token to tokens/ too, those of the highest and of the
    lowest advantages: log-probs of engine and trainer, advantages, weight versions, for `megarl report` (rl,
    distillation of sampled tokens). Where the step needs no log-probs of the trainer before its update, this is a
    forward pass of these samples; 0: none."""
    model: ModelConfig
    """The model."""
    data: DataConfig
    """The data."""
    mixture: dict[Name, SourceConfig] = Field(default_factory=dict)
    """Several sources of problems in one run, by name (rl, distillation): each has a `weight` and what differs for it
    from data, rollout, reward, distillation and evaluation, in sections of these names. Groups never cross sources.
    Metrics of each: environment/NAME/, val/SET/."""
    cluster: ClusterConfig = ClusterConfig()
    """Nodes, ranks and how they are started."""
    trainer: TrainerConfig = TrainerConfig()
    """Megatron: parallel sizes and memory."""
    lora: LoraConfig = LoraConfig()
    """LoRA adapters of the policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning-rate schedule."""
    rollout: RolloutConfig = RolloutConfig()
    """vLLM: parallel size and sampling."""
    reward: RewardConfig = RewardConfig()
    """Reward functions and reward model."""
    sandbox: SandboxConfig = SandboxConfig()
    """Programs of the policy: where they run, and their limits (reward code, environment python)."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Advantage estimator, policy loss, KL and their settings (rl, distillation)."""
    critic: CriticConfig = CriticConfig()
    """The critic (rl with advantage gae)."""
    preference: PreferenceConfig = PreferenceConfig()
    """Loss (preference, reward_model)."""
    distillation: DistillationConfig = DistillationConfig()
    """Teachers and loss (distillation)."""
    train: TrainConfig = TrainConfig()
    """Batch sizes and length of the run."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Evaluation on the validation sets."""
    weights: WeightsConfig = WeightsConfig()
    """Reshard: weights from the trainer into the engines."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Checkpoints and exports during a run."""

    _references: dict[Place, str] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _complete(cls, given: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Checked with its sources, and with the preset's share of the longest completion in tokens."""
        filled = with_first_train(given)
        made = validate(filled)
        if filled is not given:
            made.data.model_fields_set.discard("train")
        check_sources(made)
        return made.with_overlong_buffer()

    def with_overlong_buffer(self) -> Self:
        """The recipe with the preset's share of its longest completion in tokens, where it has a share."""
        algorithm = self.algorithm
        parts = OVERLONG_PARTS.get(algorithm.preset or "")
        if parts is None or "overlong_buffer" in algorithm.model_fields_set:
            return self
        resolved = algorithm.model_copy(
            update={"overlong_buffer": max(1, self.rollout.sampling.max_new_tokens // parts)}
        )
        resolved.model_fields_set.discard("overlong_buffer")
        return self.model_copy(update={"algorithm": resolved})

    @property
    def references(self) -> Mapping[Place, str]:
        """The text of each value that was read from the environment, such as `${oc.env:HF_TOKEN}`."""
        return self._references

    def with_references(self, references: Mapping[Place, str]) -> Self:
        """The recipe, which is to be written with these texts in place of what they were read as."""
        copy = self.model_copy()
        copy._references = dict(references)
        return copy

    def override_of(self, folder: str) -> Mapping[str, Any]:
        """`model.override_config` where a folder is the model's; nothing for a model of another folder."""
        return self.model.override_config if folder == self.model.folder else {}

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with the model that training starts from."""
        if self.loop == "rl":
            return self.algorithm.kl_coefficient > 0
        return self.loop == "preference" and self.preference.loss in ("dpo", "ipo", "kto")

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return self.loop == "rl" and self.algorithm.advantage == "gae"

    @property
    def further_models(self) -> dict[str, str]:
        """Folders of the models beside the policy's, by the fields that name them; a run of no steps has no teacher."""
        folders = {
            "critic.path": self.critic.path if self.has_critic else None,
            "reward.model": self.reward.model if self.loop == "rl" else None,
        }
        if self.loop == "distillation" and self.train.steps:
            folders |= {s.place("distillation.teacher"): s.recipe.distillation.teacher for s in self.sources}
        return {field: found_folder(folder) for field, folder in folders.items() if folder}

    @property
    def teachers(self) -> dict[str, str]:
        """Folders of the teachers, each once, by the names that the ranks have for them: teacher0 and so on."""
        found = (folder for field, folder in self.further_models.items() if field.endswith("distillation.teacher"))
        return {f"teacher{number}": folder for number, folder in enumerate(dict.fromkeys(found))}

    @property
    def teacher_of_source(self) -> dict[str, int]:
        """The number of each source's teacher."""
        numbers = {folder: number for number, folder in enumerate(self.teachers.values())}
        given = {source.name: found_folder(source.recipe.distillation.teacher or "") for source in self.sources}
        return {name: numbers[folder] for name, folder in given.items() if folder in numbers}

    @property
    def for_teachers(self) -> Self:
        """The recipe with the teachers' parallel sizes in place of the trainer's."""
        if not (own := self.distillation.sizes):
            return self
        changed = own | {"dp": None, "vpp": 1, "rank_order": "tp-cp-ep-dp-pp"}
        if own["tp"] == 1:
            changed["sequence_parallel"] = None
        trainer = self.trainer.model_copy(update=changed)
        return self.model_copy(update={"trainer": trainer})

    @property
    def is_on_policy(self) -> bool:
        """Whether the policy samples what it is trained on."""
        return self.loop in ("rl", "distillation")

    @property
    def has_advantages(self) -> bool:
        """Whether the loss weighs sampled tokens by advantages."""
        return self.loop == "rl" or (self.loop == "distillation" and self.distillation.loss == "sampled_token")

    @property
    def frozen_steps(self) -> int:
        """First steps in which the policy is not trained."""
        return self.critic.warmup_steps if self.has_critic else 0

    @property
    def sequences_per_example(self) -> int:
        """Sequences that share a row because the loss compares them."""
        return 2 if self.loop == "reward_model" or (self.loop == "preference" and self.preference.loss != "kto") else 1

    @property
    def has_engine(self) -> bool:
        """Whether anything is sampled."""
        return self.is_on_policy or (self.loop == "sft" and bool(self.data.validation))

    @property
    def separate_ranks(self) -> int:
        """Ranks that only sample: `rollout.ranks` of a separate placement, else 0."""
        is_separate = self.has_engine and self.rollout.placement == "separate"
        return self.rollout.ranks or 0 if is_separate else 0

    @property
    def trainer_ranks(self) -> int:
        """Ranks that train."""
        return self.cluster.world_size - self.separate_ranks

    @property
    def validation_sets(self) -> tuple[str, ...]:
        """Names of all sets that are evaluated."""
        of_sources = [name for source in self.sources for name in source.recipe.data.validation]
        return tuple(dict.fromkeys([*of_sources, *self.data.validation_conversations]))

    def evaluates_at(self, step: int) -> bool:
        """Whether a step ends with an evaluation: every `evaluation.every_steps`, and the last."""
        every = self.evaluation.every_steps
        return bool(self.validation_sets) and (step == self.train.steps or (every > 0 and step % every == 0))

    def reshards_at(self, step: int) -> bool:
        """Whether a step ends with a reshard: every `rollout.sync_every`, and where it evaluates."""
        return step % self.rollout.sync_every == 0 or self.evaluates_at(step)

    @property
    def sources(self) -> tuple[SourceRecipe, ...]:
        """The sources of problems: those of the mixture, or the recipe's one."""
        return sources(self)

    @property
    def context_tokens(self) -> int:
        """Tokens of the longest sequence that is sampled: prompt, completions, observations."""
        return max(source.recipe._context_tokens for source in self.sources)

    @property
    def trained_tokens(self) -> int:
        """Tokens of the longest sequence that is trained on."""
        recipes = [source.recipe for source in self.sources]
        return max(recipe.data.max_prompt_tokens + recipe.rollout.sampling.max_new_tokens for recipe in recipes)

    @property
    def longest_completion(self) -> int:
        """Tokens of the longest completion in training."""
        return max(source.recipe.rollout.sampling.max_new_tokens for source in self.sources)

    @property
    def _context_tokens(self) -> int:
        longest = max(self.rollout.sampling.max_new_tokens, self.evaluation_sampling.max_new_tokens)
        return self.data.max_prompt_tokens + longest

    @property
    def evaluation_sampling(self) -> SamplingConfig:
        """`evaluation.sampling` without its repetition penalty, and from `rollout.sampling` what it leaves out."""
        own = self.evaluation.sampling.model_dump(exclude_none=True, exclude={"repetition_penalty"})
        own["temperature_schedule"] = "constant"
        if self.evaluation.samples_per_prompt == 1:
            own.setdefault("temperature", 0.0)
        return self.rollout.sampling.model_copy(update=own)
