"""The autoencoder of latents `vae:NAME` on the device of a rank: images are encoded as soon as
they are read.
"""

from __future__ import annotations

from mmldlm.data.encoders.devices import device_of_rank
from mmldlm.data.encoders.vae_files import VaeFiles
from mmldlm.data.images.vae_codec import VaeCodec
from mmldlm.data.prepare.images.options import ImageOptions
from mmldlm.data.prepare.task_queue import TaskQueue


def load_encoder(options: ImageOptions, files: VaeFiles, queue: TaskQueue) -> VaeCodec:
    """Load the autoencoder of completed options on the device of this rank.

    Raises:
        UserError: diffusers is not installed, the weights are damaged, or a precision that they do
            not allow.
    """
    from mmldlm.data.encoders.vae import default_device, usable_dtype

    device = device_of_rank(queue.local_rank) or default_device()
    dtype = usable_dtype(files, options.dtype, device)
    folder = None if files.source.startswith("hub:") else str(files.folder.resolve())
    return VaeCodec.of_files(files, options.image_size, dtype, folder).ready(
        device=device, batch_size=options.batch_size
    )
