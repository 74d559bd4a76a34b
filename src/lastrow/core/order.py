"""The order in which requests are served, and lists kept in it."""

from __future__ import annotations

from bisect import bisect_left, insort

from lastrow.core.request import Request


def order(request: Request) -> tuple[int, float, int]:
    return request.priority, request.arrival_time, request.arrival_index


def insert(requests: list[Request], request: Request) -> None:
    """Keep `requests` in order; most come last."""
    if requests and order(request) < order(requests[-1]):
        insort(requests, request, key=order)
    else:
        requests.append(request)


def insert_all(requests: list[Request], more: list[Request]) -> None:
    """Keep `requests` in order; in one piece where all of `more` go to the same place, as the forks of a parent mostly do."""
    if not more:
        return
    more.sort(key=order)
    at = bisect_left(requests, order(more[0]), key=order)
    if at == len(requests) or order(more[-1]) < order(requests[at]):
        requests[at:at] = more
        return
    for request in more:
        insort(requests, request, key=order)
