"""An Alertmanager's configuration for the alerts: an example, since one serves many pipelines."""

from __future__ import annotations

from typing import Any

from triptych.base.explained import ExplainedValue

ON_CALL = "https://on-call.example.com/triptych"
TICKETS = "https://tickets.example.com/triptych"


def alertmanager(
    on_call: str = ON_CALL, tickets: str = TICKETS, wait: str = "30s", interval: str = "5m"
) -> dict[str, Any]:
    """Who hears of which alert.

    Args:
        on_call: address of a webhook for what cannot wait (severity ``page``).
        tickets: likewise for what can (severity ``ticket``).
        wait: for more alerts of a group before the first message.
        interval: between messages of a group.
    """
    same = ["pipeline", "namespace"]
    return {
        "route": {
            "receiver": "tickets",
            "group_by": ExplainedValue(
                [*same, "kind"], "one message for all windows and limits that break together"
            ),
            "group_wait": wait,
            "group_interval": interval,
            "repeat_interval": "24h",
            "routes": [
                {"receiver": "on-call", "matchers": ['severity="page"'], "repeat_interval": "1h"}
            ],
        },
        "inhibit_rules": [
            ExplainedValue(
                {
                    "source_matchers": ['kind="replicas"', 'severity="page"'],
                    "target_matchers": ['kind=~"latency|saturation"'],
                    "equal": same,
                },
                "a missing replica explains slow steps and a full fleet, and is on call itself; "
                "requests that fail are told all the same",
            ),
            ExplainedValue(
                {
                    "source_matchers": ['severity="page"'],
                    "target_matchers": ['severity="ticket"'],
                    "equal": [*same, "kind"],
                },
                "who is woken by a fast burn needs no ticket of the slow one",
            ),
        ],
        "receivers": [_receiver("on-call", on_call), _receiver("tickets", tickets)],
    }


def _receiver(name: str, url: str) -> dict[str, Any]:
    return {
        "name": name,
        "webhook_configs": [
            {
                "url": ExplainedValue(url, "yours, or another kind of receiver"),
                "send_resolved": True,
            }
        ],
    }
