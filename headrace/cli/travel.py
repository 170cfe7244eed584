"""The app that `headrace demo` runs: accounts that pay each other, and hotels that are paid for their rooms."""

import dataclasses

from headrace import Abort, App, Context

app = App("travel")
account = app.operator("account", state=int)


@dataclasses.dataclass
class Rooms:
    free: int = 20
    sold: int = 0
    takings: int = 0


hotel = app.operator("hotel", state=Rooms, changes=True)  # its changes are a stream, too


@account.register
def deposit(ctx: Context, amount: int) -> None:
    ctx.put(ctx.get(0) + amount)


@account.register
def pay(ctx: Context, amount: int) -> None:
    if ctx.get(0) < amount:
        raise Abort(f"{ctx.key} has {ctx.get(0)}, needs {amount}")
    ctx.put(ctx.get(0) - amount)


@account.register
def transfer(ctx: Context, to: str, amount: int) -> None:
    pay(ctx, amount)
    ctx.call_async(deposit, to, amount)  # another entity, the same transaction


@hotel.register
def book(ctx: Context, guest: str, price: int) -> None:
    rooms = ctx.get(Rooms())
    if not rooms.free:
        raise Abort(f"{ctx.key} is full")
    ctx.put(Rooms(rooms.free - 1, rooms.sold + 1, rooms.takings + price))
    ctx.call_async(pay, guest, price)  # if the guest is too poor, the room is free again
