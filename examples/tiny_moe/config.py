"""Shape and constants of the tiny MoE, kept in the header of its weights file, and the error of this package."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields


class TinyMoeError(Exception):
    """Root of what this package raises: a message says what was wrong, with the numbers, and what to do.

    It stands apart from the service's own error tree on purpose: the model is also the oracle that generated tokens are
    compared with, so it must not run any other code of the project.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyMoeConfig:
    """Hyper-parameters of one model.

    >>> TinyMoeConfig().head_width
    24
    """

    vocabulary: int = 256
    width: int = 96
    num_layers: int = 4
    num_heads: int = 4
    context: int = 256
    num_experts: int = 32
    top_k: int = 4
    expert_width: int = 64
    rope_base: float = 10_000.0
    norm_epsilon: float = 1e-6
    temperature: float = 0.8
    sampling_seed: int = 0

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built.

        Raises:
            TinyMoeError: a size is not positive, or sizes do not fit together.
        """
        sizes = (
            "vocabulary",
            "width",
            "num_layers",
            "num_heads",
            "context",
            "num_experts",
            "top_k",
            "expert_width",
        )
        for name in sizes:
            if getattr(self, name) < 1:
                raise TinyMoeError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % (2 * self.num_heads):
            raise TinyMoeError(
                f"width {self.width} does not split into {self.num_heads} heads of even width; "
                f"choose a multiple of {2 * self.num_heads}"
            )
        if self.top_k > self.num_experts:
            raise TinyMoeError(f"top_k {self.top_k} exceeds the {self.num_experts} experts; choose at most that many")
        if self.temperature <= 0.0:
            raise TinyMoeError(f"temperature is {self.temperature}; it must be above 0")

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.num_heads

    def to_json(self) -> str:
        """Text for the header of a weights file; `from_json` reads it back."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> TinyMoeConfig:
        """Read what `to_json` wrote.

        Raises:
            TinyMoeError: not JSON, not an object, or with fields that this version does not know.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise TinyMoeError(f"the model configuration is not JSON ({error}); train or fetch the weights again") from error
        known = {field.name for field in fields(cls)}
        if not isinstance(values, dict) or set(values) != known:
            found = sorted(values) if isinstance(values, dict) else type(values).__name__
            raise TinyMoeError(f"the model configuration has {found}, expected exactly {sorted(known)}")
        return cls(**values)
