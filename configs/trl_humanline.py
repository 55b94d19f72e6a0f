"""Humanline DPO, KTO and GRPO for TRL (tested with TRL 1.16). Copy this file next to your script; it needs
nothing else from this repository.

Each trainer takes the arguments of the TRL trainer that it extends, plus `sync_k`, `log_eps_p` and
`log_eps_r`.

    from datasets import load_dataset
    from trl import DPOConfig
    from trl_humanline import HumanlineDPOTrainer

    trainer = HumanlineDPOTrainer(
        "Qwen/Qwen2.5-0.5B-Instruct",
        args=DPOConfig("dpo-humanline", learning_rate=5e-6),
        train_dataset=load_dataset("trl-lib/ultrafeedback_binarized", split="train"),
        sync_k=4,  # for LoRA, also pass peft_config=LoraConfig()
    )
    trainer.train()

    from datasets import load_dataset
    from trl import KTOConfig
    from trl_humanline import HumanlineKTOTrainer

    trainer = HumanlineKTOTrainer(
        "Qwen/Qwen2.5-0.5B-Instruct",
        args=KTOConfig("kto-humanline", learning_rate=5e-6),
        train_dataset=load_dataset("trl-lib/kto-mix-14k", split="train"),
        sync_k=4,
    )
    trainer.train()

    from datasets import load_dataset
    from trl import GRPOConfig
    from trl.rewards import accuracy_reward
    from trl_humanline import HumanlineGRPOTrainer

    trainer = HumanlineGRPOTrainer(
        "Qwen/Qwen2.5-0.5B-Instruct",
        reward_funcs=accuracy_reward,
        args=GRPOConfig("grpo-humanline", steps_per_generation=64),  # new completions every 64 steps
        train_dataset=load_dataset("trl-lib/DeepMath-103K", split="train"),
        sync_k=12,
    )
    trainer.train()

Two things change:

- Every `sync_k` optimizer steps, the reference is set to the policy, after the gradients are clipped and
  before the optimizer's step, so it lags the policy by one step. (TRL's `sync_ref_model` syncs after the
  step; with k = 1, every log-ratio would be zero.) Tune `sync_k` together with the learning rate.
- Each token's log-ratio to the reference is clipped to [log_eps_p, log_eps_r] before the loss sees it, also
  in KTO's z₀. In GRPO, both the ratio and the KL are measured against the synced reference, and only the KL
  uses the raw log-ratios.

Everything else is TRL's. A new metric, `unclamped`, is the fraction of completion tokens whose log-ratio lies
within the clip.

The trainers work with LoRA and other PEFT methods (only the trained weights are stored twice), gradient
accumulation, DDP, and resuming from checkpoints. What cannot work is an error: sharded weights (FSDP,
DeepSpeed), precomputed reference log-probs, a `ref_model` of your own, and a few of TRL's losses.

To train as humanline.py does, set `use_bias_correction_kl=False` if you use GRPO's KL, which TRL multiplies by
the ratio. KTO's z₀ stays a mean over one microbatch (of all processes), as in TRL.
"""

import inspect
import os

import torch
from torch import Tensor
from torch.func import functional_call
from transformers import TrainerCallback
from trl import DPOTrainer, GRPOTrainer, KTOTrainer


def humanline_clip(log_ratio: Tensor, log_eps_p: float = -1.5, log_eps_r: float = 1.5) -> Tensor:
    """Humanline clipping of (N, T) token log-ratios d: clamp(d, log ε_P, log ε_R), in nats. Outside the
    interval the gradient is 0.

    >>> humanline_clip(torch.tensor([[-4.0, 0.5, 2.0]]))
    tensor([[-1.5000,  0.5000,  1.5000]])
    """
    return log_ratio.clamp(log_eps_p, log_eps_r)


class Reference:
    """The policy as of the last sync, π_ref. It is called like the policy.

    TRL's second model holds its weights, if there is one. With PEFT, and for GRPO without a KL, there is none:
    then a copy of the policy's trained weights is kept, and replaces them during a call.
    """

    def __init__(self, policy: torch.nn.Module, model: torch.nn.Module | None):
        self.policy, self.model, self.syncs = policy, model, 0
        if model is not None:
            self.weights = {name: p.detach() for name, p in model.named_parameters()}
        else:
            trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
            self.weights = {name: p.detach().clone() for name, p in trained}
        self.sync()

    @torch.no_grad()
    def sync(self) -> None:
        for name, weight in self.weights.items():
            weight.copy_(self.policy.get_parameter(name))
        self.syncs += 1

    @torch.no_grad()
    def __call__(self, **batch):
        if self.model is not None:
            return self.model(**batch)
        was_training = self.policy.training
        self.policy.eval()  # without dropout
        try:
            return functional_call(self.policy, self.weights, (), batch)
        finally:
            self.policy.train(was_training)


class SyncBeforeStep(TrainerCallback):
    """Sync after the gradients are clipped and before the optimizer's step. Steps count from 1."""

    def __init__(self, reference: Reference, sync_k: int):
        self.reference, self.sync_k = reference, sync_k

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if self.sync_k and (state.global_step + 1) % self.sync_k == 0:
            self.reference.sync()


CLASHES = {
    "sync_ref_model": "it syncs after the optimizer's step; sync_k syncs before it",
    "precompute_ref_log_probs": "the reference changes during training",
    "off_policy_mask_threshold": "it needs the policy that sampled, not the reference",
}
RAW_LOSSES = {"aot", "cispo", "vespo"}


