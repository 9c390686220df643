"""The configurations of `sluice train`, and of those that train on rows: `sluice sft` and so on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    field_validator,
    model_validator,
)

from sluice.address import ServerAddress
from sluice.algo.estimators.pairs import BradleyTerrySettings, DpoSettings
from sluice.algo.plugins import PluginSettings
from sluice.algo.spec import AdvantageSpec, LossSpec, known_columns
from sluice.config import PLAIN_NAME, PLAIN_NAME_RULE, Config, ProcessConfig
from sluice.loop.tracker_settings import TrackersConfig
from sluice.place import Place, PlaceText, StoreCacheConfig, StorePlace
from sluice.runtime.messages import LONGEST_SECONDS
from sluice.runtime.security import SecurityConfig
from sluice.runtime.server import ServerConfig
from sluice.samples.sample import MOST_TEMPERATURE, TEMPERATURES, is_temperature
from sluice.samples.stops import LONGEST_STOP

LARGEST_COUNT = 2**31  # and above, of what a call can say
MOST_SHUFFLED = 10_000_000  # an epoch's order is made as a whole, in seconds
MOST_SAMPLES = 1_000_000  # or groups, of what is asked for at once: each is a row, and has a seed
MOST_EPOCHS = 64  # over one batch, which is far beyond what its ratios bear
LARGEST_STALENESS = 10_000  # steps; more groups than that many steps have are no run's


class PromptsConfig(Config):
    """Where tasks come from: a JSONL or Parquet file, or indices of a generated data set."""

    file: Path | None = None
    index_count: int | None = Field(None, gt=0, lt=2**63)
    shuffle: bool = True
    where: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="Only rows of the file that have this value, or one of a list, at each key.",
    )

    @model_validator(mode="after")
    def _one_source(self) -> PromptsConfig:
        if (self.file is None) == (self.index_count is None):
            raise ValueError("give either file or index_count")
        if self.where and self.file is None:
            raise ValueError("where: has no effect without a file")
        for key, wanted in self.where.items():
            values = wanted if isinstance(wanted, list) else [wanted]
            if not values or not all(isinstance(value, str | int | float) for value in values):
                raise ValueError(f"where.{key}: must be a text, a number, true or false, or a list")
        if self.shuffle and (self.index_count or 0) > MOST_SHUFFLED:
            raise ValueError(
                f"index_count: more than {MOST_SHUFFLED:,} are not shuffled; give shuffle: false"
            )
        return self


class EnvironmentConfig(Config):
    """An environment of the episode workers; `settings` are its own."""

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)


class SamplingChanges(Config):
    """How tokens are drawn, where it is not as in training."""

    max_new_tokens: int | None = Field(None, gt=0, lt=LARGEST_COUNT)
    temperature: float = Field(1.0, ge=0, le=MOST_TEMPERATURE)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=LARGEST_COUNT)
    stop_token_ids: tuple[Annotated[int, Field(ge=0, lt=LARGEST_COUNT)], ...] = ()
    stop: tuple[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)], ...] = Field(
        (), description="Texts that end a sample, with the token that completes one."
    )

    @field_validator("temperature")
    @classmethod
    def _check_temperature(cls, temperature: float) -> float:
        if temperature and not is_temperature(temperature):
            raise ValueError(f"{TEMPERATURES}, or 0")
        return temperature

    min_new_tokens: int = Field(
        0,
        ge=0,
        lt=LARGEST_COUNT,
        description="Before so many nothing is drawn that would end an answer.",
    )
    ignore_eos: bool = Field(
        False, description="The model's own end-of-sequence tokens do not end an answer."
    )

    def over(self, training: SamplingConfig) -> SamplingConfig:
        """Return that of training, changed by what is given here."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return training.model_copy(update={n: v for n, v in given.items() if v is not None})


class SamplingConfig(SamplingChanges):
    """How tokens are drawn. The temperature is the one of every log-prob of a run."""

    max_new_tokens: int = Field(gt=0, lt=LARGEST_COUNT)

    @property
    def truncates(self) -> bool:
        """Whether tokens are drawn from a part of the distribution that log-probs are of."""
        return self.top_p < 1 or self.top_k > 0 or self.min_new_tokens > 0

    def check_least(self, key: str) -> None:
        """Raises ValueError, of the settings `key`, where an answer cannot be as long."""
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"{key}.min_new_tokens: {self.min_new_tokens} is more than max_new_tokens, "
                f"{self.max_new_tokens}"
            )


GREEDY = {"temperature": 0.0, "top_p": 1.0, "top_k": 0}
GREEDY_ARE_ALIKE = "greedy answers are all the same; give a temperature"
TRUNCATED = (
    "sampling.top_p, top_k or min_new_tokens cuts tokens off, but log-probs are of the whole "
    "distribution: ratios and gradients are biased by what is cut (docs/rollout.md, Log-probs)"
)

