"""Torch's own files: whole, damaged, and hostile. What they hold is compared in `test_model.py`."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from jinfercept.errors import ModelError
from jinfercept.models.load import load
from jinfercept.models.torch_weights import TorchFile

GOLDEN = Path(__file__).parent.parent / "golden"
FILE = GOLDEN / "gptj_published" / "pytorch_model.bin"


def test_tensors_are_read_by_rows_in_the_stored_dtype():
    file = TorchFile.open(FILE)
    rows = file.read("transformer.wte.weight", slice(2, 5))
    assert (rows.shape, rows.dtype) == ((3, 32), np.float16)
    assert file.read("transformer.h.0.attn.bias", slice(0, 1)).sum() == 36  # a causal mask of 8 by 8


def test_several_files_are_read_by_their_index(tmp_path):
    directory = shutil.copytree(GOLDEN / "gptj_published", tmp_path / "model")
    (directory / "pytorch_model.bin").rename(directory / "pytorch_model-00001-of-00001.bin")
    index = '{"weight_map": {"transformer.wte.weight": "pytorch_model-00001-of-00001.bin"}}'
    (directory / "pytorch_model.bin.index.json").write_text(index)
    (directory / "training_args.bin").write_bytes(b"no weights")
    assert load(directory).kind == "hf"
    (directory / "pytorch_model-00001-of-00001.bin").unlink()
    with pytest.raises(ModelError, match="pytorch_model-00001-of-00001"):
        load(directory)


@pytest.mark.parametrize("data", [b"", b"\x80\x02}q\x00.", FILE.read_bytes()[:30_000]])
def test_a_damaged_or_old_file_is_refused(tmp_path, data):
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(ModelError, match=r"pytorch_model.bin is not a readable file"):
        TorchFile.open(tmp_path / "pytorch_model.bin")
