"""A shop: an order takes goods from the stock and money from the buyer, or nothing at all.

Three operators, each with a dataclass as its state, which the type checker knows too (`Context[Order]`). `checkout` is
one transaction over all three: if one of them aborts, however late, all three are restored.

    python examples/shopping_cart.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace import Abort, App, Context, Runtime


@dataclass
class Order:
    lines: dict[str, int] = field(default_factory=dict)  # article -> how many
    total: int | None = None  # in cents; None until it is paid


@dataclass
class Article:
    price: int
    count: int


@dataclass
class Wallet:
    balance: int = 0
    spent: int = 0


app = App("shop")
order = app.operator("order", state=Order)
stock = app.operator("stock", state=Article)
payment = app.operator("payment", state=Wallet)


@stock.register
def supply(ctx: Context[Article], price: int, count: int) -> None:
    if price < 0 or count <= 0:
        raise Abort(f"cannot supply {count} {ctx.key} at {price}")
    article = ctx.get(Article(price, 0))
    ctx.put(Article(price, article.count + count))


@stock.register
def take(ctx: Context[Article], count: int) -> int:
    """Take from the shelf; returns what it costs."""
    article = ctx.get(Article(0, 0))
    if article.count < count:
        raise Abort(f"{article.count} {ctx.key} in stock, {count} wanted")
    article.count -= count
    ctx.put(article)  # what `get` gave is a copy: without this line nothing would change
    return article.price * count


@payment.register
def pay_in(ctx: Context[Wallet], amount: int) -> None:
    if amount <= 0:
        raise Abort(f"cannot pay in {amount}")
    wallet = ctx.get(Wallet())
    wallet.balance += amount
    ctx.put(wallet)


@payment.register
def charge(ctx: Context[Wallet], amount: int) -> int:
    """Take money; returns the balance left."""
    wallet = ctx.get(Wallet())
    if wallet.balance < amount:
        raise Abort(f"{ctx.key} has {wallet.balance}, the order costs {amount}")
    wallet.balance -= amount
    wallet.spent += amount
    ctx.put(wallet)
    return wallet.balance


@order.register
def add(ctx: Context[Order], article: str, count: int) -> None:
    """Put into the cart."""
    cart = ctx.get(Order())
    if cart.total is not None:
        raise Abort(f"order {ctx.key} is paid")
    if count <= 0:
        raise Abort(f"cannot add {count} {article}")
    cart.lines[article] = cart.lines.get(article, 0) + count
    ctx.put(cart)


@order.register
async def checkout(ctx: Context[Order], buyer: str, total_max: int) -> int:
    """Buy what is in the cart; returns what it cost."""
    cart = ctx.get(Order())
    if cart.total is not None or not cart.lines:
        raise Abort(f"order {ctx.key} is {'empty' if cart.total is None else 'paid'}")
    total = 0
    for article, count in cart.lines.items():
        total += await ctx.call(take, article, count)
    await ctx.call(charge, buyer, total)
    if total > total_max:  # the goods are taken and the buyer is charged by now: the abort undoes both
        raise Abort(f"order {ctx.key} costs {total}, agreed were {total_max}")
    cart.total = total
    ctx.put(cart)
    return total


def main() -> None:
    with Runtime(app) as runtime:
        client = runtime.client
        client.batch([(supply, "apple", 30, 10), (supply, "bread", 400, 2), (pay_in, "ann", 1_000), (pay_in, "bo", 50)])
        client.batch([(add, "order-1", "apple", 4), (add, "order-1", "bread", 1)])
        client.batch([(add, "order-2", "apple", 1), (add, "order-2", "bread", 9)])

        for key, buyer, total_max in (
            ("order-1", "bo", 600),  # payment aborts: bo has too little
            ("order-2", "ann", 9_000),  # stock aborts: two loaves are there, not nine
            ("order-1", "ann", 500),  # the order itself aborts: it costs more than was agreed
            ("order-1", "ann", 600),
            ("order-1", "ann", 600),  # the order aborts: it is paid
        ):
            reply = client.batch([(checkout, key, buyer, total_max)])[0]
            told = reply.failure.message if reply.failure else f"paid {reply.result}"
            print(f"{key} for {buyer}: {reply.status}, {told}")

        for operator in (order, stock, payment):
            for key, value in runtime.state(operator).items():
                print(f"{operator.name:>8} {key}: {value}")


if __name__ == "__main__":
    main()