STALENESS_IGNORED = (
    "algorithm.loss.old_logprobs: old is of the weights that a step begins with, and with "
    "max_staleness older ones sample: nothing corrects the difference; set importance or "
    "corrections, or old_logprobs: rollout (docs/recovery.md, Schedules)"
)

# What `sluice train` has no service for: such an estimator takes a loop of one's own.
_NOT_OF_A_RUN = ("advantages",)


SUPERVISED = ("sft", "cross_entropy")


class AlgorithmConfig(Config):
    """How rewards become gradients."""

    advantage: AdvantageSpec = AdvantageSpec(name="grpo")
    loss: LossSpec = LossSpec(name="ppo_clip", clip_low=0.2)
    mini_batches: int = Field(1, gt=0, description="Optimizer steps of an epoch.")
    epochs: int = Field(
        1, gt=0, le=MOST_EPOCHS, description="Times that a step goes over its groups."
    )

    reference_every: int = Field(
        0, ge=0, description="Steps from one reference of the KL to the next, of the weights then."
    )

    @property
    def columns(self) -> frozenset[str]:
        """What the rows must carry before advantages and losses are computed.

        What a user's loss or estimator reads is not among it: the trainer is asked.
        """
        return known_columns(self.advantage) | known_columns(self.loss)

    @property
    def plugins(self) -> tuple[str, ...]:
        """Names of users' classes, which only the trainer imports."""
        return (*self.advantage.plugins.values(), *self.loss.plugins.values())

    @property
    def teacher_top_count(self) -> int:
        """Tokens that a teacher is to name at each place; 0 where a user's loss may read them."""
        return 0 if self.loss.plugins else self.loss.loss.top_count

    @property
    def is_supervised(self) -> bool:
        return self.loss.name in SUPERVISED

    def at_temperature(self, temperature: float) -> AlgorithmConfig:
        """Return the algorithm with the loss of tokens that were sampled at this temperature."""
        loss = self.loss.model_copy(update={"temperature": temperature})
        return self.model_copy(update={"loss": loss})

    @model_validator(mode="after")
    def _reference_is_read(self) -> AlgorithmConfig:
        is_read = "reference_logprobs" in self.columns or self.plugins
        if self.reference_every and not is_read:
            raise ValueError(
                "reference_every: has no effect without a KL to the reference: give "
                "loss.kl_coefficient or advantage.kl_coefficient, or leave it out"
            )
        return self

    @model_validator(mode="after")
    def _loss_is_of_a_policy(self) -> AlgorithmConfig:
        if self.loss.name == "value":
            raise ValueError("loss.name: value is what a critic learns; give it as critic.loss")
        reads_none = self.is_supervised or self.teacher_top_count > 0
        if reads_none and "advantage" in self.model_fields_set:
            raise ValueError(f"advantage: has no effect with loss {self.loss.name}; leave it out")
        return self

    @model_validator(mode="after")
    def _preferences_are_of_these_weights(self) -> AlgorithmConfig:
        """The derivative of a pair's loss is of the weights that its log-probs were computed by."""
        name, of_values = self.advantage.name, self.loss.name == "linear_value"
        if of_values != (name == "bradley_terry"):
            raise ValueError(
                f"loss.name: {self.loss.name} is not for advantage {name}: linear_value and "
                "bradley_terry go together"
            )
        if name not in ("dpo", "bradley_terry"):
            return self
        for key in ("mini_batches", "epochs"):
            if getattr(self, key) > 1:
                raise ValueError(
                    f"{key}: advantage {name} takes one optimizer step a batch, which its "
                    "advantages are of; leave it at 1"
                )
        if name == "dpo" and self.loss.name != "reinforce":
            raise ValueError(
                f"loss.name: {self.loss.name} has no effect with advantage dpo that reinforce has "
                "not: within one optimizer step no ratio leaves 1"
            )
        return self


class TeacherConfig(Config):
    """Whose log-probs of the sampled tokens a student learns from.

    Engines of a pool, as they are sampled, or a trainer process, as a step begins.
    """

    pool: str = Field("", description="Engines, by the `pool` of their rollout processes.")
    service: str = Field("", description="A trainer, by its entry of `services`.")
    address: ServerAddress = Field("", description="host:port of a trainer, instead.")

    @model_validator(mode="after")
    def _is_one(self) -> TeacherConfig:
        if sum(map(bool, (self.pool, self.service, self.address))) != 1:
            raise ValueError("give one of pool, service and address")
        return self


LARGEST_WEIGHT = 1e9  # of an environment: sums of larger ones are no numbers
SHORTEST_GROUP, LONGEST_GROUP = 1e-3, LONGEST_SECONDS  # of seconds that a call can say


