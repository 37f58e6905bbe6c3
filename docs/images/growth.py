"""Makes the picture of time and memory against the length of the text; keep the machine quiet meanwhile.

It also writes the figures beside the picture. With the name of such a file it draws without measuring.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from multihead.bench.growth import Point, sweep
from multihead.bench.machine import Machine
from multihead.show.plot import draw_growth

HERE = Path(__file__).parent


def main() -> None:
    """Measure, or read what was measured, and draw."""
    if len(sys.argv) > 1:
        points = [Point(**point) for point in json.loads(Path(sys.argv[1]).read_text())["points"]]
    else:
        points = sweep(tell=lambda stage: print(stage, flush=True))
        found = {"machine": str(Machine.here()), "points": [asdict(point) for point in points]}
        (HERE / "growth.json").write_text(json.dumps(found, indent=1) + "\n")
    draw_growth(points, HERE / "growth.svg")


if __name__ == "__main__":
    main()
