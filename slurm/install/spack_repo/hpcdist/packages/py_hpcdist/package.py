"""hpcdist for Spack 1.0 and later. A test compares the lists with setup.cfg."""

from pathlib import Path

from spack.package import depends_on, license, variant, version  # noqa: A004
from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.python import PythonPackage


class PyHpcdist(PythonPackage, CudaPackage):
    """MPI-native toolkit for distributed training: numpy or cupy, MPI, HDF5."""

    # The clone that contains this file. For a copy elsewhere: `spack develop --path CLONE py-hpcdist@main`.
    git = Path(__file__).resolve().parents[6].as_uri()

    license("BSD-3-Clause")

    version("main", branch="main")
    version("0.2.0", branch="main")  # built from the clone, because there is no published archive

    variant("nvml", default=False, description="Read the energy counters of NVIDIA GPUs")
    variant("analysis", default=False, description="Plot curves, and read results with xarray")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@70.1:", type="build")

    depends_on("py-click@8.1:", type=("build", "run"))
    # With or without +mpi: every rank writes its own file. Without +mpi, HDF5 does not depend on one MPI.
    depends_on("py-h5py@3.11:", type=("build", "run"))
    depends_on("py-jinja2@3.1:", type=("build", "run"))
    depends_on("py-markdown-it-py@3:", type=("build", "run"))
    depends_on("py-ml-dtypes@0.5:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-msgspec@0.19:", type=("build", "run"))
    depends_on("py-numba@0.61:", type=("build", "run"))
    depends_on("py-numpy@2.0:", type=("build", "run"))
    depends_on("py-rich@13.7:", type=("build", "run"))
    depends_on("py-tqdm@4.66:", type=("build", "run"))
    depends_on("py-xxhash@3.4:", type=("build", "run"))

    # +cuda cuda_arch=90: cupy is built for these GPUs; hpcdist compiles its kernels at run time.
    depends_on("py-cupy@13.3: +cuda", when="+cuda", type=("build", "run"))
    for _arch in CudaPackage.cuda_arch_values:
        depends_on(f"py-cupy cuda_arch={_arch}", when=f"+cuda cuda_arch={_arch}", type=("build", "run"))
    depends_on("py-nvidia-ml-py@12:", when="+nvml", type=("build", "run"))
    depends_on("py-matplotlib@3.9:", when="+analysis", type=("build", "run"))
    depends_on("py-xarray@2024.7:", when="+analysis", type=("build", "run"))
    depends_on("py-h5netcdf@1.3:", when="+analysis", type=("build", "run"))

    import_modules = ("hpcdist", "hpcdist.cli.main", "hpcdist.training.recipe")
