"""Dynamic batches to micro-batches of about equal cost."""

from __future__ import annotations

from collections.abc import Sequence

from triptych.server.stand_in.feeds import Part, Ticket


def form_micro_batches(
    tickets: Sequence[Ticket], *, budget: int, workers: int, separable: bool
) -> list[list[Part]]:
    """Cut a dynamic batch into micro-batches of about equal cost.

    Rows stay in the order of arrival: who waited longest is answered first, which keeps the tail
    of the latency short (sorting by length did not: p90 228 ms against 190 ms at 32 clients). The
    number of micro-batches is a multiple of `workers`, so that all workers end together.

    Args:
        tickets: the requests of the dynamic batch.
        budget: most elements in a micro-batch, exceeded only by a single row (or a request that
            must stay together) that is dearer by itself; 0 for one micro-batch whatever it costs.
        workers: how many micro-batches run side by side.
        separable: whether the rows of one request may part.

    Returns:
        Every row of every ticket, once. One micro-batch if there is no more work than one holds
        and fewer pieces than workers: then all cores had better work on it together.
    """
    cost = sum(ticket.rows * ticket.row_cost for ticket in tickets)
    pieces = sum(ticket.rows for ticket in tickets) if separable else len(tickets)
    if budget <= 0 or (cost <= budget and pieces < max(2, workers)):
        return [[Part(ticket, 0, ticket.rows) for ticket in tickets]]
    count = -(-cost // budget)
    count = min(pieces, -(-count // workers) * workers)

    batches: list[list[Part]] = [[]]
    load, target = 0, cost / count
    for ticket in tickets:
        step = 1 if separable else ticket.rows
        piece = step * ticket.row_cost
        start = 0
        while start < ticket.rows:
            # Half a piece over the target is nearer to it than half a piece under.
            fitting = min(int((target - load) / piece + 0.5), (budget - load) // piece)
            if fitting < 1 and load:
                cost -= load
                load, target = 0, cost / max(1, count - len(batches))
                batches.append([])
                continue
            stop = min(ticket.rows, start + max(1, fitting) * step)
            batches[-1].append(Part(ticket, start, stop))
            load += (stop - start) * ticket.row_cost
            start = stop
    return batches
