"""The zip file behind torch.save: damaged directories are refused, whatever byte is changed."""

from __future__ import annotations

import random

import pytest

from mmldlm.checkpoints.formats.torch_save.reader import TorchFile
from mmldlm.errors import UserError

torch = pytest.importorskip("torch", reason="torch is not installed: nothing to save")


def test_damaged_files_are_refused_or_the_same(tmp_path):
    """Every changed byte or truncation: UserError, or the saved values; never another exception or
    value.
    """
    path, values = tmp_path / "w.pt", torch.arange(64, dtype=torch.float32)
    torch.save({"w": values}, path)
    data, chooser, refused = path.read_bytes(), random.Random(2), 0
    for number in range(1500):
        position = chooser.randrange(len(data))
        byte = bytes([data[position] ^ 1 << chooser.randrange(8)])
        path.write_bytes(
            data[:position] + (b"" if number % 3 == 0 else byte + data[position + 1 :])
        )
        try:
            with TorchFile(path) as file:
                ref = file.load()["w"]
                file.check_ref(ref, "w")
                read = file.read_elements(ref, 0, ref.numel)
                file.verify_read_records()
            assert (read == values.numpy()).all()
        except UserError as error:
            assert "w.pt" in str(error)
            refused += 1
    assert refused > 700


def test_a_compressed_record_is_refused(tmp_path):
    import zipfile

    path = tmp_path / "w.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w/data.pkl", b"}." * 100)
    with pytest.raises(UserError, match="compressed"):
        TorchFile(path)
