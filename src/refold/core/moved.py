"""Import paths of version 0.1 that documentation named: they lead to the modules of today."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "refold.bench": "refold.cli.bench",
    "refold.formats": "refold.dialects",
    "refold.rules": "refold.dialects.rules",
    "refold.summarize": "refold.summaries",
    "refold.tokens": "refold.models",
    "refold.worker": "refold.session.worker",
}
MERGED = {
    "refold.summaries.anthropic": "refold.summaries.providers",
    "refold.summaries.openai": "refold.summaries.providers",
}


class MovedModules(MetaPathFinder, Loader):
    """Asked last of all finders: only for modules that are nowhere else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = ".".join(name.split(".")[:2])
        return ModuleSpec(name, self, is_package=True) if package in MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        package = ".".join(module.__name__.split(".")[:2])
        name = module.__name__.replace(package, MOVED[package], 1)
        new = import_module(MERGED.get(name, name))
        public = {name: value for name, value in vars(new).items() if not name.startswith("__")}
        vars(module).update(public)


def install() -> None:
    sys.meta_path.append(MovedModules())
