"""Run command lines of vitlab in the processes of one launcher, and note how each ended: JOBS.json, ENDS.json."""

import json
import sys
from pathlib import Path

from vitlab.__main__ import main
from vitlab.engine.distributed import launched

jobs, ends = map(Path, sys.argv[1:])
with launched("cpu") as processes:
    codes = [main(arguments) for arguments in json.loads(jobs.read_text())]
    everybody = processes.gather(codes)
if processes.is_main:
    ends.write_text(json.dumps(everybody))
