"""All that is found in the facts, and the verdict."""

from __future__ import annotations

from gpuprefetch import _doctor_device_findings, _doctor_host_findings
from gpuprefetch._doctor_facts import SEVERITIES, Facts, Finding

CHECKS = (*_doctor_device_findings.CHECKS, *_doctor_host_findings.CHECKS)


def find(facts: Facts) -> list[Finding]:
    """The worst first."""
    found = [finding for check in CHECKS if (finding := check(facts)) is not None]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def works(facts: Facts, findings: list[Finding]) -> bool:
    """True if the device can be used, loading runs ahead and, with a CUDA device, copies overlap."""
    return facts.loads_ahead is True and all(finding.severity != "error" for finding in findings)
