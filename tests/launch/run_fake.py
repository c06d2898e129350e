"""The launcher with fake processes: `run_fake.py ARGUMENTS...`, short patience."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[2])

from tools.launch import main  # noqa: E402
from tools.launching.supervisor import Patience  # noqa: E402

FAKES = Path(__file__).with_name("fakes")
PATIENCE = Patience(restarts=3, first_delay_s=0.01, longest_delay_s=0.05, learner_grace_s=100, grace_s=1, poll_s=0.01)

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], root=FAKES, patience=PATIENCE))
