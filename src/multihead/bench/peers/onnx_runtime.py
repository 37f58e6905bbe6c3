"""ONNX Runtime's own attention operators, each as a model of one node."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..inputs import Inputs
from ..shapes import Shape
from .base import Peer, Prepared, missing

_DOMAIN = "com.microsoft"


class _Operator(Peer):
    """An operator of com.microsoft on ONNX Runtime's CPU provider, inputs and outputs bound to memory once."""

    operator: ClassVar[str]
    dtypes: ClassVar[tuple[str, ...]]

    def available(self) -> str | None:
        return missing("onnxruntime", "onnx")

    def refuses(self, shape: Shape) -> str | None:
        if shape.training:
            return "ONNX Runtime computes no gradients of it"
        if shape.E != shape.D:
            return "the operator has one width of keys and values"
        if shape.dtype not in self.dtypes:
            return f"the operator has no {shape.dtype} on the CPU"
        return None

    @abstractmethod
    def _feeds(self, shape: Shape, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Inputs by name in the operator's order; outputs that share the memory of an input, and which."""

    @abstractmethod
    def _attributes(self, shape: Shape) -> dict[str, Any]:
        """The node's attributes."""

    def prepare(self, shape: Shape, inputs: Inputs) -> Prepared:
        import onnxruntime

        s = shape
        feeds, aliases = self._feeds(s, inputs)
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(x.numpy()) for name, x in feeds.items()}
        output = onnxruntime.OrtValue.ortvalue_from_numpy(inputs.query.new_zeros(s.B, s.L, s.H * s.D).numpy())
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(
            self._model(s, feeds, list(aliases)), options, providers=["CPUExecutionProvider"]
        )
        binding = session.io_binding()
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output("output", output)
        for name, source in aliases.items():
            binding.bind_ortvalue_output(name, values[source])

        def numbers(_: object) -> tuple[Tensor]:
            return (torch.from_numpy(output.numpy()).view(s.B, s.L, s.H, s.D).transpose(1, 2),)

        return Prepared(lambda: session.run_with_iobinding(binding), numbers)

    def _model(self, shape: Shape, feeds: dict[str, Tensor], more_outputs: list[str]) -> bytes:
        from onnx import TensorProto, helper

        s, kinds = shape, {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}
        kinds[torch.int32] = TensorProto.INT32
        inputs = [helper.make_tensor_value_info(name, kinds[x.dtype], x.shape) for name, x in feeds.items()]
        kind = kinds[s.torch_dtype]
        outputs = [helper.make_tensor_value_info("output", kind, (s.B, s.L, s.H * s.D))]
        outputs += [helper.make_tensor_value_info(name, kind, (s.B, s.G, s.S, s.D)) for name in more_outputs]
        node = helper.make_node(
            self.operator, [x.name for x in inputs], [x.name for x in outputs], domain=_DOMAIN, **self._attributes(s)
        )
        versions = [helper.make_opsetid("", 17), helper.make_opsetid(_DOMAIN, 1)]
        graph = helper.make_graph([node], "attention", inputs, outputs)
        return helper.make_model(graph, opset_imports=versions, ir_version=8).SerializeToString()


class OrtMha(_Operator):
    """MultiHeadAttention, keys and values as (B, H, S, D), the layout that it takes without a copy."""

    name = "ort-mha"
    about = "ONNX Runtime, com.microsoft.MultiHeadAttention"
    operator = "MultiHeadAttention"
    dtypes = ("float32",)

    def refuses(self, shape: Shape) -> str | None:
        if shape.G != shape.H:
            return "MultiHeadAttention has as many key heads as query heads"
        if shape.window is not None:
            return "MultiHeadAttention has no window"
        return super().refuses(shape)

    def _feeds(self, shape: Shape, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, str]]:
        return {"query": _side_by_side(inputs.query), "key": inputs.key, "value": inputs.value}, {}

    def _attributes(self, shape: Shape) -> dict[str, Any]:
        return {"num_heads": shape.H, "unidirectional": int(shape.causal)}


class OrtGqa(_Operator):
    """GroupQueryAttention over a cache that is updated in place: decoding, and causal texts, which it also stores."""

    name = "ort-gqa"
    about = "ONNX Runtime, com.microsoft.GroupQueryAttention"
    operator = "GroupQueryAttention"
    dtypes = ("float32", "float16")

    def refuses(self, shape: Shape) -> str | None:
        if not shape.causal and shape.L > 1:
            return "GroupQueryAttention is causal"
        return super().refuses(shape)

    def _feeds(self, shape: Shape, inputs: Inputs) -> tuple[dict[str, Tensor], dict[str, str]]:
        s = shape
        feeds = {"query": _side_by_side(inputs.query)}
        # The newest keys come with the call, the older ones lie in the cache.
        feeds |= {
            name: _side_by_side(x[:, :, s.S - s.L :]) for name, x in (("key", inputs.key), ("value", inputs.value))
        }
        feeds |= {"past_key": inputs.key.clone(), "past_value": inputs.value.clone()}
        feeds["seqlens_k"] = torch.full((s.B,), s.S - 1, dtype=torch.int32)
        feeds["total_sequence_length"] = torch.tensor([s.S], dtype=torch.int32)
        return feeds, {"present_key": "past_key", "present_value": "past_value"}

    def _attributes(self, shape: Shape) -> dict[str, Any]:
        return {"num_heads": shape.H, "kv_num_heads": shape.G, "local_window_size": shape.window or -1}


def _side_by_side(heads: Tensor) -> Tensor:
    """(B, H, L, D) as (B, L, H * D)."""
    return heads.transpose(1, 2).flatten(2).contiguous()
