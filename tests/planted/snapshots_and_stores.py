"""Mistakes that break the promises of the section "Snapshots and stores"."""

from __future__ import annotations

from tests.planted import Mistake

MISTAKES = (
    Mistake(
        "Whatever happens, a load gives the state of its epoch.",
        "headrace/durability/snapshots/snapshots.py",
        "is_base=first == 0",
        "is_base=True",
    ),
    Mistake(
        "A crash at any step leaves the last snapshot or the next.",
        "headrace/durability/snapshots/snapshots.py",
        "        snapshot_id = self._next_id(term, snapshot.epoch, snapshot.is_full)\n",
        "        snapshot_id = self._next_id(term, snapshot.epoch, snapshot.is_full)\n"
        "        for each in self.manifests() if snapshot.is_full else ():\n"
        "            self.store.delete(each.name)\n",
    ),
    Mistake(
        "A snapshot costs what changed.",
        "headrace/durability/snapshots/snapshots.py",
        "first = first_to_fold([layer.bytes for layer in layers], self.fold_ratio)",
        "first = 0",
    ),
    Mistake(
        "Its state is that of its epoch, even if later epochs ran before it was written.",
        "headrace/core/journal.py",
        "self.unsaved = Snapshot(epoch, position, changed, metadata, self.is_full_next)",
        "self.unsaved = Snapshot(epoch + 1, position, changed, metadata, self.is_full_next)",
    ),
    Mistake(
        "Calls are answered while a snapshot is written.",
        "headrace/durability/keeper.py",
        "                self._background.put(snapshot)\n",
        "                list(map(self._tell, self.store_work.save(snapshot)))\n",
    ),
    Mistake(
        "The changes of a snapshot that failed are in the next one.",
        "headrace/core/journal.py",
        "self.carried = [*rows_of(self.saving.delta), *self.carried]",
        "self.carried = list(self.carried)",
    ),
    Mistake(
        "Layers are folded in the order of their epochs.",
        "headrace/durability/snapshots/layers.py",
        "pieces = [rows for layer in layers for",
        "pieces = [rows for layer in reversed(layers) for",
    ),
    Mistake(
        "A broken object is reported by name, and never makes a start use something else.",
        "headrace/durability/snapshots/snapshots.py",
        "                if self.store.exists(manifest.name):\n                    raise\n",
        "                epoch = manifest.epoch - 1\n",
    ),
    Mistake(
        "With any file damaged, a store starts with everything that was answered, or says which file is damaged.",
        "headrace/durability/recovery.py",
        "if self.kept_epoch > last:",
        "if self.kept_epoch > last and loaded is None:",
    ),
    Mistake(
        "A store of another app, or a place that is not a store, is refused and not changed.",
        "headrace/durability/recovery.py",
        "        check_identity(self.store, self.identity, self.app, self.config)\n        self.snapshots =",
        "        self.snapshots =",
        (
            (
                "        self.replies = self._take_replies(size)\n",
                "        check_identity(self.store, self.identity, self.app, self.config)\n"
                "        self.replies = self._take_replies(size)\n",
            ),
        ),
    ),
    Mistake(
        "A store never begins empty by accident.",
        "headrace/durability/identity.py",
        "        if others and not store.exists(IDENTITY):",
        '        if others and not store.list("log/"):',
        (
            (
                "headrace/durability/snapshots/snapshots.py",
                "if manifest.identity != self.identity:",
                'if manifest.identity["app"] != self.identity["app"]:',
            ),
        ),
    ),
    Mistake(
        "A full store stops the runtime and loses nothing acknowledged.",
        "headrace/durability/log/log.py",
        "        except BaseException as error:\n            self._failure = error\n            raise\n",
        "        except StoreFull as error:\n            self._failure = error\n",
    ),
    Mistake(
        "A store does not grow with time.",
        "headrace/durability/recovery.py",
        "        self.log.retire(keep.position)\n",
        "",
    ),
    Mistake(
        "Every snapshot that is kept can still be reached.",
        "headrace/durability/snapshots/snapshots.py",
        "for each in kept for stored in each.body.objects()}",
        "for each in kept[-1:] for stored in each.body.objects()}",
    ),
    Mistake(
        "Of many that create a name at once, one wins.",
        "headrace/durability/store.py",
        "                created = _link(temporary, path)\n",
        "                os.replace(temporary, path)\n                created = True\n",
    ),
    Mistake(
        "Files and folders are synced in the right order.",
        "headrace/durability/store.py",
        "            _sync_folder(path.parent)\n        self._forget(name)\n",
        "        self._forget(name)\n",
    ),
    Mistake(
        "A bucket is a store like a directory.",
        "headrace/durability/s3.py",
        "if _status(error) == 416:",
        "if _status(error) == 404:",
    ),
    Mistake(
        "A bucket that ignores conditional puts is refused.",
        "headrace/durability/s3.py",
        "        self._check_conditions()\n        return self._create(name, data)\n",
        "        return self._create(name, data)\n",
    ),
    Mistake(
        "No secret is shown.",
        "headrace/durability/s3.py",
        'return f"S3Store({self.url!r})"',
        'return f"S3Store({self.url!r}, {self._objects.config})"',
    ),
)