class EnvironmentShare(Config):
    """One environment of a mixture, with its own tasks and limits.

    Of `groups_per_step` it gets `weight` over the sum of all weights. What is left out is the
    run's; every environment samples at the run's temperature.
    """

    weight: float = Field(1.0, gt=0, le=LARGEST_WEIGHT)
    prompts: PromptsConfig
    environment: EnvironmentConfig
    sampling: SamplingChanges | None = Field(None, description="What it leaves out is the run's.")
    samples_per_group: int | None = Field(None, gt=1, le=MOST_SAMPLES)
    group_timeout_seconds: float | None = Field(None, ge=SHORTEST_GROUP, le=LONGEST_GROUP)
    teacher: str = Field("", description="One of `teachers`.")


class FilterConfig(Config):
    """A rule of `sluice.loop.filters`, or a user's function `package.module:name`."""

    name: str
    settings: dict[str, Any] = Field(default_factory=dict)


class EvaluationSetConfig(Config):
    """A data set of held-out tasks: the first `groups` of its prompts, `samples` of each.

    Without `sampling` one greedy answer of training's length. A sample passes from a raw reward
    of `pass_threshold` on; `pass_at` names the k of the pass@k to estimate.
    """

    prompts: PromptsConfig
    environment: EnvironmentConfig | str | None = Field(
        None, description="None is the training environment; a name is that of `environments`."
    )
    sampling: SamplingChanges | None = Field(
        None, description="What it leaves out is that of training."
    )
    groups: int = Field(64, gt=0, description="All, where there are fewer prompts.")
    samples: int = Field(1, gt=0, le=MOST_SAMPLES)
    pass_at: tuple[int, ...] = ()
    pass_threshold: float = 1.0
    stop_at_score: float | None = Field(
        None, description="The run ends when every set that has one reached it."
    )

    @model_validator(mode="after")
    def _samples_differ(self) -> EvaluationSetConfig:
        if self.samples > 1 and self.sampling is None:
            raise ValueError(f"samples: {GREEDY_ARE_ALIKE}")
        if any(not 1 <= k <= self.samples for k in self.pass_at):
            raise ValueError(f"pass_at: must be within 1..{self.samples}, the samples of a task")
        return self


class EvaluationConfig(Config):
    """Scores on held-out data sets, by name: before, after and every so many steps.

    Beside training they take what the engines have left, and weights may change under them;
    otherwise training waits, and one version is measured. `deterministic` and colocated runs wait.
    """

    datasets: dict[str, EvaluationSetConfig] = Field(min_length=1)
    every_steps: int = Field(0, ge=0, description="0 is before and after only.")
    beside_training: bool = True
    before_training: bool = Field(True, description="Score the weights that training begins with.")
    max_running_groups: int = Field(32, gt=0, lt=LARGEST_COUNT, description="Per episode worker.")

    @property
    def is_told_to_run_beside(self) -> bool:
        """Whether it runs beside training, and not by default alone."""
        return self.beside_training and "beside_training" in self.model_fields_set

    @model_validator(mode="after")
    def _names_are_plain(self) -> EvaluationConfig:
        for name in self.datasets:
            if not PLAIN_NAME.fullmatch(name):
                raise ValueError(f"datasets.{name}: {PLAIN_NAME_RULE}")
        return self

    @model_validator(mode="after")
    def _is_measured_on_the_way(self) -> EvaluationConfig:
        for name, data in self.datasets.items():
            if data.stop_at_score is not None and not self.every_steps:
                raise ValueError(
                    f"datasets.{name}.stop_at_score: has no effect with every_steps 0, which "
                    "scores before and after the run only"
                )
        return self


class CriticConfig(Config):
    """A second trainer, with `head: value`, whose values the advantage `gae` is computed from."""

    service: str = Field("critic", description="Its entry of `services`.")
    address: ServerAddress = Field("", description="host:port, instead.")
    loss: LossSpec = LossSpec(name="value", value_clip=0.2)
    warmup_steps: int = Field(
        0, ge=0, description="First steps of the run in which it alone is trained."
    )

    @model_validator(mode="after")
    def _learns_returns(self) -> CriticConfig:
        if self.loss.name != "value":
            raise ValueError(f"loss.name: must be value, is {self.loss.name}")
        if self.address and "service" in self.model_fields_set:
            raise ValueError("service: has no effect with address; leave one of them out")
        return self


class ReplayConfig(Config):
    """Groups that an earlier run trained on, trained on again: its steps, their groups and order.

    Nothing is sampled, so that no router, engine or episode worker is needed.
    """

    run_dir: Path = Field(description="Of the earlier run; only read. Its groups' blobs are there.")
    first_step: int = Field(1, ge=1, lt=LARGEST_COUNT)
    last_step: int | None = Field(
        None, ge=1, lt=LARGEST_COUNT, description="None is the last that it trained."
    )

    @model_validator(mode="after")
    def _steps_are_in_order(self) -> ReplayConfig:
        if self.last_step is not None and self.last_step < self.first_step:
            raise ValueError(f"last_step: {self.last_step} is before first_step {self.first_step}")
        return self


