"""Which layers and heads of a model are meant, by numbers or by names such as "18.6"."""

from __future__ import annotations

from collections.abc import Iterable


class Selection:
    """Which layers and heads to store.

    Raises:
        ValueError: a name that the model does not have.
    """

    def __init__(self, names: list[str], layers: Iterable[int | str] | None, heads: Iterable[int | str] | None) -> None:
        self.layers = None if layers is None else {str(layer) for layer in layers}
        self.everywhere: list[int] | None = None
        self.named: dict[str, list[int]] | None = None
        for layer in self.layers or ():
            _check_layer("layers", layer, names)
        if heads is None:
            return
        heads = list(heads)
        self.everywhere = [head for head in heads if isinstance(head, int)]
        self.named = {}
        for head in heads:
            if isinstance(head, int):
                continue
            layer, dot, number = head.rpartition(".")
            if not dot or not number.isdigit():
                raise ValueError(f'heads: expected numbers or names such as "18.6", got {head!r}')
            _check_layer("heads", layer, names)
            self.named.setdefault(layer, []).append(int(number))

    def __contains__(self, layer: str) -> bool:
        if self.layers is not None and layer not in self.layers:
            return False
        return self.named is None or bool(self.everywhere) or layer in self.named

    def heads_of(self, layer: str, H: int) -> list[int]:
        """The heads to store of a layer that has H, in order."""
        if self.named is None or self.everywhere is None:
            return list(range(H))
        chosen = sorted({*self.everywhere, *self.named.get(layer, ())})
        if chosen and not 0 <= chosen[0] <= chosen[-1] < H:
            raise ValueError(f"heads: layer {layer!r} has H = {H} heads, 0 to {H - 1}; asked for {chosen}")
        return chosen


def _check_layer(argument: str, layer: str, names: list[str]) -> None:
    if names and layer not in names:
        raise ValueError(f"{argument}: no layer {layer!r}; this model has {', '.join(names)}")
