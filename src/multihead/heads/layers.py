"""Which modules of a model are attention layers, and what each is called.

A layer's name is its number in the model, "0", "1", ...; where a model has several stacks the stack comes
first: "encoder.0", "decoder.0", and "cross.0" for the decoder's attention to the encoder.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass
from functools import cache

from torch import nn

_CROSS = re.compile(r"cross|enc_?dec|encoder_attn", re.IGNORECASE)


@dataclass(frozen=True)
class Layer:
    """One attention layer: its name, its stack ("" in a plain model), whether its keys come from outside."""

    name: str
    stack: str
    is_cross: bool


def find_layers(model: nn.Module) -> dict[int, Layer]:
    """The attention layers of a model that go through Hugging Face's interface, by the id of the module."""
    found = {}
    for path, module in model.named_modules():
        if uses_interface(type(module)):
            before, number, after = _split(path)
            cross = bool(_CROSS.search(after) or _CROSS.search(type(module).__name__))
            found[id(module)] = (before, number, cross or bool(getattr(module, "is_cross_attention", False)))
    names = _stack_names({before for before, _, cross in found.values() if not cross})
    crossing = {before for before, _, cross in found.values() if cross}
    layers, taken = {}, set()
    for key, (before, number, cross) in found.items():
        stack = names.get(before, ".".join(before))
        if cross:
            stack = "cross" if len(crossing) == 1 else f"{stack}.cross".lstrip(".")
        while (stack, number) in taken:  # layers that share a number in their paths are counted instead
            number += 1
        taken.add((stack, number))
        layers[key] = Layer(f"{stack}.{number}" if stack else str(number), stack, cross)
    return layers


@cache
def uses_interface(cls: type[nn.Module]) -> bool:
    """Whether a class asks the interface for its attention function: its methods name the registry."""
    # The base of all models names the registry too, to check the name that a user asks for.
    bases = (base for base in cls.__mro__ if base.__module__ != "transformers.modeling_utils")
    methods = (value for base in bases for value in vars(base).values() if inspect.isfunction(value))
    return any("ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(method).__code__.co_names for method in methods)


def _split(path: str) -> tuple[tuple[str, ...], int, str]:
    """The segments before the first number of a module's path, that number, and the rest."""
    segments = path.split(".")
    at = next((i for i, segment in enumerate(segments) if segment.isdigit()), len(segments))
    number = int(segments[at]) if at < len(segments) else 0
    return tuple(segments[:at]), number, ".".join(segments[at + 1 :])


def _stack_names(stacks: set[tuple[str, ...]]) -> dict[tuple[str, ...], str]:
    """The shortest name that tells each stack of layers from the others; "" when there is one."""
    if len(stacks) <= 1:
        return dict.fromkeys(stacks, "")
    rest = {stack: list(stack) for stack in stacks}
    while all(rest.values()) and len({segments[0] for segments in rest.values()}) == 1:
        rest = {stack: segments[1:] for stack, segments in rest.items()}
    for n in range(1, max(map(len, stacks)) + 1):
        names = {stack: ".".join(segments[:n]) for stack, segments in rest.items()}
        if len(set(names.values())) == len(names):
            return names
    return {stack: ".".join(stack) for stack in stacks}
