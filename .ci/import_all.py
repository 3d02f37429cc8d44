# SPDX-License-Identifier: Apache-2.0
"""Import every module of an installed tandemkv. Argument: the folder it must come from."""

import importlib
import pkgutil
import sys
from pathlib import Path

import tandemkv

site = Path(sys.argv[1]).resolve()
names = [
    info.name
    for info in pkgutil.walk_packages(tandemkv.__path__, "tandemkv.")
    if not info.name.endswith(".__main__")
]
for name in names:
    module = importlib.import_module(name)
    origin = Path(module.__file__ or "").resolve()
    if not origin.is_relative_to(site):
        sys.exit(f"{name} came from {origin}, not from the installed wheel in {site}")
if len(names) < 20:
    sys.exit(f"only {len(names)} modules in the wheel: {names}")
print(f"wheel: {len(names)} modules imported from {site.parts[-3]}/.../{site.name}")
