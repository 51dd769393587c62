"""The KL term and the reference policy."""

from __future__ import annotations

from pydantic import BaseModel

from backend.config.loss_menu import kl_estimators
from backend.config.setting import setting
from backend.config.settings.limits import NEVER


class ReferenceFields(BaseModel):
    """The KL term and the reference policy: the fields of `backend.config.config.Config` about it."""

    # fmt: off
    beta: float = setting(0.1, "preference", "Beta (KL weight)", "Holds the model near the reference model. 0 turns it off and saves the "
                          "reference pass; then only Log KL measures the KL for the charts, at the price of that pass.", ge=0, le=1_000_000,
                          known_as=("Beta", "KL weight"))
    reference_model_path: str = setting("", "preference", "Reference model path", "The model to stay near. Empty means the base "
                                        "model as it was before training, without a second copy in memory under LoRA.", kind="model",
                                        used_by=("task",), known_as=("Reference model",))
    sync_ref_model: bool = setting(False, "preference", "Reference follows", "Moves the reference towards the policy now and then.",
                                   advanced=True)
    ref_model_mixup_alpha: float = setting(0.6, "preference", "Mix-up", "Share of the policy in the new reference.", gt=0, le=1,
                                           advanced=True, when=("sync_ref_model", (True,)))
    ref_model_sync_steps: int = setting(512, "preference", "Sync every", "Updates between two moves of the reference.", ge=1, le=NEVER,
                                        unit="updates", advanced=True, when=("sync_ref_model", (True,)))
    log_kl: bool = setting(False, "preference", "Log KL at weight 0", "Measures the KL with Schulman's estimator although it is not "
                           "used, for the charts alone, at the price of a reference pass.", advanced=True, when=("beta", (0, 0.0)))
    kl_estimator: str = setting(
        "k3", "preference", "KL estimator", "The formula of the KL term, for each token. The default is what learns; the other is for "
        "those who want the documented formula to the letter.", advanced=True,
        choices=[(entry.key, entry.name, entry.sentence) for entry in kl_estimators()],
    )
    use_bias_correction_kl: bool = setting(True, "preference", "Bias-corrected KL", "Multiplies the KL estimate by the "
                                           "ratio, which makes its gradient right off-policy (TRL's present default).", advanced=True,
                                           when=("kl_estimator", ("k3",)))
    ratio_against: str = setting(
        "old", "preference", "Ratio against", "Which policy stands below the line of the importance ratio.", advanced=True,
        choices=[("old", "Policy that sampled", "As in the papers and TRL."),
                 ("reference", "Reference model", "As in the guide of MLX LoRA Studio: clipping ties the policy to the reference, so it "
                  "stops learning once it is Epsilon away.")],
    )
    # fmt: on
