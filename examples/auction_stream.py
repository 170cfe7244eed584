"""The auction house, fed by Spark: each row of a stream is a bid, and each reply is joined with the row it answers.

    python -m examples.auction_stream

Bids arrive as files of JSON, as from any source that Spark can read. `carry` takes the number of a bid along, so that
its reply can be found. A plain loop over the same bids must come to the same winners.
"""

from __future__ import annotations

import json
import random
import tempfile
from pathlib import Path
from typing import Any

from examples.auction import account, app, auction, begin, bid, deposit, money_is_conserved
from headrace import Runtime
from headrace.spark import session, transact

LOTS, BIDDERS, MONEY, BIDS, FILES = 12, 40, 1_000, 3_000, 3
Bid = dict[str, Any]


def made_up(seed: int) -> list[Bid]:
    rng = random.Random(seed)
    return [
        {
            "number": number,
            "lot": f"lot-{rng.randrange(LOTS)}",
            "bidder": f"bidder-{rng.randrange(BIDDERS)}",
            "amount": rng.randrange(1, 50 + number // 4),
        }
        for number in range(BIDS)
    ]


def main() -> None:
    bids = made_up(7)
    spark = session("auction")
    with tempfile.TemporaryDirectory(prefix="auction-") as folder:
        arrivals, store = Path(folder) / "bids", Path(folder) / "store"
        arrivals.mkdir()
        for part in range(FILES):
            rows = bids[part * BIDS // FILES : (part + 1) * BIDS // FILES]
            (arrivals / f"{part}.json").write_text("".join(json.dumps(row) + "\n" for row in rows))
        with Runtime(app, store=store) as runtime:
            client = runtime.client
            client.batch([(deposit, f"bidder-{number}", MONEY) for number in range(BIDDERS)])
            client.batch([(begin, f"lot-{number}", "sam", 3600.0) for number in range(LOTS)])

            schema = "number long, lot string, bidder string, amount long"
            stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).json(str(arrivals))
            query = transact(
                stream,
                bid,
                key="lot",
                args=["bidder", "amount"],
                carry=["number"],
                runtime=runtime,
                name="bids",
                trigger={"availableNow": True},
            )
            assert query is not None
            query.awaitTermination()
            runtime.drain()
            runtime.snapshot()  # replies are written with a small delay; a snapshot waits for them

            replies = spark.read.format("headrace.replies").option("function", "auction.bid").load(str(store))
            replies = replies.selectExpr("from_json(carried, 'number long').number AS number", "tid", "status", "error")
            answered = spark.read.schema(schema).json(str(arrivals)).join(replies, "number").orderBy("tid").collect()
            accepted = {row.number for row in answered if row.status == "ok"}
            print(f"{len(answered):,} bids have a reply, {len(accepted):,} were accepted.")
            for row in [row for row in answered if row.status != "ok"][:3]:
                print(f"  bid {row.number}, {row.bidder} {row.amount} for {row.lot}: {row.error}")

            found = {lot: (each.bidder, each.escrow) for lot, each in runtime.state(auction).items()}
            best, taken = by_hand([row.asDict() for row in answered])
            assert accepted == taken
            for lot, (bidder, amount) in sorted(found.items())[:3]:
                print(f"  {lot}: {bidder} leads with {amount}")
            print("a plain loop gives the same leaders:", "yes" if found == best else "NO")
            money_is_conserved({name: runtime.state(name) for name in app.operators})
            free = sum(each.balance for each in runtime.state(account).values())
            print(f"{free:,} free + {sum(amount for _, amount in found.values()):,} held = {BIDDERS * MONEY:,}")
    spark.stop()


def by_hand(bids: list[Bid]) -> tuple[dict[str, tuple[str | None, int]], set[int]]:
    """The oracle: the highest bid of each lot, and the numbers of the bids that were accepted."""
    free = {f"bidder-{number}": MONEY for number in range(BIDDERS)}
    best: dict[str, tuple[str | None, int]] = {f"lot-{number}": (None, 0) for number in range(LOTS)}
    accepted = set()
    for each in bids:
        leader, held = best[each["lot"]]
        back = held if leader == each["bidder"] else 0
        if each["amount"] > held and free[each["bidder"]] + back >= each["amount"]:
            if leader is not None:
                free[leader] += held
            free[each["bidder"]] -= each["amount"]
            best[each["lot"]] = (each["bidder"], each["amount"])
            accepted.add(each["number"])
    return best, accepted


if __name__ == "__main__":
    main()
