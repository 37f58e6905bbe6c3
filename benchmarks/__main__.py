"""python -m benchmarks [bench] [model]: the tables of the documentation; by default both.

`bench` is what `multihead bench` measures, `model` a whole model in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from multihead.bench.machine import Machine
from multihead.bench.peers import peers
from multihead.bench.run import run
from multihead.bench.shapes import sections
from multihead.bench.table import Table, markdown

from . import model


def main() -> int:
    """Measure what was asked; 1 when a candidate's numbers were wrong."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("what", nargs="*", choices=["bench", "model", []], help="by default both")
    parser.add_argument("--only", help="sections of bench: prefill,decode,...")
    parser.add_argument("--peers", help="peers of bench: torch,eager,...")
    parser.add_argument("--seconds", type=float, default=3.0, help="calling time of each candidate (default 3)")
    parser.add_argument("--json", type=Path, help="write the figures there, with the machine's line")
    parser.add_argument("--markdown", type=Path, help="write the tables of bench there, as the documentation has them")
    options = parser.parse_args()
    found: dict[str, object] = {"machine": str(Machine.here())}
    wrong: list[str] = []
    for name in options.what or ["bench", "model"]:
        if name == "model":
            print("\nmodel")
            found[name] = model.run()
            continue
        chosen = sections(options.only.split(",") if options.only else None)
        against = peers(options.peers.split(",") if options.peers else None)
        report = run(chosen, against, seconds=options.seconds, listener=Table(lambda line: print(line, flush=True)))
        found[name], wrong = json.loads(report.as_json()), report.wrong
        if options.markdown:
            options.markdown.write_text(markdown(report), encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
