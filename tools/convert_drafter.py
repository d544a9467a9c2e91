"""Convert the folder of a DFlash drafter to one GGUF file of architecture `dflash`, in the layout of llama.cpp's converter.

    python tools/convert_drafter.py FOLDER OUT.gguf [--kind Q8_0] [--name NAME] [--license SPDX]

In: a drafter in the z-lab or speculators layout. Out: matrices quantized as --kind (as F16 if the row length is not a multiple of
the block size), norms in F32. The file has no tokenizer, since the drafter uses that of the target, so it stores the vocabulary
size. Needs the `gguf` package.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from onedraw.checkpoints.drafter_writer import GGUF_KINDS, convert_drafter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--kind", choices=GGUF_KINDS, default="Q8_0")
    parser.add_argument("--name", default="", help="name stored in the file (default: the name of the folder)")
    parser.add_argument("--license", default="", help="SPDX identifier of the license, stored in the file")
    options = parser.parse_args()
    spec = convert_drafter(options.folder, options.out, kind=options.kind, name=options.name, license_name=options.license)
    print(f"{options.out}: {spec.parameters:,} parameters, {options.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
