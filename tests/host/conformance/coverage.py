"""What there are rules for: every section of NCCL's rules, and what is left out and why."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conformance.rules import Rule

SECTIONS = {
    "0": "The library: version, result texts",
    "1 rule 1": "Start nests",
    "1 rule 2": "Every operation has a group of its own",
    "1 rule 3": "Errors stick, the last one wins",
    "1 rule 4": "End at depth 0",
    "1 rule 5": "An inner End",
    "1 rule 6": "A failed group launches nothing",
    "1 rule 7": "What poisons a group",
    "1 rule 8": "Blocking and non-blocking communicators in one group",
    "1 rule 9": "The end of a non-blocking group",
    "1 rule 10": "The thread's device",
    "1 rule 11": "Jobs",
    "1 rule 12": "Order inside a group",
    "1 rule 13": "Creation and operations in one group",
    "1 rule 14": "Captured and uncaptured in one group",
    "1.1": "Leaked depth",
    "1.2": "Simulation",
    "2": "Calls that wait",
    "3.1": "States",
    "3.2": "The gate before calls",
    "3.3": "Non-blocking communicators; dead handles",
    "3.4": "Errors of communicators",
    "3.5": "GetAsyncError",
    "3.6": "Threads",
    "3.7": "The last error",
    "4.1": "Unique ids",
    "4.2": "Creation",
    "4.3": "InitAll",
    "4.4": "Several ranks on a device",
    "5.1": "ncclConfig_t: which structs are taken",
    "5.2": "ncclConfig_t: values",
    "6.1": "Split",
    "6.2": "Shrink",
    "6.3": "Grow",
    "7": "Finalize, Destroy, Abort, Revoke",
    "8": "Suspend, Resume, MemStats",
    "9.1": "Collectives: the order of checks",
    "9.2": "Collectives: what is read and written",
    "9.3": "Collectives of no elements",
    "9.4": "Communicators of one rank",
    "9.5": "Data types",
    "10": "Arithmetic",
    "11": "Operators",
    "12": "Point to point",
    "13": "First contact",
    "14": "Streams and order",
    "15": "Capture",
    "16": "Memory, registration, windows, properties",
    "17": "One-sided operations",
    "18": "Collectives with a config",
    "19": "Encryption",
    "20": "Parameters",
    "21": "Which device a call uses",
    "22": "Plug-ins",
}

# Sections without a rule.
LEFT_OUT = {
    "1 rule 12": "no program may rely on it, and what it does to data shows in no result",
    "1 rule 13": "NCCL forbids it in words and checks nothing",
    "22": "the host engine loads no plug-ins",
}


def table(rules: list[Rule]) -> str:
    """Section, title, and how many rules there are of each kind, or why there are none."""
    lines = []
    for section, title in SECTIONS.items():
        kinds = [rule.needs.value for rule in rules if rule.section == section]
        counts = ", ".join(f"{kinds.count(kind)} ({kind})" for kind in dict.fromkeys(kinds))
        lines.append(
            f"{section:10} {title:55} {counts or 'none: ' + LEFT_OUT.get(section, '?')}"
        )
    return "\n".join(lines)


def gaps(rules: list[Rule]) -> list[str]:
    """Sections that have neither rules nor a reason, or both; rules of no section."""
    used = {rule.section for rule in rules}
    return (
        [
            f"{s}: no rule, and no reason"
            for s in SECTIONS
            if s not in used and s not in LEFT_OUT
        ]
        + [f"{s}: rules, and a reason for none" for s in LEFT_OUT if s in used]
        + [f"{s}: not a section" for s in sorted(used - set(SECTIONS))]
    )
