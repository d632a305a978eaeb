"""Groups of ranks that share a run, on torchft, which is silenced before its import."""

import logging
import os
import warnings

os.environ.setdefault("RUST_LOG", "error")  # its servers would report every quorum
# what it logs as exceptions are groups that left: RollCall reports them in a line
logging.getLogger("torchft").setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", "The given buffer is not writable", UserWarning)
