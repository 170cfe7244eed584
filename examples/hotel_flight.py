"""A trip: a hotel room and a seat on a flight, both or neither.

Plain functions and one-way calls are enough here: `reserve` needs no answers, only that no call aborts.

    python examples/hotel_flight.py
"""

from __future__ import annotations

from collections import Counter

from headrace import Abort, App, Context, Runtime

app = App("travel")
hotel = app.operator("hotel", state=int)  # rooms left
flight = app.operator("flight", state=int)  # seats left
trip = app.operator("trip", state=tuple[str, str])  # hotel and flight that were reserved


@hotel.register
def open_rooms(ctx: Context[int], rooms: int) -> int:
    return change(ctx, rooms)


@hotel.register
def take_room(ctx: Context[int]) -> int:
    return change(ctx, -1)


@flight.register
def open_seats(ctx: Context[int], seats: int) -> int:
    return change(ctx, seats)


@flight.register
def take_seat(ctx: Context[int]) -> int:
    return change(ctx, -1)


def change(ctx: Context[int], by: int) -> int:
    """Shared by both: the number of free places never goes below zero."""
    left = ctx.get(0) + by
    if left < 0:
        raise Abort(f"{ctx.key} is full")
    ctx.put(left)
    return left


@trip.register
def reserve(ctx: Context[tuple[str, str]], hotel_name: str, flight_name: str) -> tuple[str, str]:
    if ctx.get() is not None:
        raise Abort(f"{ctx.key} has a trip already")
    booked = (hotel_name, flight_name)
    ctx.put(booked)
    ctx.call_async(take_room, hotel_name)
    ctx.call_async(take_seat, flight_name)
    return booked


@trip.register
def cancel(ctx: Context[tuple[str, str]]) -> None:
    booked = ctx.get()
    if booked is None:
        raise Abort(f"{ctx.key} has no trip")
    hotel_name, flight_name = booked
    ctx.delete()
    ctx.call_async(open_rooms, hotel_name, 1)
    ctx.call_async(open_seats, flight_name, 1)


def main() -> None:
    with Runtime(app) as runtime:
        client = runtime.client
        client.batch([(open_rooms, "Ritz", 3), (open_rooms, "Inn", 9), (open_seats, "HR1", 4), (open_seats, "HR2", 2)])
        wishes = [(f"guest-{i}", "Ritz" if i % 2 else "Inn", "HR2" if i % 3 else "HR1") for i in range(10)]
        replies = client.batch([(reserve, guest, where, by) for guest, where, by in wishes])
        for (guest, where, by), reply in zip(wishes, replies, strict=True):
            why = f": {reply.failure.message}" if reply.failure else ""
            print(f"{guest} wants {where} and {by}: {reply.status}{why}")

        client.call(cancel, "guest-1")
        print("guest-1 cancels, guest-4 tries again:", client.call(reserve, "guest-4", "Inn", "HR2"))

        trips = runtime.state(trip).values()
        print("rooms left:", runtime.state(hotel), "taken:", dict(Counter(where for where, _ in trips)))
        print("seats left:", runtime.state(flight), "taken:", dict(Counter(by for _, by in trips)))


if __name__ == "__main__":
    main()
