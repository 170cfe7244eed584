"""Mistakes that break the promises of the section "The log"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Acknowledged records survive any crash, and the others as a prefix.",
        "headrace/durability/log/log.py",
        "        self.store.append(file, data)\n        self.store.sync(file)\n        self._size",
        "        self.store.sync(file)\n        self.store.append(file, data)\n        self._size",
    ),
    Mistake(
        "A writer that is paused anywhere, and superseded, loses nothing acknowledged.",
        "headrace/durability/log/log.py",
        "            if self.store.can_append:\n                self._grow(payloads)",
        "            self._check_fence()\n            if self.store.can_append:\n                self._grow(payloads)",
        (
            (
                "            self._check_fence()\n        except ObjectMissing as error:",
                "        except ObjectMissing as error:",
            ),
        ),
    ),
    Mistake(
        "Any number of writers, in any schedule, acknowledge one history.",
        "headrace/durability/log/takeover.py",
        '        if store.create(term_marker(name, term), f"term {term} {owner}".strip().encode() + b"\\n"):\n',
        "        if not store.exists(term_marker(name, term)):\n"
        '            store.put(term_marker(name, term), f"term {term} {owner}".strip().encode() + b"\\n")\n',
    ),
    Mistake(
        "A runtime that is superseded answers nothing more, and says why.",
        "headrace/durability/keeper.py",
        "        if not records:\n            self.opened_store.log.check()\n",
        "        if not records:\n            pass\n",
    ),
    Mistake(
        "It deletes nothing either.",
        "headrace/durability/keeper.py",
        "            return [Saved(snapshot.epoch, self._oldest())]\n",
        "            self.retire(self._oldest())\n            return [Saved(snapshot.epoch, self._oldest())]\n",
    ),
    Mistake(
        "A tail torn by a crash is cut off.",
        "headrace/durability/log/frames.py",
        "if len(raw) < HEAD_BYTES + length:",
        "if len(raw) < HEAD_BYTES:",
        (("if crc != _CRC.unpack_from(", "if len(data) == length and crc != _CRC.unpack_from("),),
    ),
    Mistake(
        "A flipped bit is reported, or concerns only what was never acknowledged.",
        "headrace/durability/log/frames.py",
        "crc = _checksum(data, zlib.crc32(head, zlib.crc32(_PLACE.pack(offset), seed)))",
        'crc = _checksum(data if kind != RECORD else b"", zlib.crc32(head, zlib.crc32(_PLACE.pack(offset), seed)))',
        (("crc = zlib.crc32(data, ", 'crc = zlib.crc32(data if kind != RECORD else b"", '),),
    ),
    Mistake(
        "After a failed write or sync nothing more is appended.",
        "headrace/durability/log/log.py",
        "        except BaseException as error:\n            self._failure = error\n",
        "        except StoreFull as error:\n            self._failure = error\n",
    ),
    Mistake(
        "Whatever is broken, a repair leaves a log that can be read and written.",
        "headrace/durability/log/examine.py",
        "    begin_segment(store, name, term, end)\n",
        "",
    ),
    Mistake(
        "It throws nothing away.",
        "headrace/durability/log/examine.py",
        "if end.ref and (rest := store.get(",
        "if end.ref and position == len(chain.refs) - 1 and (rest := store.get(",
    ),
)
