"""Make `attn_implementation="multihead"` known to transformers, in whichever order the two are imported."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec

# Both interfaces exist once this module has run; `import transformers` alone does not run it.
_HOME = "transformers.modeling_utils"


class _AfterTransformers(MetaPathFinder):
    """Registers as soon as transformers has loaded the module that holds its attention interface."""

    def find_spec(self, fullname, path=None, target=None) -> ModuleSpec | None:
        if fullname != _HOME:
            return None
        others = (finder.find_spec(fullname, path) for finder in sys.meta_path if finder is not self)
        spec = next((found for found in others if found is not None), None)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_then_register(module) -> None:
            load(module)
            sys.meta_path.remove(self)
            register()

        spec.loader.exec_module = load_then_register
        return spec


def register() -> None:
    """Register the attention and the mask function under the name "multihead" (imports transformers)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    from .interface import NAME, attention_forward
    from .masks import make_mask

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def register_when_loaded() -> None:
    """Register now if transformers has loaded the base of its models, else once it does."""
    if _HOME in sys.modules:
        register()
    elif not any(isinstance(finder, _AfterTransformers) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTransformers())
