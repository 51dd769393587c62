"""The coefficient of the entropy bonus: constant, or adapted after each update so that the policy's entropy does not fall below a
target (Skywork-OR1, arXiv:2505.22312, with TRL's step and bounds). The bonus itself is a term of `losses.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

STEP, MINIMUM, MAXIMUM = 0.005, 0.0, 1.0
"""Of the adaptive coefficient."""


@dataclass(slots=True)
class EntropyBonus:
    """`value` is the coefficient before the comparison with the target; `entropy` (nats) was measured at the last update."""

    value: float
    adaptive: bool = False
    target: float = 0.0
    entropy: float | None = None

    @property
    def on(self) -> bool:
        return self.adaptive or self.value > 0

    @property
    def coefficient(self) -> float:
        """The next update's: an adaptive bonus applies only while the entropy is at or below its target."""
        above = self.entropy is not None and self.entropy > self.target
        return 0.0 if self.adaptive and above else self.value

    def observe(self, entropy: float) -> None:
        """Take an update's mean entropy; an adaptive coefficient grows by one step at or below the target, else shrinks."""
        self.entropy = entropy
        if self.adaptive:
            adapted = self.value + (STEP if entropy <= self.target else -STEP)
            self.value = min(MAXIMUM, max(MINIMUM, adapted))

    def state(self) -> list[float | None]:
        """The values that a checkpoint keeps."""
        return [self.value, self.entropy]

    def restore(self, state: list[float | None]) -> None:
        """Put `state` back; a checkpoint without one leaves everything as configured."""
        if state:
            self.value, self.entropy = state[0] or 0.0, state[1]
