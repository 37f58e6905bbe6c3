"""python -m benchmarks [forward] [model] [--json F] [--seconds S]: by default all of them."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from multihead.core import native

from . import forward, model


def machine() -> str:
    """One line on where the figures come from."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = names[0] if names else name
    level = native.core.level() if native.core else "not built"
    return f"{name}, {torch.get_num_threads()} threads, level {level}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="*", choices=["forward", "model", []], help="by default both")
    parser.add_argument("--json", type=Path, help="write the figures there, with the machine's line")
    parser.add_argument("--seconds", type=float, default=3.0, help="at least so long a shape (default 3)")
    options = parser.parse_args()
    print(machine())
    found: dict[str, object] = {"machine": machine()}
    for name in options.what or ["forward", "model"]:
        print(f"\n{name}")
        found[name] = forward.run(options.seconds) if name == "forward" else model.run()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
