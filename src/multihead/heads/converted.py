"""A GGUF file converted once to safetensors, and kept in a cache that several processes can share."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .errors import ModelError, first_line

Progress = Callable[[str, "float | None"], None]

_STALE_SECONDS = 24 * 3600


def cache_folder() -> Path:
    """Return where models are kept: $MULTIHEAD_CACHE, else multihead in $XDG_CACHE_HOME or ~/.cache."""
    if own := os.environ.get("MULTIHEAD_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "multihead"


def converted(file: Path, tell: Progress) -> Path:
    """Return a folder with a GGUF file's model and tokenizer as transformers saves them; make it if need be.

    The folder's name holds the hash of the file and the version of transformers, since versions differ in how
    they convert. It is written beside and renamed: one that exists is whole.

    Raises:
        ModelError: the file is no GGUF, is broken, holds an architecture that transformers does not read, or
            the cache cannot be written.
    """
    import transformers

    try:
        digest = _sha256(file)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    final = cache_folder() / f"{file.stem}-{digest[:16]}-transformers-{transformers.__version__}"
    if final.is_dir():
        return final
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(final.parent)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=final.parent))
    except OSError as error:
        raise _unwritable(final.parent, error) from error
    try:
        _convert(file, partial, tell)
        try:
            partial.rename(final)
        except OSError as error:
            # Another process that finished first has made the same folder; a full one is never replaced.
            if not final.is_dir():
                raise _unwritable(final.parent, error) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings and progress bars of transformers and the hub's client inside the block."""
    from transformers.utils import logging as hf

    hub = logging.getLogger("huggingface_hub")
    verbosity, bars, level = hf.get_verbosity(), hf.is_progress_bar_enabled(), hub.level
    hf.set_verbosity_error()
    hf.disable_progress_bar()
    hub.setLevel(logging.ERROR)
    try:
        yield
    finally:
        hub.setLevel(level)
        hf.set_verbosity(verbosity)
        if bars:
            hf.enable_progress_bar()


def _unwritable(folder: Path, error: OSError) -> ModelError:
    reason = error.strerror or str(error)
    hint = "set MULTIHEAD_CACHE to another folder"
    return ModelError(f"cannot write the converted model in {folder}: {reason}; {hint}")


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _remove_stale(folder: Path) -> None:
    """Remove what a killed process left half written."""
    for partial in folder.glob(".partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(partial)


def _convert(file: Path, folder: Path, tell: Progress) -> None:
    """Write a GGUF file's model, in float32, and its tokenizer into a folder."""
    import torch
    import transformers

    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ModelError(f"{file}: not a GGUF file, which starts with the letters GGUF")
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    unpack: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):
        # Else newer versions mark the model as quantized, refuse to save it, and may keep its weights packed.
        unpack["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        with quiet(), _no_bar():
            tell(f"reading the tokenizer of {file.name}", 0.0)
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, **source)
            tell(f"converting {file.name}, only this once", 0.25)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                file.parent, dtype=torch.float32, **source, **unpack
            )
        _keep_bos_rule(file, tokenizer)
    except ImportError as error:
        raise ModelError(f"reading GGUF files: {first_line(error)}: pip install 'multihead[hf]'") from error
    except Exception as error:
        # The readers check little and raise whatever they meet in a broken file.
        raise ModelError(f"{file}: cannot be read as GGUF: {first_line(error)}") from error
    try:
        with quiet():
            tell("saving the converted model", 0.9)
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except OSError as error:
        raise _unwritable(folder.parent, error) from error


def _keep_bos_rule(file: Path, tokenizer: Any) -> None:
    """Let the file say whether texts begin with the BOS token; some versions of transformers do not ask it."""
    import gguf

    rule = gguf.GGUFReader(file).fields.get("tokenizer.ggml.add_bos_token")
    if rule is not None:
        begins = bool(rule.parts[rule.data[0]][0])
        if begins != getattr(tokenizer, "add_bos_token", begins):
            tokenizer.add_bos_token = begins


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Hide the bar that transformers' GGUF reader takes straight from tqdm, past the switch of `quiet`."""
    try:
        import transformers.modeling_gguf_pytorch_utils as module
    except ImportError:
        yield
        return
    from transformers.utils import logging as hf

    reader: Any = module
    bar = getattr(reader, "tqdm", None)
    reader.tqdm = hf.tqdm
    try:
        yield
    finally:
        reader.tqdm = bar
