"""Check in a script that nothing about how a model runs changes its answers, and fail if something does.

`python examples/prove.py [MODEL]`; `onedraw prove MODEL` is the same on the command line.
"""

import sys

from onedraw.contract.prove import prove
from onedraw.settings import Settings

table = prove(Settings(model=sys.argv[1] if len(sys.argv) > 1 else "smollm2"), quick=True)
for row in table.findings:
    print(f"{row.name:40} {row}")
print(f"{table.model}, fingerprint {table.fingerprint}: {'the contract holds' if table.holds else 'DIFFERENT ANSWERS'}")
raise SystemExit(not table.holds)
