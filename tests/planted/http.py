"""Mistakes that break the promises of the section "HTTP"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "An abort is distinguishable from a result and from a refusal.",
        "headrace/gateway/answers.py",
        "    return answer, status_of_abort(failure.code)\n",
        "    return answer, BadRequest.http_status\n",
    ),
    Mistake(
        "A remote client does what a local one does.",
        "headrace/runtime/remote.py",
        "name = function.full_name if isinstance(function, Function) else function",
        "name = function.name if isinstance(function, Function) else function",
    ),
    Mistake(
        "A request id sent again over HTTP runs once.",
        "headrace/gateway/call_routes.py",
        "self._client.submit(message.ids, batch, wait=False)",
        "self._client.submit(self._client.new_id(), batch, wait=False)",
    ),
    Mistake(
        "Bytes that are not a message are refused, and the server continues.",
        "headrace/gateway/call_routes.py",
        "if len(sizes) > 1 or (isinstance(message.ids, list) and {len(message.ids)} != sizes):",
        "if isinstance(message.ids, list) and {len(message.ids)} != sizes:",
    ),
    Mistake(
        "Each outcome of a call has its own status: an app's abort, a bug, a limit, a failed external call.",
        "headrace/core/raised.py",
        "    return Aborted.code if issubclass(kind, Abort) else FunctionFailed.code\n",
        "    return Aborted.code\n",
    ),
    Mistake(
        "Calls that arrive together are one batch, and each request gets its own answer.",
        "headrace/gateway/turns.py",
        "lambda at=at: replies[at])",
        "lambda at=at: replies[0])",
    ),
    Mistake(
        "A refusal and an abort stay with their own requests.",
        "headrace/gateway/call_routes.py",
        "        request_id = self._id_of(given)\n",
        "        request_id = given or self._client.new_id()\n",
    ),
    Mistake(
        "The calls of a JSON batch are answered as if each came alone.",
        "headrace/gateway/call_routes.py",
        "                rows.append(error)\n",
        "                raise error\n",
    ),
    Mistake(
        "Reads that arrive together see one moment.",
        "headrace/gateway/turns.py",
        "            found = self._runtime.read(list({each.item: None for each in waiting}))\n",
        "            for each in waiting[1:]:\n"
        "                self._read([each])\n"
        "            waiting = waiting[:1]\n"
        "            found = self._runtime.read([waiting[0].item])\n",
    ),
    Mistake(
        "Every key that JSON can have can be read.",
        "headrace/gateway/call_routes.py",
        '    key = rest if slash else given["key"]\n',
        '    key = rest if slash else given["key"].partition("/")[0]\n',
    ),
    Mistake(
        "A Decimal is exactly the number that is written in JSON.",
        "headrace/wire/from_json.py",
        "            return decimal.Decimal(value)\n",
        "            return decimal.Decimal(str(float(value)))\n",
    ),
    Mistake(
        "JSON becomes the same values over HTTP, in messages of Kafka, and in a column of Spark.",
        "headrace/durability/inbox/batch_calls.py",
        "    function, named, args = call\n",
        "    function, named, args = call[0], call[1], tuple(msgspec.json.decode(data)['args'])\n",
    ),
    Mistake(
        "An unknown field of a record in JSON is refused, whichever way it comes.",
        "headrace/wire/from_json.py",
        "            elif tag is None or each != tag[0]:\n",
        "            elif len(value) > 10:\n",
    ),
    Mistake(
        "Nothing is converted for Python clients.",
        "headrace/gateway/call_routes.py",
        "        arguments = [self._program.values.decode(args) for args in message.args]\n",
        "        decode, find = self._program.values.decode, self._program.find\n"
        "        pairs = zip(message.functions, message.args, strict=True)\n"
        "        arguments = [find(name).signature.convert(decode(args)) for name, args in pairs]\n",
    ),
    Mistake(
        "A kept-alive connection is not delayed by Nagle's algorithm.",
        "headrace/gateway/server.py",
        "socket.SOCK_STREAM, socket.IPPROTO_TCP)",
        "socket.SOCK_STREAM)",
    ),
    Mistake(
        "A client that leaves in the middle is no traceback in the log.",
        "headrace/gateway/front.py",
        "        except ClientLeft:\n            pass\n",
        "        except ClientLeft:\n            raise\n",
    ),
    Mistake(
        "Other hosts, and web pages of other sites, are turned away on every route.",
        "headrace/gateway/front.py",
        "            self._turn_away_strangers(scope)\n"
        '            handler = self._handler(scope["path"], scope["method"])\n',
        '            handler = self._handler(scope["path"], scope["method"])\n'
        "            if handler is not None:\n"
        "                self._turn_away_strangers(scope)\n",
    ),
)