class RetentionConfig(Config):
    """What a run leaves in the shared store while it goes on."""

    cuts: int = Field(
        2, ge=1, description="Kept with their checkpoints; a run resumes from the last."
    )
    blob_grace_seconds: float = Field(
        900, gt=0, description="Blobs that nobody pins stay for so long."
    )
    keep_blobs: bool = Field(
        False, description="Those of groups that were trained on stay, for a replay of the run."
    )


class TraceConfig(Config):
    """What a run keeps to look at: spans in run_dir/traces, about 15 bytes each, and samples."""

    steps: int = Field(200, ge=0, description="The latest files; 0 keeps nothing.")
    spans_per_step: int = Field(
        20_000, ge=0, description="Of samples; groups beyond are only counted."
    )
    samples_every: int = Field(
        10, ge=0, description="Steps between those that leave samples in run_dir/samples; 0: none."
    )
    samples_per_step: int = Field(
        64, ge=1, description="In whole groups, with what the trainer knew of their tokens."
    )

    @model_validator(mode="after")
    def _samples_are_kept(self) -> TraceConfig:
        if not self.steps and {"samples_every", "samples_per_step"} & self.model_fields_set:
            raise ValueError("samples_every: has no effect with steps 0, which keeps nothing")
        if not self.samples_every and "samples_per_step" in self.model_fields_set:
            raise ValueError("samples_per_step: has no effect with samples_every 0")
        return self


class CommonRunConfig(ProcessConfig):
    """The settings that a training run and a supervised one share."""

    run_dir: Path
    services: Path | None = Field(None, description="services.json of `sluice up`.")
    trainer: ServerAddress = Field("", description="host:port, instead of `services`.")
    store: StorePlace | None = Field(
        None,
        description="Shared store, a directory or s3://bucket/prefix; None is that of `services`, "
        "or run_dir/store.",
    )
    store_cache: StoreCacheConfig = StoreCacheConfig()
    takeover_seconds: float | None = Field(
        None,
        gt=0,
        description="For a store that is a bucket: a loop of this run elsewhere that has given no "
        "sign of life for so long is taken for dead. Default: 30.",
    )
    security: SecurityConfig = SecurityConfig()
    server: ServerConfig | None = Field(
        ServerConfig(drain_seconds=1),
        description="The loop's own port, with what it waits for, and its metrics; null is none.",
    )
    seed: int = 0
    initial_checkpoint: str = Field(
        "", description="checkpoints/<id> to begin with; empty is what the trainer holds."
    )
    checkpoint_every: int = Field(50, ge=0, description="Steps; 0 is never.")
    resume: bool = Field(False, description="Go on with what run_dir holds.")
    retention: RetentionConfig = RetentionConfig()
    trackers: TrackersConfig = TrackersConfig()
    service_timeout_seconds: float = Field(300, gt=0, description="For services to be ready.")

    @property
    def store_place(self) -> Place:
        return self.store or self.run_dir / "store"


