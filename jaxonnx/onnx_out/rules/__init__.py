"""How ONNX spells each primitive of JAX. Importing this package registers all rules."""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
