"""What tests of RoPE plans share."""

from __future__ import annotations


def settings(kind):
    """The `rope:` setting of a kind. `base` needs a value."""
    return {"type": "base", "theta": 2e8} if kind == "base" else kind


def words(plan, *severities):
    """The findings of a plan in one text, of all severities or of those given."""
    return " | ".join(str(each) for each in plan.findings if not severities or each.severity in severities)