class RunConfig(CommonRunConfig):
    """A training run. Flags override the file, e.g. `--steps 10`."""

    router: ServerAddress = ""
    weights: PlaceText = Field(
        "", description="Versions of weights, e.g. s3://bucket/prefix; empty is <store>/weights."
    )

    prompts: PromptsConfig | None = None
    environment: EnvironmentConfig | None = None
    environments: dict[str, EnvironmentShare] = Field(
        default_factory=dict, description="Several by name, instead of environment and prompts."
    )
    environment_schedule: str = Field(
        "", description="package.module:function that gives the weights of each step."
    )
    sampling: SamplingConfig
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig | None = None
    teachers: dict[str, TeacherConfig] = Field(
        default_factory=dict, description="By name; for an advantage that learns from one."
    )
    teacher: str = Field(
        "", description="Which of several, where neither environment nor row names one."
    )
    groups_per_step: int = Field(8, gt=0, le=MOST_SAMPLES)
    samples_per_group: int = Field(8, gt=1, le=MOST_SAMPLES)
    max_dropped_in_a_row: int | None = Field(
        None,
        gt=0,
        description="Failed groups without one that finished, until the run ends; None is "
        "4 * groups_per_step, from 8 to 64.",
    )
    filters: tuple[FilterConfig, ...] = Field(
        (), description="A group that one rejects is replaced by another."
    )
    max_filtered_in_a_row: int = Field(
        512, gt=0, description="Then the run ends: nothing is learned."
    )
    over_sampling: float = Field(
        1.0, ge=1, le=16, description="Groups in flight for each that is wanted."
    )
    surplus: Literal["again", "drop"] = Field("again", description="What cancelled groups become.")
    steps: int = Field(100, gt=0)
    stop_at_reward: float | None = Field(None, description="Mean of the last `stop_window` steps.")
    stop_window: int = Field(10, gt=0)
    deterministic: bool = Field(
        False, description="The same weights to the bit, however often it was resumed."
    )
    max_staleness: int = Field(
        0, ge=0, le=LARGEST_STALENESS, description="Steps; 0 is synchronous."
    )
    max_mismatch: float = Field(
        0.2,
        ge=0,
        description="Nats a token, between trainer and engines at the first on-policy step; more "
        "ends the run. 0 is no limit.",
    )
    placement: Literal["separate", "colocated"] = Field(
        "separate",
        description="colocated: trainers and engines share devices, and take turns on them.",
    )
    pause_mode: Literal["wait", "abort", "in_place"] = "in_place"
    straggler_seconds: float = Field(
        60,
        gt=0,
        le=LONGEST_SECONDS,
        description="For the other engines to take new weights, once one has; then the run goes on "
        "without those that have not, until they do.",
    )
    # collective: the trainer's ranks also broadcast each version to the engines at hand, which
    # its transfer.enabled allows; who does not receive it reads it from the store, as all else do
    weight_transport: Literal["store", "collective"] = "store"
    trace: TraceConfig = TraceConfig()
    group_timeout_seconds: float = Field(600, ge=SHORTEST_GROUP, le=LONGEST_GROUP)
    group_attempts: int = Field(
        3,
        gt=0,
        description="Issues of a group, or of a task of an evaluation, until it is dropped.",
    )
    evaluation: EvaluationConfig | None = None
    replay: ReplayConfig | None = Field(
        None, description="Trains on the groups of an earlier run instead of new ones."
    )

    @model_validator(mode="after")
    def _services_are_named(self) -> RunConfig:
        if self.services is None and not (self.trainer and (self.router or self.replay)):
            raise ValueError("give services, or both trainer and router")
        return self

    @model_validator(mode="after")
    def _replay_samples_nothing(self) -> RunConfig:
        if self.replay is None:
            return self
        if "steps" in self.model_fields_set:
            raise ValueError("steps: has no effect with replay; give replay.last_step")
        if self.evaluation is not None:
            raise ValueError("evaluation: has no effect with replay, which has no engines")
        if self.algorithm.reference_every:
            raise ValueError(
                "algorithm.reference_every: is not for replay, which publishes no weights between "
                "steps"
            )
        for key, value, only in (
            ("placement", self.placement, "separate"),
            ("weight_transport", self.weight_transport, "store"),
        ):
            if value != only:
                raise ValueError(f"{key}: must be {only} with replay, which has no engines")
        for name, teacher in self.teachers.items():
            if not teacher.pool:
                raise ValueError(
                    f"teachers.{name}: is a trainer, which a replay does not ask; what engines of "
                    "a pool said is in the groups"
                )
        return self

    @model_validator(mode="after")
    def _spans_are_kept(self) -> RunConfig:
        if self.trackers.otel is not None and not self.trace.steps:
            raise ValueError(
                "trackers.otel: has no effect with trace.steps 0, which keeps no spans"
            )
        return self

    @model_validator(mode="after")
    def _environments_are_named(self) -> RunConfig:
        one = self.prompts is not None, self.environment is not None
        if self.environments and any(one):
            raise ValueError("environments: give them or environment and prompts, not both")
        if not self.environments and not all(one):
            raise ValueError("give environment and prompts, or environments")
        if self.environment_schedule and not self.environments:
            raise ValueError("environment_schedule: has no effect without environments")
        if not self.environments:
            self.sampling.check_least("sampling")
        for name, share in self.environments.items():
            if not PLAIN_NAME.fullmatch(name):
                raise ValueError(f"environments.{name}: {PLAIN_NAME_RULE}")
            own = self.training_sampling(share)
            own.check_least(f"environments.{name}.sampling")
            if own.temperature != self.sampling.temperature:
                raise ValueError(
                    f"environments.{name}.sampling.temperature {own.temperature:g} is not that "
                    f"of the run, {self.sampling.temperature:g}: the loss is of one distribution"
                )
        for name, data in self.evaluation.datasets.items() if self.evaluation else ():
            where = f"evaluation.datasets.{name}.environment"
            if data.environment is None and self.environment is None:
                raise ValueError(f"{where}: name one of environments, or give another")
            if isinstance(data.environment, str) and data.environment not in self.environments:
                known = ", ".join(self.environments) or "none"
                raise ValueError(f"{where}: {data.environment!r} is none of environments: {known}")
            self.sampling_of(data).check_least(f"evaluation.datasets.{name}.sampling")
            if data.samples > 1 and self.sampling_of(data).temperature == 0:
                raise ValueError(f"evaluation.datasets.{name}.samples: {GREEDY_ARE_ALIKE}")
        return self

    @property
    def shares(self) -> dict[str, EnvironmentShare]:
        """The environments by name, whole; one without a name where the run has but one."""
        shares = self.environments
        if self.prompts is not None and self.environment is not None:
            shares = {"": EnvironmentShare(prompts=self.prompts, environment=self.environment)}
        return {
            name: share.model_copy(
                update={
                    "sampling": self.training_sampling(share),
                    "samples_per_group": share.samples_per_group or self.samples_per_group,
                    "group_timeout_seconds": share.group_timeout_seconds
                    or self.group_timeout_seconds,
                    "teacher": share.teacher or self.teacher or self._only_teacher,
                }
            )
            for name, share in shares.items()
        }

    def training_sampling(self, share: EnvironmentShare) -> SamplingConfig:
        """Return how samples of an environment are drawn; what it leaves out is the run's."""
        return self.sampling if share.sampling is None else share.sampling.over(self.sampling)

    @property
    def _only_teacher(self) -> str:
        return next(iter(self.teachers)) if len(self.teachers) == 1 else ""

    def sampling_of(self, data: EvaluationSetConfig) -> SamplingConfig:
        """Return how a data set's answers are drawn; what it leaves out is that of training."""
        training = self.sampling
        if isinstance(data.environment, str):
            training = self.training_sampling(self.environments[data.environment])
        if data.sampling is None:
            return training.model_copy(update=GREEDY)
        return data.sampling.over(training)

    @property
    def environments_by_key(self) -> dict[str, EnvironmentConfig]:
        """Those that train and those of evaluations, by the key that gives each."""
        shares = self.environments.items()
        found = {f"environments.{name}.environment": share.environment for name, share in shares}
        if self.environment is not None:
            found["environment"] = self.environment
        for name, data in self.evaluation.datasets.items() if self.evaluation else ():
            if isinstance(data.environment, EnvironmentConfig):
                found[f"evaluation.datasets.{name}.environment"] = data.environment
        return found

    @property
    def samples_least(self) -> bool:
        """Whether any answer has tokens before which it does not end."""
        trained = [self.training_sampling(share) for share in self.shares.values()]
        datasets = self.evaluation.datasets.values() if self.evaluation else ()
        samplings = [*trained, *map(self.sampling_of, datasets)]
        return any(sampling.min_new_tokens for sampling in samplings)

    def timeout_of(self, data: EvaluationSetConfig) -> float:
        """Seconds of a group of a data set: as long as its environment has in training."""
        own = None
        if isinstance(data.environment, str):
            own = self.environments[data.environment].group_timeout_seconds
        return own or self.group_timeout_seconds

    def environment_of(self, data: EvaluationSetConfig) -> EnvironmentConfig:
        """The environment that scores a data set."""
        if isinstance(data.environment, str):
            return self.environments[data.environment].environment
        found = data.environment or self.environment
        assert found is not None, "checked above"
        return found

    @model_validator(mode="after")
    def _gae_has_a_critic(self) -> RunConfig:
        if self.algorithm.advantage.name == "bradley_terry":
            raise ValueError(
                "algorithm.advantage.name: bradley_terry is of a reward model, which `sluice "
                "reward-model` trains"
            )
        needs = "values" in self.algorithm.columns
        if needs and self.critic is None:
            raise ValueError("critic: the advantage gae needs one")
        if self.critic is not None and not needs and not self.algorithm.plugins:
            raise ValueError(
                f"critic: has no effect for the advantage {self.algorithm.advantage.name}"
            )
        return self

    @property
    def tempered_algorithm(self) -> AlgorithmConfig:
        """The algorithm at the temperature of the sampling."""
        return self.algorithm.at_temperature(self.sampling.temperature)

    @property
    def ignores_staleness(self) -> bool:
        """Whether samples of older weights are taken for those of the weights that train."""
        loss = self.algorithm.loss
        corrected = loss.importance is not None or bool(loss.corrections)
        return self.max_staleness > 0 and loss.old_logprobs == "old" and not corrected

    @model_validator(mode="after")
    def _has_one_temperature(self) -> RunConfig:
        sampled, trained = self.sampling.temperature, self.algorithm.loss.temperature
        if sampled == 0:
            raise ValueError(
                "sampling.temperature: must be above 0 to train, since the greedy answers to a "
                "prompt are all the same"
            )
        if trained is not None and trained != sampled:
            raise ValueError(
                f"algorithm.loss.temperature {trained:g} contradicts sampling.temperature "
                f"{sampled:g}: the loss is of the distribution that was sampled from; leave the "
                "former out"
            )
        return self

    @model_validator(mode="after")
    def _estimator_finds_its_columns(self) -> RunConfig:
        advantage = self.algorithm.advantage
        for column in _NOT_OF_A_RUN:
            if column in known_columns(advantage):
                raise ValueError(
                    f"algorithm.advantage.name: advantage {advantage.name} reads the column "
                    f"{column} here, which no service of a run computes; it takes a loop of "
                    "one's own over the trainer (PutColumns)"
                )
        return self

    @model_validator(mode="after")
    def _teachers_are_named(self) -> RunConfig:
        advantage, top_count = self.algorithm.advantage, self.algorithm.teacher_top_count
        if top_count and not self.teachers:
            raise ValueError("teachers: algorithm.loss.name learns from one; name it")
        if advantage.has_teacher and not self.teachers:
            key = "name" if advantage.name == "distillation" else "teacher_coefficient"
            raise ValueError(f"teachers: algorithm.advantage.{key} learns from one; name it")
        learns = advantage.has_teacher or top_count or self.algorithm.plugins
        if self.teachers and not learns:
            raise ValueError(
                "teachers: no part of the algorithm learns from one; set advantage.name: "
                "distillation, or advantage.teacher_coefficient, or a loss topk_*"
            )
        for name in self.teachers:
            if not PLAIN_NAME.fullmatch(name):
                raise ValueError(f"teachers.{name}: {PLAIN_NAME_RULE}")
        named = {"teacher": self.teacher}
        named |= {f"environments.{n}.teacher": s.teacher for n, s in self.environments.items()}
        for key, name in named.items():
            if name and name not in self.teachers:
                known = ", ".join(self.teachers) or "none"
                raise ValueError(f"{key}: {name!r} is none of teachers: {known}")
        asked = [name for name, teacher in self.teachers.items() if teacher.pool]
        if asked and self.sampling.temperature != 1:
            raise ValueError(
                f"teachers.{asked[0]}.pool: engines score at temperature 1, and this run samples "
                f"at {self.sampling.temperature:g}; let a trainer be the teacher"
            )
        return self

    def check_warmup(self) -> None:
        """Raises ValueError where the critic alone is trained."""
        if self.critic is not None and self.critic.warmup_steps >= self.steps:
            raise ValueError(
                f"critic.warmup_steps: {self.critic.warmup_steps} leave none of the {self.steps} "
                "steps to the policy"
            )

    @model_validator(mode="after")
    def _counts_have_an_effect(self) -> RunConfig:
        # of a replay, the groups are not known yet
        if self.replay is None and self.algorithm.mini_batches > self.groups_per_step:
            raise ValueError(
                f"algorithm.mini_batches: {self.algorithm.mini_batches} cannot be made of "
                f"groups_per_step {self.groups_per_step}"
            )
        if self.algorithm.advantage.name == "dpo":
            for name, share in self.shares.items():
                if share.samples_per_group != 2:
                    where = f"environments.{name}." if name else ""
                    raise ValueError(
                        f"{where}samples_per_group: advantage dpo is of two answers to a prompt, "
                        f"not of {share.samples_per_group}"
                    )
        if self.replay is None:  # nor are its steps
            self.check_warmup()
        if self.stop_at_reward is None and "stop_window" in self.model_fields_set:
            raise ValueError("stop_window: has no effect without stop_at_reward")
        return self

    @model_validator(mode="after")
    def _deterministic_is_synchronous(self) -> RunConfig:
        if self.deterministic and self.max_staleness:
            raise ValueError(
                "deterministic needs max_staleness 0: which weights an asynchronous sample "
                "comes from is a matter of time"
            )
        return self

    @model_validator(mode="after")
    def _colocated_takes_turns(self) -> RunConfig:
        if self.placement != "colocated":
            return self
        if self.max_staleness:
            raise ValueError(
                "placement: colocated needs max_staleness 0: trainer and engines take turns, so "
                "nothing is sampled while the trainer works"
            )
        if "straggler_seconds" in self.model_fields_set:
            raise ValueError(
                "straggler_seconds: has no effect with placement colocated: trainers work once "
                "every engine has given its device back"
            )
        if self.over_sampling > 1:
            raise ValueError(
                "placement: colocated needs over_sampling 1: engines sleep as soon as a step has "
                "its groups"
            )
        if self.weight_transport != "store":
            raise ValueError(
                f"placement: colocated needs weight_transport store, not {self.weight_transport}: "
                "engines sleep while the trainer publishes"
            )
        if self.evaluation and self.evaluation.is_told_to_run_beside:
            raise ValueError(
                "placement: colocated needs evaluation.beside_training false: engines sleep while "
                "the trainer works"
            )
        return self

    @model_validator(mode="after")
    def _deterministic_takes_all(self) -> RunConfig:
        if self.deterministic and self.over_sampling > 1:
            raise ValueError(
                "deterministic needs over_sampling 1: which groups finish first is a matter of time"
            )
        if self.deterministic and self.evaluation and self.evaluation.is_told_to_run_beside:
            raise ValueError(
                "deterministic needs evaluation.beside_training false: what is sampled beside "
                "training is a matter of time"
            )
        if self.surplus == "drop" and self.over_sampling == 1:
            raise ValueError("surplus: has no effect without over_sampling")
        if "max_filtered_in_a_row" in self.model_fields_set and not self.filters:
            raise ValueError("max_filtered_in_a_row: has no effect without filters")
        return self


