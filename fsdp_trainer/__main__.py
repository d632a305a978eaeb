import sys

from fsdp_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
