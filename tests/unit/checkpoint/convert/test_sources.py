"""Models in GGUF files and in directories of torch.distributed.checkpoint: tensors, settings and tokenizer."""

import json
import shutil

import numpy as np
import pytest

from harness.jobs import call_command
from hpcdist.arrays.piece import Piece
from hpcdist.checkpoint.convert import families, gguf_file
from hpcdist.checkpoint.convert.huggingface import HuggingFaceDirectory
from hpcdist.checkpoint.listing import PARAMETERS
from hpcdist.comm.threads.communicator import run_threads
from hpcdist.errors import ConfigurationError, StorageError
from unit.checkpoint.convert.test_huggingface import SIZES, logits_of_directory, logits_of_transformers, rotary