class RowsConfig(Config):
    """A JSONL or Parquet file, whose rows are of conversations or of preferences.

    `sluice sft` takes `messages` (and `tools`), or `prompt` and `answer`; `sluice dpo` and `sluice
    reward-model` `chosen` and `rejected`, both as texts or both as messages, with their `prompt` or
    without, and the latter a `margin`.
    """

    file: Path
    shuffle: bool = Field(True, description="Anew every epoch, from the seed.")


class HeldOutConfig(Config):
    """Rows that nothing is learned of, in a file of their own: what they tell of the weights."""

    file: Path
    every_steps: int = Field(0, ge=0, description="0 is before and after training only.")


class RowsRunConfig(CommonRunConfig):
    """What the runs on rows of a file share."""

    kind: ClassVar[str]
    head: ClassVar[str] = "policy"  # of the trainer

    tokenizer: Path = Field(description="Model directory with tokenizer and chat template.")
    template: dict[str, JsonValue] = Field(
        default_factory=dict, description="Variables of the chat template, by its own names."
    )
    rows: RowsConfig
    held_out: HeldOutConfig | None = None
    rows_per_step: int = Field(32, gt=0)
    epochs: int = Field(1, gt=0, description="Every row once in each.")
    steps: int | None = Field(None, gt=0, description="End here instead, if that is earlier.")

    @property
    def algorithm(self) -> AlgorithmConfig:
        """What is done with the rows of a step."""
        raise NotImplementedError

    @property
    def shape(self) -> dict[str, JsonValue]:
        """Settings of the algorithm that no resumed run may change, as far as they are set."""
        raise NotImplementedError

    @model_validator(mode="after")
    def _is_not_replayed(self) -> Self:
        if self.retention.keep_blobs:
            raise ValueError(
                "retention.keep_blobs: has no effect on rows of a file, whose run no other replays"
            )
        return self

    @model_validator(mode="after")
    def _has_no_trace(self) -> Self:
        if self.trackers.otel is not None:
            raise ValueError("trackers.otel: has no effect, a run on rows of a file keeps no trace")
        return self

    @model_validator(mode="after")
    def _trainer_is_named(self) -> Self:
        if self.services is None and not self.trainer:
            raise ValueError("give services or trainer")
        return self


