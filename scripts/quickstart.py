"""Train the built-in model by SFT and then PPO, and show that it learned: `verl quickstart` of a checkout."""

import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    from verl.cli.main import app

    app(["quickstart", *sys.argv[1:]], prog_name="verl")
