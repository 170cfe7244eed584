"""Loading an app by its name, and finding the name of a loaded app, so that another process can load it too."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from headrace.errors import ModelError
from headrace.model.app import App
from headrace.runtime.pipe import AppTarget

MAIN_ELSEWHERE = "__headrace_main__"  # a script's module in a worker: not "__main__", so it starts nothing


def parse(target: str) -> AppTarget:
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise ModelError(f"{target!r} does not name an app: give module:attribute, as in examples.bank:app")
    return AppTarget(attribute, module_name)


def load(target: str | AppTarget) -> App:
    """The app named by "module:attribute"."""
    if isinstance(target, str):
        target = parse(target)
    module = run_script(target.script) if target.script else import_module(target.module)
    found = getattr(module, target.attribute, None)
    if not isinstance(found, App):
        apps = [name for name, value in vars(module).items() if isinstance(value, App)]
        known = f"it has: {', '.join(apps)}" if apps else "there is no App in it"
        where = f"script {target.script!r}" if target.script else f"module {target.module!r}"
        raise ModelError(f"{target.attribute!r} in {where} is not an App; {known}")
    return found


def import_module(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module exists, but something that it imports does not
        raise ModelError(f"no module {name!r} found; run this from the folder that contains it") from None


def run_script(path: str) -> ModuleType:
    """The module that a script makes, without what is under `if __name__ == "__main__"`."""
    spec = importlib.util.spec_from_file_location(MAIN_ELSEWHERE, path)
    if spec is None or spec.loader is None:
        raise ModelError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[MAIN_ELSEWHERE] = module  # before it runs: dataclasses look up their module
    spec.loader.exec_module(module)
    return module


def target_of(app: App) -> AppTarget:
    """The name under which another process can load this app."""
    defined_in = {function.body.__module__ for function in app.functions}
    modules = sorted(sys.modules.items(), key=lambda item: item[0] not in defined_in)  # stable: otherwise as imported
    for name, module in modules:
        attribute = attribute_of(module, app)
        if attribute is not None and name != "__main__":
            return AppTarget(attribute, name)
    main = sys.modules.get("__main__")
    attribute = None if main is None else attribute_of(main, app)
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if attribute is not None and spec is not None:
        return AppTarget(attribute, spec.name)  # python -m
    if attribute is not None and file is not None and Path(file).is_file():
        return AppTarget(attribute, script=str(Path(file).resolve()))
    raise ModelError(
        f"workers are processes of their own and cannot find app {app.name!r}: make it a variable at the top of a "
        "module or script that can be imported, or give its name, as in Cluster('examples.bank:app')"
    )


def attribute_of(module: object, app: App) -> str | None:
    members = getattr(module, "__dict__", None)
    if not isinstance(members, dict):
        return None
    return next((name for name, value in list(members.items()) if value is app and isinstance(name, str)), None)
