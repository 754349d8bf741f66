"""What is known of a machine, as plain values, and how something found in it is told."""

from __future__ import annotations

import dataclasses

from gpuprefetch._doctor_self_test import Overlap

SEVERITIES = ("error", "slow", "note")
"""It does not work; overlap is prevented or speed lost; good to know."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that stands in the way, or may."""

    severity: str
    name: str
    what: str
    why: str
    do: str


@dataclasses.dataclass(frozen=True)
class Facts:
    """None is "unknown", or "there is none"."""

    gpuprefetch: str | None = None
    torch: str | None = None
    torch_cuda: str | None = None
    torch_hip: str | None = None
    torch_debug: bool | None = None
    torch_accelerator: str | None = None  # the type of device that it was built for, beside the CPU
    python: str | None = None
    python_bits: int | None = None
    python_debug: bool | None = None
    gil: bool | None = None
    platform: str | None = None
    sys_platform: str | None = None
    cpus: int | None = None  # that the affinity allows
    container_cpus: float | None = None  # that the control group grants
    recommended_threads: int | None = None
    threads: dict[str, int] | None = None  # by the number of workers that was requested
    intra_op_threads: int | None = None
    environment: dict[str, str] | None = None  # of the variables that matter, those that are set
    openmp: list[str] | None = None
    commit_free_bytes: int | None = None
    container_free_bytes: int | None = None
    nvidia_driver: bool | None = None
    driver_cuda: str | None = None  # the newest that the driver knows
    cards: list[dict[str, str | None]] | None = None
    compiler: str | None = None  # in case it is installed again
    extension_torch: str | None = None
    extension_compiler: str | None = None
    extension_optimized: bool | None = None
    extension_error: str | None = None

    # From here on the device has been asked.
    device: str | None = None
    device_name: str | None = None
    device_uuid: str | None = None
    device_count: int | None = None
    device_bytes: int | None = None
    device_error: str | None = None  # why torch can't use the kind of device that it was built for
    pinned: dict[str, str] | None = None  # by size: "ok", or the refusal
    loads_ahead: bool | None = None
    overlap: Overlap | None = None
    failures: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def card(self) -> dict[str, str | None]:
        """What nvidia-smi says of the device in use."""
        cards = self.cards or []
        ours = [card for card in cards if self.device_uuid and card["uuid"] == f"GPU-{self.device_uuid}"]
        if not ours and len(cards) == 1:
            ours = cards
        return ours[0] if ours else {}

    @property
    def link(self) -> str | None:
        """Such as "gen 4 of 5, x16 of x16"; None where nvidia-smi does not say."""
        card = self.card
        if card.get("link_generation") is None or card.get("link_width") is None:
            return None
        most = [card.get(name) or "?" for name in ("link_generation_max", "link_width_max")]
        return f"gen {card['link_generation']} of {most[0]}, x{card['link_width']} of x{most[1]}"

    @property
    def cores(self) -> float | None:
        """CPUs' worth of time that this process can get."""
        return min((cores for cores in (self.cpus, self.container_cpus) if cores is not None), default=None)

    def is_on(self, variable: str) -> bool:
        value = (self.environment or {}).get(variable, "")
        return value.strip().lower() not in ("", "0", "false", "f", "no", "n", "off")


def gibibytes(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