class SftConfig(RowsRunConfig):
    """Supervised training on conversations. Flags override the file, e.g. `--epochs 3`."""

    kind = "sft"

    loss: LossSpec = LossSpec(name="sft")

    @field_validator("loss")
    @classmethod
    def _is_supervised(cls, loss: LossSpec) -> LossSpec:
        if loss.name not in SUPERVISED:
            raise ValueError(f"rows of a file have no rewards for loss {loss.name}; use sft")
        return loss

    @property
    def algorithm(self) -> AlgorithmConfig:
        return AlgorithmConfig(loss=self.loss)

    @property
    def shape(self) -> dict[str, JsonValue]:
        return {"loss": self.loss.model_dump(mode="json", exclude_defaults=True)}


class PairsConfig(RowsRunConfig):
    """What training on preferences has beside other rows: settings of an advantage and its loss."""

    estimator: ClassVar[str]
    loss_name: ClassVar[str]

    preference: PluginSettings

    @property
    def algorithm(self) -> AlgorithmConfig:
        settings = self.preference.model_dump(exclude_defaults=True)
        return AlgorithmConfig(
            advantage=AdvantageSpec(name=self.estimator, settings=settings),
            # a sum of tokens, and over two answers a pair the mean of pairs
            loss=LossSpec(name=self.loss_name, aggregation="constant", constant_length=0.5),
        )

    @property
    def shape(self) -> dict[str, JsonValue]:
        return {"preference": self.preference.model_dump(mode="json", exclude_defaults=True)}


class DpoConfig(PairsConfig):
    """Training on preferences, by DPO. Flags override the file, e.g. `--preference.beta 0.2`.

    A step is one optimizer step on the mean loss of `rows_per_step` pairs.
    """

    kind = "dpo"
    estimator, loss_name = "dpo", "reinforce"

    preference: DpoSettings = DpoSettings()


class RewardModelRunConfig(PairsConfig):
    """Training of a reward model on preferences. Flags override the file, e.g. `--epochs 3`.

    A step is one optimizer step on the mean loss of `rows_per_step` pairs, on a trainer with
    `head: reward`.
    """

    kind = "reward-model"
    head = "reward"
    estimator, loss_name = "bradley_terry", "linear_value"

    preference: BradleyTerrySettings = BradleyTerrySettings()
