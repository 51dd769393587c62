"""The coefficient of the entropy bonus: constant, or moved after each update to hold an entropy (Skywork-OR1,
arXiv:2505.22312, as TRL does it).
"""

from __future__ import annotations

from dataclasses import dataclass

STEP, LEAST, MOST = 0.005, 0.0, 1.0


@dataclass(slots=True)
class EntropyBonus:
    """`value` is what the adaptive coefficient stands at; `entropy` (nats) was measured at the last update."""

    value: float
    adaptive: bool = False
    target: float = 0.0
    entropy: float | None = None

    @property
    def on(self) -> bool:
        return self.adaptive or self.value > 0

    @property
    def coefficient(self) -> float:
        """What the next update uses: an adaptive bonus applies only while the entropy is at or below its target."""
        above = self.entropy is not None and self.entropy > self.target
        return 0.0 if self.adaptive and above else self.value

    def observe(self, entropy: float) -> None:
        """Note an update's mean entropy, and move an adaptive coefficient by one step towards the target."""
        self.entropy = entropy
        if self.adaptive:
            moved = self.value + (STEP if entropy <= self.target else -STEP)
            self.value = min(MOST, max(LEAST, moved))

    def state(self) -> list[float | None]:
        return [self.value, self.entropy]

    def restore(self, state: list[float | None]) -> None:
        if state:
            self.value, self.entropy = state[0] or 0.0, state[1]