class Humanline:
    """What the three trainers share. TRL computes log-ratios as logps - ref_logps, so we pass it

        ref_logps = logps - clip(logps - log π_ref)

    together with its gradient: the log-ratios of every loss are then the clipped ones.

    Args:
        sync_k: set the reference to the policy every k optimizer steps; 0: never.
        log_eps_p, log_eps_r: bounds of the clip, in nats.
    """

    def __init__(self, *args, sync_k: int = 24, log_eps_p: float = -1.5, log_eps_r: float = 1.5, **kwargs):
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        self.refuse(given.get("args"), given.get("ref_model"))
        if sync_k < 0 or not log_eps_p <= 0 <= log_eps_r:
            raise ValueError(f"{type(self).__name__} needs sync_k >= 0 and log_eps_p <= 0 <= log_eps_r, not "
                             f"{sync_k}, {log_eps_p} and {log_eps_r}.")
        super().__init__(*args, **kwargs)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled or self.accelerator.parallelism_config:
            raise ValueError(f"{type(self).__name__} cannot sync sharded weights. Launch with DDP, not with "
                             "FSDP, DeepSpeed or a parallelism_config.")
        if "ref" in getattr(self.model, "peft_config", {}):
            self.model.delete_adapter("ref")  # TRL's frozen copy of the adapter that the model came with
        self.ref_model = Reference(self.model, self.ref_model)
        self.bounds = log_eps_p, log_eps_r
        self.add_callback(SyncBeforeStep(self.ref_model, sync_k))

    def refuse(self, args, ref_model) -> None:
        """Raise a ValueError for settings that contradict a synced reference or the clip."""
        is_set = lambda name: getattr(args, name, None) is not None and getattr(args, name) is not False
        reasons = {name: reason for name, reason in CLASHES.items() if is_set(name)}
        if ref_model is not None:
            reasons["ref_model"] = "the first reference is the initial policy"
        losses = getattr(args, "loss_type", [])
        for loss in RAW_LOSSES.intersection([losses] if isinstance(losses, str) else losses):
            reasons[f"loss_type={loss!r}"] = "its gradient passes by the clipped log-ratios"
        for name, reason in reasons.items():
            raise ValueError(f"{type(self).__name__} does not work with {name}: {reason}. Leave it out.")

    def perceive(self, outputs, reference: Tensor) -> Tensor:
        """Returns what we pass to TRL as the reference's log-probs, (N, T); see above."""
        with torch.enable_grad():  # TRL runs the reference under no_grad
            d = outputs.log_probs - reference
            perceived = outputs.log_probs - humanline_clip(d, *self.bounds)
        if perceived.requires_grad:  # not KTO's mismatched pairs
            low, high = self.bounds
            unclamped = (low <= d) & (d <= high) & outputs.label_mask
            counts = self.accelerator.reduce(torch.stack([unclamped.sum(), outputs.label_mask.sum()]))
            self._metrics["train"]["unclamped"].append((counts[0] / counts[1].clamp(min=1)).item())
        return perceived

    def _save_optimizer_and_scheduler(self, output_dir):
        super()._save_optimizer_and_scheduler(output_dir)
        if self.args.should_save:
            torch.save(self.ref_model.weights, os.path.join(output_dir, "humanline_reference.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint:
            saved = torch.load(os.path.join(checkpoint, "humanline_reference.pt"), map_location="cpu")
            with torch.no_grad():
                for name, weight in self.ref_model.weights.items():
                    weight.copy_(saved[name])


class HumanlinePreference(Humanline):
    def _compute_loss(self, model, inputs, return_outputs):
        passes = {}  # the policy's outputs by the id of their tokens; TRL runs the reference after the policy

        def policy(**batch):
            outputs = passes[id(batch["input_ids"])] = model(**batch)
            return outputs

        def reference(**batch):
            outputs = synced(**batch)
            outputs.log_probs = self.perceive(passes[id(batch["input_ids"])], outputs.log_probs)
            return outputs

        synced, self.ref_model = self.ref_model, reference
        try:
            return super()._compute_loss(policy, inputs, return_outputs)
        finally:
            self.ref_model = synced


class HumanlineDPOTrainer(HumanlinePreference, DPOTrainer):
    """TRL's `DPOTrainer` with humanline. See `Humanline` for the additional arguments."""


class HumanlineKTOTrainer(HumanlinePreference, KTOTrainer):
    """TRL's `KTOTrainer` with humanline. See `Humanline` for the additional arguments."""


class HumanlineGRPOTrainer(Humanline, GRPOTrainer):
    """TRL's `GRPOTrainer` with humanline. See `Humanline` for the additional arguments.

    The reference's log-probs are computed with each loss instead of after sampling, because a sync may fall
    in between. Those of the policy that sampled are only needed for TRL's vLLM correction.
    """

    def _get_per_token_logps_and_entropies(
            self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs):
        is_for_vllm = model is self.model and self.use_vllm and self.vllm_importance_sampling_correction
        if model in (self.model, self.ref_model) and not is_for_vllm:  # after sampling
            return torch.zeros(len(input_ids), logits_to_keep, device=input_ids.device), None, None
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, *args, **kwargs)

    def _compute_loss(self, model, inputs):
        given = dict(inputs)

        def policy(**batch):
            outputs = model(**batch)
            width = inputs["completion_ids"].size(1)
            if inputs.get("syncs") != self.ref_model.syncs:  # else known, from the iteration before
                inputs["reference"] = self.ref_model(**batch).log_probs
                inputs["syncs"] = self.ref_model.syncs
            given["ref_per_token_logps"] = inputs["reference"][:, -width:]
            given["old_per_token_logps"] = self.perceive(outputs, inputs["reference"])[:, -width:]
            return outputs

        return super()._compute_loss(policy, given)
